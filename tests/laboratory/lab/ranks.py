"""What steps take with one rank and with several, or with pipeline stages, which share a worker's threads, in turn."""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter

from lab.decoding import step_of
from pdserve.base.values import value
from pdserve.checkpoint.checkpoint import ChosenQuantization
from pdserve.engine.step import StepPlan
from pdserve.executor.executor import Executor
from pdserve.settings.config import WorkerConfig
from pdserve.worker.boot import build_engine, open_model

_CONTEXT, _PAGE_SIZE = 512, 16  # tokens
_MOST = 16  # sequences
_STEPS = ((1, 1), (8, 1), (_MOST, 1), (1, _CONTEXT))  # sequences, tokens of each
_CHUNK = 64  # of a prompt that takes several steps
_WARM_UP = 2  # rounds


@value
class RankTimes:
    """Milliseconds of a step, and the median of the rounds' ratios."""

    step: str  # or several, two of which are under way
    one_ms: float
    ranks_ms: float
    ranks_to_one: float


def measure_ranks(
    folder: Path, settings: dict[str, int | str], num_threads: int, form: ChosenQuantization, rounds: int
) -> Iterator[RankTimes]:
    """Measure steps of random weights in bfloat16. folder: with the model's config.json. settings: of ranks."""
    with ExitStack() as ends:
        executors = []
        for own in ({}, settings):
            config = WorkerConfig.model_validate({
                "model": str(folder), "worker_id": "w", "routers": ("none:1",), "secret_file": folder, "role": "mixed",
                "load_format": "dummy", "dtype": "bfloat16", "quantization": form, "num_threads": num_threads,
                "num_pages": _MOST * (_CONTEXT // _PAGE_SIZE + 1), **own,
            })  # fmt: skip
            executors.append(build_engine(config, open_model(config), b"none", lambda _: None).executor)
            ends.callback(executors[-1].close)
        plans = {f"{count} x {length}": [_step(count, length)] for count, length in _STEPS}
        plans[f"1 x {_CONTEXT} in {_CONTEXT // _CHUNK}"] = _prompt()
        for name, steps in plans.items():
            taken = list[list[float]]()
            for _ in range(_WARM_UP + rounds):
                begun_s = [perf_counter()]
                for executor in executors:
                    _compute(executor, steps)
                    begun_s.append(perf_counter())
                taken.append([1e3 * (end - begin) for begin, end in pairwise(begun_s)])
            one_ms, ranks_ms = (median(column) for column in zip(*taken[_WARM_UP:], strict=True))
            ratio = median(each[1] / each[0] for each in taken[_WARM_UP:])
            yield RankTimes(step=name, one_ms=one_ms, ranks_ms=ranks_ms, ranks_to_one=ratio)


def _compute(executor: Executor, plans: Sequence[StepPlan]) -> None:
    """Compute steps, with two under way, as a worker's loop does."""
    under_way = deque([executor.start(plan) for plan in plans[:2]])
    for plan in plans[2:]:
        under_way.popleft().result()
        under_way.append(executor.start(plan))
    for step in under_way:
        step.result()


def _step(count: int, length: int) -> StepPlan:
    """Return a step of a token behind each context, or of whole prompts."""
    return step_of(count, _CONTEXT + 1 if length == 1 else length, length)


def _prompt() -> list[StepPlan]:
    """Return the steps of a prompt, of which the last one samples."""
    (whole,) = _step(1, _CONTEXT).chunks
    chunks = []
    for start in range(0, _CONTEXT, _CHUNK):
        end = start + _CHUNK
        samples = whole.samples if end == _CONTEXT else ()
        chunks.append(replace(whole, token_ids=whole.token_ids[start:end], start=start, samples=samples))
    return [StepPlan((replace(chunk, pages=chunk.pages[: (chunk.start + _CHUNK) // _PAGE_SIZE]),)) for chunk in chunks]
