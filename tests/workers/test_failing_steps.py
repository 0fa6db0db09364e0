"""A step that fails costs the sequences that made it fail; a device that computes nothing any more ends the process."""

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from functools import partial

import pytest
from loop_worker import LoopWorker, placed

from faultsim.engine import FakeRunner, expected
from pdserve.base.errors import DeviceError, InvariantError
from pdserve.base.ids import PageId, RequestId
from pdserve.engine.kvcache import KvCache
from pdserve.engine.scheduler import Limits, Scheduler
from pdserve.engine.step import Chunk, SampleSpec, StepPlan, StepResult, joined
from pdserve.executor.failing import Isolating
from pdserve.protocol.paging import Paging
from pdserve.protocol.reports import Failure
from pdserve.protocol.sampling import PromptLogprobs, SampledToken, SamplingParams
from pdserve.worker.messages import DrainAsked, Failed, RouterRef, Tokens
from pdserve.worker.turns import REMEMBERED_S, FailedSteps

VOCAB, PAGE_SIZE, NUM_PAGES = 997, 4, 64
POISON = 13
ROUTER = RouterRef(1)


class Poisoned(FakeRunner):
    """An engine that cannot compute a certain token, and with `dead` nothing at all."""

    dead = False
    num_runs = 0

    def run(self, plan: StepPlan) -> StepResult:
        self.num_runs += 1
        if self.dead:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        result = super().run(plan)
        if any(POISON in chunk.token_ids for chunk in plan.chunks):
            raise ValueError("poison")
        return result


def chunks(*prompts: list[int]) -> tuple[Chunk, ...]:
    return tuple(Chunk(tokens, 0, (PageId(place),), ()) for place, tokens in enumerate(prompts))


def test_a_step_planned_ahead_gets_the_tokens_of_the_one_before_it_also_where_that_was_computed_in_halves() -> None:
    runner, sound = Poisoned(NUM_PAGES, PAGE_SIZE, VOCAB), FakeRunner(NUM_PAGES, PAGE_SIZE, VOCAB)
    steps = Isolating(runner.run)
    asked = (SampleSpec(SamplingParams(), 0, 0, (), (), forbid_stops=False, sequence=(0, 0)),)
    first = tuple(Chunk([token], 0, (PageId(place),), asked) for place, token in enumerate([20, POISON, 22, 23]))
    drawn = steps.run(StepPlan(first)).tokens
    second = tuple(Chunk((0,), 1, (PageId(place),), asked, previous=place) for place in (3, 1, 0))
    ahead = steps.run(StepPlan(second))
    known = tuple(Chunk((drawn[place][0][0].token_id,), 1, (PageId(place),), asked) for place in (3, 0))
    sound.run(StepPlan(first))
    assert (ahead.tokens[0], ahead.tokens[2]) == sound.run(StepPlan(known)).tokens
    assert drawn[1] == ahead.tokens[1] == ()
    assert ahead.failed.keys() == {1}


@pytest.mark.parametrize("num_poisoned", [0, 1, 2, 5])
def test_sequences_that_make_a_step_fail_are_found_among_the_others(num_poisoned: int) -> None:
    rng = random.Random(num_poisoned)
    poisoned = set(rng.sample(range(11), num_poisoned))
    plan = StepPlan(chunks(*([POISON] if place in poisoned else [place + 20] for place in range(11))))
    runner, sound = Poisoned(NUM_PAGES, PAGE_SIZE, VOCAB), FakeRunner(NUM_PAGES, PAGE_SIZE, VOCAB)
    result = Isolating(runner.run).run(plan)
    assert result.failed == dict.fromkeys(poisoned, "ValueError: poison")
    whole = sound.run(plan)
    for place in set(range(11)) - poisoned:
        assert result.tokens[place] == whole.tokens[place]
        assert runner.page(PageId(place)) == sound.page(PageId(place))


