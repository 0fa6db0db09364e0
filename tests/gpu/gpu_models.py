"""Models with random weights on the device, the sequences that they are given, and the loop that computes these."""

import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import torch
from gpu_device import Device
from torch import Tensor

from pdserve.base.ids import Attempt, PageId, RequestId
from pdserve.engine.drafting import Drafter
from pdserve.engine.gpu_memory import step_bytes
from pdserve.engine.kvcache import KvCache
from pdserve.engine.replays import Replays
from pdserve.engine.runner import EngineRunner
from pdserve.engine.runner_cuda import CudaRunner
from pdserve.engine.scheduler import Limits, Scheduler
from pdserve.engine.sequence import Job, Sampled, Sequence
from pdserve.engine.step import Chunk, SampleSpec, StepPlan, StepResult
from pdserve.engine.verification import verifying
from pdserve.model.config import ModelConfig
from pdserve.model.family import Model
from pdserve.model.loading import DUMMY_STD, load_model, shapes_of
from pdserve.model.weights import Part, Stored, Weights
from pdserve.protocol.paging import Paging
from pdserve.protocol.sampling import SamplingParams

Shape = Mapping[str, object]
PAGE_SIZE = 64
DRY_PAGE_SIZE = 16

_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151_936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "eos_token_id": 151_645,
}
QWEN3_0_6B: Shape = {
    **_QWEN3,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "tie_word_embeddings": True,
}
QWEN3_8B: Shape = {
    **_QWEN3,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "tie_word_embeddings": False,
}
TINY: Shape = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "eos_token_id": 5,
}


def config_of(device: Device, shape: Shape, num_layers: int | None = None) -> ModelConfig:
    """Return a shape's config with other layers than its own, if given; in a dry run a tiny one."""
    layers = {} if num_layers is None else {"num_hidden_layers": num_layers}
    return ModelConfig.from_hf({**shape, **device.sized(layers, dict(TINY))})


def random_weights(config: ModelConfig, device: Device) -> Weights:
    """Return random tensors, made on the device when they are read: norms near one, the rest small and normal."""

    def read(name: str, number: int, shape: tuple[int, ...], part: Part) -> Tensor:
        generator = torch.Generator(device.torch).manual_seed(number)
        noise = torch.randn(shape, generator=generator, device=device.torch) * DUMMY_STD
        return (noise + 1.0 if name.endswith("norm.weight") else noise).to(device.half)[part]

    shapes = enumerate(shapes_of(config).items())
    return {name: Stored(shape, partial(read, name, number, shape)) for number, (name, shape) in shapes}


def random_model(config: ModelConfig, device: Device) -> Model:
    return load_model(config, random_weights(config, device), device.half, device=device.torch)


def kv_bytes_per_token(config: ModelConfig) -> int:
    return config.num_layers * 2 * config.num_kv_heads * config.head_dim * torch.bfloat16.itemsize


def limits_of(max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int) -> Limits:
    return Limits(max_num_seqs, max_num_batched_tokens, max_model_len, eos_token_ids=frozenset())


