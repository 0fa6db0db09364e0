"""What steps take with one rank and with several, which share a worker's threads, in turn."""

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter

from pdserve.base.ids import PageId
from pdserve.base.values import value
from pdserve.checkpoint.checkpoint import ChosenQuantization
from pdserve.engine.step import Chunk, Phase, SampleSpec, StepPlan
from pdserve.protocol.sampling import SamplingParams
from pdserve.settings.config import WorkerConfig
from pdserve.worker.boot import build_engine, open_model

_CONTEXT, _PAGE_SIZE = 512, 16  # tokens
_MOST = 16  # sequences
_STEPS = ((1, 1), (8, 1), (_MOST, 1), (1, _CONTEXT))  # sequences, tokens of each
_WARM_UP = 2  # rounds


@value
class RankTimes:
    """Milliseconds of a step, and the median of the rounds' ratios."""

    step: str
    one_ms: float
    ranks_ms: float
    ranks_to_one: float


def measure_ranks(
    folder: Path, num_ranks: int, num_threads: int, form: ChosenQuantization, rounds: int
) -> Iterator[RankTimes]:
    """Measure steps of random weights in bfloat16. folder: with the model's config.json."""
    with ExitStack() as ends:
        executors = []
        for size in (1, num_ranks):
            config = WorkerConfig.model_validate({
                "model": str(folder), "worker_id": "w", "routers": ("none:1",), "secret_file": folder, "role": "mixed",
                "load_format": "dummy", "dtype": "bfloat16", "quantization": form, "num_threads": num_threads,
                "tensor_parallel_size": size, "num_pages": _MOST * (_CONTEXT // _PAGE_SIZE + 1),
            })  # fmt: skip
            executors.append(build_engine(config, open_model(config), b"none", lambda _: None).executor)
            ends.callback(executors[-1].close)
        for count, length in _STEPS:
            plan, taken = _plan(count, length), list[list[float]]()
            for _ in range(_WARM_UP + rounds):
                begun_s = [perf_counter()]
                for executor in executors:
                    executor.start(plan).result()
                    begun_s.append(perf_counter())
                taken.append([1e3 * (end - begin) for begin, end in pairwise(begun_s)])
            one_ms, ranks_ms = (median(column) for column in zip(*taken[_WARM_UP:], strict=True))
            ratio = median(each[1] / each[0] for each in taken[_WARM_UP:])
            yield RankTimes(step=f"{count} x {length}", one_ms=one_ms, ranks_ms=ranks_ms, ranks_to_one=ratio)


def _plan(count: int, length: int) -> StepPlan:
    """Return a step of tokens behind contexts of zeros, or of a whole prompt."""
    start, phase = (_CONTEXT, Phase.DECODE) if length == 1 else (0, Phase.PROMPT)
    per_row = _CONTEXT // _PAGE_SIZE + 1
    greedy, chunks = SamplingParams(temperature=0.0), []
    for row in range(count):
        pages = tuple(PageId(row * per_row + page) for page in range(-(-(start + length) // _PAGE_SIZE)))
        sample = SampleSpec(greedy, 0, 0, (), (), forbid_stops=False, sequence=(0, row))
        chunks.append(Chunk(list(range(10, 10 + length)), start, pages, (sample,), phase))
    return StepPlan(tuple(chunks))