def test_all_that_is_known_of_two_halves_is_known_of_the_step() -> None:
    sampled = ((SampledToken(7),),)
    first = StepResult((sampled,), 0.5, stuck={0: "grammar"}, drafts={0: (1, 2)}, draft_s=0.25, num_draft_failures=1)
    scores = PromptLogprobs(b"", b"", b"")
    beside = StepResult((), 0.0, {0: "failed"}, {0: scores}, expert_ratios=(1.5,), pooled={0: b"v"}, take_in_s=0.125)
    second = replace(beside, tokens=((),), elapsed_s=0.25)
    first = replace(first, unverified=frozenset({0}))
    whole = joined([([2], first), ([0], second)], 3)
    assert whole.tokens == ((), (), sampled)
    assert (whole.failed, whole.stuck, whole.prompts) == ({0: "failed"}, {2: "grammar"}, {0: scores})
    assert (whole.drafts, whole.pooled, whole.expert_ratios) == ({2: (1, 2)}, {0: b"v"}, (1.5,))
    assert (whole.elapsed_s, whole.draft_s, whole.take_in_s, whole.num_draft_failures) == (0.75, 0.25, 0.125, 1)
    assert whole.unverified == {2}
    nothing = StepResult(whole.tokens, 0.0)
    assert not [each.name for each in fields(whole)[1:] if getattr(whole, each.name) == getattr(nothing, each.name)]


def test_a_step_that_fails_as_a_whole_alone_costs_nobody_anything() -> None:
    class TooLarge(FakeRunner):
        def run(self, plan: StepPlan) -> StepResult:
            if len(plan.chunks) > 2:
                raise MemoryError("out of memory")
            return super().run(plan)

    result = Isolating(TooLarge(NUM_PAGES, PAGE_SIZE, VOCAB).run).run(StepPlan(chunks([1], [2], [3], [4], [5])))
    assert result.failed == {}


@pytest.mark.parametrize("num_sequences", [1, 7])
def test_an_engine_that_always_raises_is_taken_for_broken_and_no_request_is_blamed(num_sequences: int) -> None:
    runner = Poisoned(NUM_PAGES, PAGE_SIZE, VOCAB)
    runner.dead = True
    with pytest.raises(DeviceError, match="illegal memory access"):
        Isolating(runner.run).run(StepPlan(chunks(*[[5]] * num_sequences)))


def test_pages_are_copied_once_however_often_their_chunks_are_computed() -> None:
    runner = Poisoned(NUM_PAGES, PAGE_SIZE, VOCAB)
    copied: list[int] = []

    def run(plan: StepPlan) -> StepResult:
        copied.append(len(plan.copies))
        return runner.run(plan)

    Isolating(run).run(StepPlan(chunks([1], [POISON], [2]), ((PageId(9), PageId(0)),)))
    assert sum(copied) == 1


def test_a_bug_of_ours_is_no_requests_fault() -> None:
    def run(plan: StepPlan) -> StepResult:
        raise InvariantError("a chunk reaches beyond its pages")

    with pytest.raises(InvariantError):
        Isolating(run).run(StepPlan(chunks([1])))


def failing(plan: StepPlan, *places: int) -> StepResult:
    return StepResult(((),) * len(plan.chunks), 0.0, dict.fromkeys(places, "poison"))


def test_failed_steps_are_counted_until_one_brings_something_or_they_are_long_ago() -> None:
    steps, one, four = FailedSteps(), StepPlan(chunks([1])), StepPlan(chunks([1], [2], [3], [4]))
    assert steps.note(four, failing(four, 0, 1, 2, 3), 0.0)
    assert steps.note(one, failing(one, 0), 1.0)
    assert steps.count(1.0) == 2
    assert steps.count(1.0 + REMEMBERED_S) == 0
    assert not steps.note(four, failing(four, 0, 2, 3), 2.0)
    assert steps.count(2.0) == 0


def after(*places: int | None) -> StepPlan:
    """Return a step planned ahead, of a chunk after each of these of the step before; None: after none."""
    return StepPlan(tuple(Chunk((0,), 1, (PageId(9),), (), previous=place) for place in places))


