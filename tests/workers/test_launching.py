"""Steps that are launched while the one before is computed bring what steps one by one bring."""

import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import pytest
import torch

from faultsim.engine import FakeRunner
from pdserve.base.errors import DeviceError, InvariantError
from pdserve.base.ids import PageId
from pdserve.engine.step import Chunk, Draft, Phase, SampleSpec, StepPlan, StepResult
from pdserve.executor.failing import Isolating
from pdserve.executor.launching import Launches
from pdserve.executor.local import LocalExecutor
from pdserve.protocol.sampling import SampledToken, SamplingParams

VOCAB, PAGE_SIZE, NUM_PAGES = 997, 4, 64
POISON = 13
NUM_SEQUENCES = 4


class Device(FakeRunner):
    """Computes what was launched when somebody waits for it.

    Cannot compute a certain token, nor launch the step that it `refuses`, and `breaks` later on.
    """

    kv = torch.zeros(NUM_PAGES, PAGE_SIZE, VOCAB)

    def __init__(self) -> None:
        super().__init__(NUM_PAGES, PAGE_SIZE, VOCAB)
        self.calls: list[str] = []
        self.breaks = False
        self.refuses: StepPlan | None = None
        self._in_flight: deque[StepPlan] = deque()
        self._drawn: tuple[tuple[SampledToken, ...], ...] = ()

    def start(self, plan: StepPlan) -> None:
        if len(self._in_flight) == 2:
            raise InvariantError("a third step")
        if plan is self.refuses:
            raise ValueError("refused")
        if any(POISON in chunk.token_ids for chunk in plan.chunks):
            raise ValueError("poison")
        self._in_flight.append(plan)
        self.calls.append("start")

    def finish(self) -> StepResult:
        self.calls.append("finish")
        if self.breaks:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return self._compute_all(self._in_flight.popleft())

    def run(self, plan: StepPlan) -> StepResult:
        assert not self._in_flight, "computed beside a step in flight"
        self.calls.append("run")
        if any(POISON in chunk.token_ids for chunk in plan.chunks):
            raise ValueError("poison")
        return self._compute_all(plan)

    def _compute_all(self, plan: StepPlan) -> StepResult:
        result = super().run(replace(plan, chunks=tuple(map(self._known, plan.chunks))))
        if plan.chunks:
            self._drawn = result.tokens
        return result

    def _known(self, chunk: Chunk) -> Chunk:
        if chunk.previous is None:
            return chunk
        return replace(chunk, token_ids=(self._drawn[chunk.previous][0][0].token_id,), previous=None)


class Engine:
    """Launches steps in one thread and waits for them in another."""

    def __init__(self) -> None:
        self.device = Device()
        self.launches = Launches(self.device, Isolating(self.device.run))
        self._thread, self._ends = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._may_end = threading.Semaphore(0)

    def start(self, plan: StepPlan) -> Future[StepResult]:
        """Start a step, and return once it is launched or known to wait for those before it."""
        launched = self._thread.submit(self.launches.launch, plan)
        with suppress(TimeoutError):
            launched.exception(0.2)
        return self._ends.submit(self._finish, launched)

    def let_end(self, num_steps: int = 1) -> None:
        self._may_end.release(num_steps)

    def _finish(self, launched: "Future[StepResult | None]") -> StepResult:
        self._may_end.acquire()
        return self.launches.finish(launched)


def spec(index: int, **params: object) -> SampleSpec:
    return SampleSpec(SamplingParams(**params), 7, index, (), (), forbid_stops=False, sequence=(0, 0))  # type: ignore[arg-type]