@dataclass(frozen=True, slots=True)
class Engine:
    """A model, its pages, and what computes its steps."""

    runner: CudaRunner
    limits: Limits
    num_pages: int
    page_size: int

    @classmethod
    def of(cls, device: Device, model: Model, limits: Limits, share: float = 0.9, *, captures: bool = True) -> "Engine":
        """Set up as many pages as the sequences may need, or as fit into a share of the device; capture the steps."""
        page_size = device.sized(PAGE_SIZE, DRY_PAGE_SIZE)
        enough = limits.max_num_seqs * -(-limits.max_model_len // page_size)
        needed = step_bytes(model, limits)
        fit = device.memory().pages_that_fit(
            share, device.sized(needed, 0), kv_bytes_per_token(model.config) * page_size
        )
        num_pages = min(enough, fit)
        runner = CudaRunner(model, num_pages, page_size, limits)
        if captures and not device.is_dry:
            runner.capture()
        return cls(runner, limits, num_pages, page_size)

    def scheduler(self) -> Scheduler:
        return Scheduler(KvCache(self.num_pages, Paging.of(self.page_size), None), self.limits)

    def drive(self, sequences: Iterable[Sequence], depth: int) -> "Driven":
        return drive(self.runner, self.scheduler(), sequences, depth)


def sequence_of(order: int, prompt: Seq[int], params: SamplingParams, *, stop_after_prompt: bool = False) -> Sequence:
    job = Job(RequestId(order.to_bytes(16)), Attempt(0), tuple(prompt), len(prompt), replace(params, seed=order), (0,))
    return Sequence(job, (0,), list(prompt), order, stop_after_prompt)


def replay_nothing(runner: CudaRunner) -> None:
    """Let a runner launch kernel by kernel what it would capture and replay."""
    assert isinstance(runner._replays, Replays)
    runner._replays = Replays(torch.device("cpu"))  # which captures nothing


def step_of(engine: Engine, counts: Seq[int], context: int) -> StepPlan:
    """Return a step with so many tokens of each of some sequences, behind `context` others. Greedy."""
    each = engine.num_pages // len(counts)

    def chunk(row: int, count: int) -> Chunk:
        pages = tuple(PageId(row * each + page) for page in range(-(-(context + count) // engine.page_size)))
        spec = SampleSpec(SamplingParams(temperature=0.0), row, 0, (), (), forbid_stops=False, sequence=(0, row))
        return Chunk(tuple(token % 250 for token in range(count)), context, pages, (spec,))

    return StepPlan(tuple(chunk(row, count) for row, count in enumerate(counts)))


def random_prompt(length: int, vocab_size: int, seed: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(vocab_size) for _ in range(length))


@dataclass(slots=True)
class Driven:
    """A workload's result: the tokens of each sequence, when they came, and what the host did meanwhile."""

    texts: dict[int, list[int]] = field(default_factory=dict)  # by the sequence's order
    came_s: dict[int, list[float]] = field(default_factory=dict)  # since the start, for each of them
    total_s: float = 0.0
    waiting_s: float = 0.0  # the host only waited for the device
    planning_s: float = 0.0
    launching_s: float = 0.0
    committing_s: float = 0.0
    num_steps: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.texts.values()))

    @property
    def ttft_ms(self) -> float:
        """Return the median time to the first token."""
        return 1e3 * statistics.median(times[0] for times in self.came_s.values())

    @property
    def tpot_ms(self) -> float:
        """Return the median, over sequences, of the mean time of each later token; 0 where none has two."""
        means = [(times[-1] - times[0]) / (len(times) - 1) for times in self.came_s.values() if len(times) > 1]
        return 1e3 * statistics.median(means or [0.0])


class AnyRunner(Protocol):
    """What computes steps, of which some may be in flight."""

    max_in_flight: int

    def start(self, plan: StepPlan) -> None: ...
    def finish(self) -> StepResult: ...


class OneByOne:
    """Wraps a runner for `drive`: `finish` computes the step, verifies its guesses, and lets a drafter make others."""

    max_in_flight = 1

    def __init__(self, runner: EngineRunner, drafter: Drafter | None = None) -> None:
        run = verifying(runner.run)
        self._run = run if drafter is None else drafter.beside(run)

    def start(self, plan: StepPlan) -> None:
        self._plan = plan

    def finish(self) -> StepResult:
        return self._run(self._plan)


def drive(
    runner: AnyRunner,
    scheduler: Scheduler,
    sequences: Iterable[Sequence],
    depth: int,
    is_over: Callable[[Driven], bool] = lambda _: False,
) -> Driven:
    """Compute all tokens of some sequences, with up to `depth` steps in flight, or until it is over."""
    for sequence in sequences:
        scheduler.add(sequence)
    driven, started_s = Driven(), time.perf_counter()
    in_flight: deque[StepPlan] = deque()
    while True:
        before_s = time.perf_counter()
        if len(in_flight) < depth and not is_over(driven) and (plan := scheduler.plan()) is not None:
            planned_s = time.perf_counter()
            runner.start(plan)
            in_flight.append(plan)
            driven.planning_s += planned_s - before_s
            driven.launching_s += time.perf_counter() - planned_s
            continue
        if not in_flight:
            driven.total_s = time.perf_counter() - started_s
            return driven
        waited_s = time.perf_counter()
        result = runner.finish()
        finished_s = time.perf_counter()
        driven.waiting_s += finished_s - waited_s
        driven.num_steps += 1
        for outcome in scheduler.commit(in_flight.popleft(), result):
            if isinstance(outcome, Sampled):
                driven.texts.setdefault(outcome.sequence.order, []).extend(token.token_id for token in outcome.tokens)
                driven.came_s.setdefault(outcome.sequence.order, []).append(finished_s - started_s)
        driven.committing_s += time.perf_counter() - finished_s