def test_a_sequence_that_has_failed_is_not_computed_in_the_step_planned_ahead() -> None:
    runner = Poisoned(NUM_PAGES, PAGE_SIZE, VOCAB)
    steps, counted = Isolating(runner.run), FailedSteps()
    for number in (1, 2):  # a worker that fails all it is given, one by one
        alone = StepPlan(chunks([POISON]))
        assert counted.note(alone, steps.run(alone), 0.0)
        num_runs = runner.num_runs
        assert not counted.note(after(0), steps.run(after(0)), 0.0)
        assert (counted.count(0.0), runner.num_runs) == (number, num_runs)


@pytest.mark.parametrize(("failed", "count"), [((0, 1), 2), ((0,), 0)])
def test_only_sequences_that_had_not_failed_decide_what_a_step_planned_ahead_counts(
    failed: tuple[int, ...], count: int
) -> None:
    steps, first, ahead = FailedSteps(), StepPlan(chunks([POISON])), after(0, None)
    steps.note(first, failing(first, 0), 0.0)
    assert steps.note(ahead, failing(ahead, *failed), 0.0) == (count == 2)
    assert steps.count(0.0) == count


class Worker(LoopWorker):
    """The loop of a decode worker that computes prompts itself."""

    def __init__(self) -> None:
        limits = Limits(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64, eos_token_ids=frozenset())
        self.runner = Poisoned(NUM_PAGES, PAGE_SIZE, VOCAB)
        thread, run = ThreadPoolExecutor(1), Isolating(self.runner.run).run
        super().__init__(
            Scheduler(KvCache(NUM_PAGES, Paging.of(PAGE_SIZE), None), limits), partial(thread.submit, run), VOCAB
        )


async def test_one_poisoned_request_among_several_is_the_only_one_that_fails() -> None:
    worker = Worker()
    carried = worker.carried
    prompts = {1: [21, 22], 2: [23, POISON, 24], 3: [25], 4: [26, 27, 28]}
    for number, prompt in prompts.items():
        worker.inbox.put(placed(number, prompt))
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        tasks.create_task(worker.loop.run())
        failed = await carried.failed.get()
        await carried.finished(3)
        worker.inbox.put(DrainAsked())
    assert carried.failed.empty()
    assert (failed.key.request_id, failed.code) == (RequestId((2).to_bytes(16)), Failure.INTERNAL)
    assert failed.reason == "ValueError: poison"
    assert carried.tokens == {n: expected(prompts[n], n, 6, VOCAB) for n in (1, 3, 4)}
    assert carried.loads[-1].failed_steps == 0
    assert worker.scheduler.cache.pool.num_free == NUM_PAGES


async def test_a_request_that_fails_by_itself_is_told_with_a_failed_step() -> None:
    worker = Worker()
    worker.inbox.put(placed(1, [POISON]))
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        tasks.create_task(worker.loop.run())
        await worker.carried.failed.get()
        worker.inbox.put(DrainAsked())
    assert max(load.failed_steps for load in worker.carried.loads) == 1


async def test_a_worker_whose_device_is_broken_ends_and_fails_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr("os._exit", ended.append)
    worker = Worker()
    worker.runner.dead = True
    for number in range(1, 4):
        worker.inbox.put(placed(number, [20 + number]))
    with pytest.raises(ExceptionGroup) as caught:
        await asyncio.wait_for(worker.loop.run(), 20)
    assert caught.group_contains(DeviceError)
    assert ended == [71]
    assert worker.carried.failed.empty()


def test_a_continuation_that_fails_ends_its_request_with_all_its_siblings() -> None:
    worker = Worker()
    core = worker.core
    core.handle(placed(1, [21, 22], n=3), 0.0)
    commands: list[object] = []
    for _ in range(2):
        plan = core.plan(0.0)
        assert plan is not None
        result = worker.runner.run(plan)
        commands = core.commit(plan, result, 0.0)
    plan = core.plan(0.0)
    assert plan is not None
    result = worker.runner.run(plan)
    broken = StepResult((result.tokens[0], (), result.tokens[2]), 0.0, {1: "poison"})
    commands = core.commit(plan, broken, 0.0)
    assert [command.reason for command in commands if isinstance(command, Failed)] == ["poison"]
    assert len([command for command in commands if isinstance(command, Tokens)]) == 1
    assert core.idle
    assert worker.scheduler.cache.pool.num_free == NUM_PAGES