def step(index: int, **params: object) -> StepPlan:
    """Return the step that draws the token of that number of each sequence; but for the first, planned ahead."""
    before = [None] * NUM_SEQUENCES if index == 0 else list(range(NUM_SEQUENCES))
    return StepPlan(
        tuple(
            Chunk(
                (20 + place if index == 0 else 0,),
                index,
                tuple(PageId(8 * place + page) for page in range(1 + index // PAGE_SIZE)),
                (spec(index, **params),),
                previous=previous,
            )
            for place, previous in enumerate(before)
        )
    )


def one_by_one(plans: list[StepPlan]) -> list[StepResult]:
    steps = Isolating(FakeRunner(NUM_PAGES, PAGE_SIZE, VOCAB).run)
    return [steps.run(plan) for plan in plans]


def ahead(engine: Engine, plans: list[StepPlan]) -> list[StepResult]:
    """Compute steps, each started while the one before it is in flight."""
    results, running = [], deque[Future[StepResult]]()
    for plan in plans:
        running.append(engine.start(plan))
        if len(running) == 2:
            engine.let_end()
            results.append(running.popleft().result(5))
    engine.let_end(len(running))
    return [*results, *[each.result(5) for each in running]]


def tokens(results: list[StepResult]) -> list[object]:
    return [result.tokens for result in results]


def test_the_next_step_is_launched_before_one_is_over() -> None:
    engine, plans = Engine(), [step(index) for index in range(6)]
    assert tokens(ahead(engine, plans)) == tokens(one_by_one(plans))
    assert engine.device.calls == ["start", *["start", "finish"] * 5, "finish"]


@pytest.mark.parametrize("place", [1, 4])
def test_what_cannot_be_launched_is_computed_once_the_others_are_over_and_launching_goes_on(place: int) -> None:
    engine, plans = Engine(), [step(index) for index in range(7)]
    engine.device.refuses = plans[place]
    assert tokens(ahead(engine, plans)) == tokens(one_by_one(plans))
    assert engine.device.calls.count("run") == 1
    assert engine.device.calls[-3:] == ["start", "finish", "finish"]


def test_a_step_with_guesses_is_computed_once_the_others_are_over() -> None:
    engine, first = Engine(), step(0)
    wrong = one_by_one([first])[0].tokens[0][0][0].token_id + 1
    guessed = replace(first.chunks[0], token_ids=(20, wrong), phase=Phase.DECODE, num_drafts=1)
    plans = [first, StepPlan((guessed, *first.chunks[1:]))]
    assert tokens(ahead(engine, plans)) == tokens(one_by_one([first, first]))
    assert engine.device.calls == ["start", "finish", "run"]


def test_a_step_behind_which_a_draft_model_guesses_is_computed_once_the_others_are_over() -> None:
    engine, (first, second, third) = Engine(), [step(index) for index in range(3)]
    drafted = replace(second.chunks[0], draft=Draft((20,), 0, 3))
    plans = [first, StepPlan((drafted, *second.chunks[1:])), third]
    assert tokens(ahead(engine, plans)) == tokens(one_by_one([first, second, third]))
    assert engine.device.calls == ["start", "finish", "run", "start", "finish"]


def test_steps_that_bring_log_probabilities_are_launched_like_others() -> None:
    engine, plans = Engine(), [step(index, logprobs=1) for index in range(3)]
    assert tokens(ahead(engine, plans)) == tokens(one_by_one(plans))
    assert engine.device.calls.count("start") == len(plans)


def test_pages_are_copied_before_the_step_that_needs_them() -> None:
    engine, plans = Engine(), [step(index) for index in range(3)]
    copied = tuple(Chunk((0,), 2, (PageId(60 + place),), (spec(2),), previous=place) for place in range(NUM_SEQUENCES))
    plans[2] = StepPlan(copied, tuple((PageId(8 * place), PageId(60 + place)) for place in range(NUM_SEQUENCES)))
    assert tokens(ahead(engine, plans)) == tokens(one_by_one([step(index) for index in range(3)]))
    assert "run" not in engine.device.calls


def test_pages_that_were_copied_for_a_step_that_was_not_launched_are_copied_again() -> None:
    engine, plans = Engine(), [step(index) for index in range(3)]
    poisoned = Chunk((POISON,), 0, (PageId(50),), (spec(0),))
    copied = tuple(Chunk((0,), 2, (PageId(60 + place),), (spec(2),), previous=place) for place in range(NUM_SEQUENCES))
    copies = tuple((PageId(8 * place), PageId(60 + place)) for place in range(NUM_SEQUENCES))
    plans[2] = StepPlan((*copied, poisoned), copies)
    *_, last = ahead(engine, plans)
    assert set(last.failed) == {NUM_SEQUENCES}
    assert last.tokens[:-1] == one_by_one([step(index) for index in range(3)])[2].tokens


def test_a_sequence_that_cannot_be_launched_costs_no_other_anything() -> None:
    engine, sound = Engine(), [step(index) for index in range(4)]
    chunks = sound[0].chunks
    plans = [StepPlan((chunks[0], replace(chunks[1], token_ids=(POISON,)), *chunks[2:])), *sound[1:]]
    results = ahead(engine, plans)
    assert [set(result.failed) for result in results[:2]] == [{1}, {1}], "its next step was planned by then"
    for wanted, result in zip(one_by_one(sound)[:2], results, strict=False):
        kept = [place for place in range(NUM_SEQUENCES) if place != 1]
        assert [result.tokens[place] for place in kept] == [wanted.tokens[place] for place in kept]


def test_what_breaks_once_it_was_launched_is_nobodys_fault() -> None:
    engine = Engine()
    engine.device.breaks = True
    first, second = engine.start(step(0)), engine.start(step(1))
    engine.let_end(2)
    for result in (first, second):
        with pytest.raises(DeviceError, match="illegal memory access"):
            result.result(5)


def test_a_bug_of_ours_is_no_devices_fault() -> None:
    engine = Engine()
    running = [engine.start(step(index)) for index in range(3)]
    engine.let_end(3)
    with pytest.raises(InvariantError, match="a third step"):
        running[2].result(5)


@pytest.mark.parametrize(("step_s", "calls"), [(0.0, ["start", "finish"]), (0.001, ["run"])])
def test_a_runner_that_launches_is_used_so_unless_steps_are_paced(step_s: float, calls: list[str]) -> None:
    device = Device()
    executor = LocalExecutor(device, ThreadPoolExecutor(1), step_s=step_s)
    result = executor.start(step(0)).result(5)
    executor.close()
    assert result.tokens == one_by_one([step(0)])[0].tokens
    assert device.calls == calls
