"""A worker of two ranks answers as one of one rank does, whatever it is given; a rank that fails ends it."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from joined_cores import PAGE_SIZE, VOCAB
from loop_worker import LoopWorker, placed
from small_models import small_model
from two_ranks import TwoRanks, pages_of
from two_workers import new_scheduler

from pdserve.base.errors import DeviceError, InvariantError
from pdserve.base.ids import PageId
from pdserve.engine.runner import Runner
from pdserve.engine.step import Chunk, StepPlan, StepResult
from pdserve.executor.executor import Executor
from pdserve.executor.local import LocalExecutor
from pdserve.model.family import Model
from pdserve.protocol.sampling import SampledToken
from pdserve.worker.messages import DrainAsked, Placed

NUM_PAGES = 32  # fewer than all prompts and answers of `PLACED` fill
POISON = 13
BEGINNING = [17, 200, 3, 511, 42, 8, 77, 5, 60]
PLACED = (
    placed(1, BEGINNING, max_tokens=24, temperature=0.0),
    placed(2, [*BEGINNING, 9, 9], max_tokens=20, temperature=0.9, top_p=0.95),  # finds the pages of the first
    placed(3, [31, 32, 33, 34, 35], n=3, max_tokens=12, temperature=0.8),  # copies the page that they share
    placed(4, list(range(100, 140)), max_tokens=8, presence_penalty=0.4, repetition_penalty=1.1),  # in three chunks
    placed(5, [400], max_tokens=30, temperature=0.7, logprobs=3),
    placed(6, [*BEGINNING[:8], 1, 2], max_tokens=16, temperature=0.0),
)


class Rank(Runner):
    """A rank's runner, which a test may let fail, answer wrongly or wait."""

    def __init__(self, model: Model) -> None:
        super().__init__(model, NUM_PAGES, PAGE_SIZE, ())
        self.before: Callable[[StepPlan], None] = lambda plan: None
        self.after: Callable[[StepResult], StepResult] = lambda result: result

    def run(self, plan: StepPlan) -> StepResult:
        self.before(plan)
        return self.after(super().run(plan))


@pytest.fixture(scope="module")
def model() -> Model:
    return small_model()


@pytest.fixture
def ranks(model: Model) -> Iterator[TwoRanks]:
    executor = TwoRanks(lambda: Rank(model), PAGE_SIZE)
    yield executor
    executor.close()


def runners(executor: TwoRanks) -> list[Rank]:
    return [rank.runner for rank in executor.ranks if isinstance(rank.runner, Rank)]


def one_rank(model: Model) -> LocalExecutor:
    return LocalExecutor(Rank(model), ThreadPoolExecutor(1, "engine"))


async def answered(executor: Executor, jobs: tuple[Placed, ...]) -> tuple[dict[int, list[int]], list[str]]:
    """Return the tokens that a worker's loop reports of each request, in order, and why requests failed."""
    worker = LoopWorker(new_scheduler(NUM_PAGES), executor.start, VOCAB)
    for each in jobs:
        worker.inbox.put(each)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(worker.loop.run())
        num_poisoned = sum(POISON in each.job.token_ids for each in jobs)
        failed = [(await worker.carried.failed.get()).reason for _ in range(num_poisoned)]
        await worker.carried.finished(sum(len(each.job.indices) for each in jobs) - num_poisoned)
        worker.inbox.put(DrainAsked())
    assert worker.carried.failed.empty()
    worker.scheduler.cache.check()
    assert worker.scheduler.cache.pool.num_free == NUM_PAGES
    return worker.carried.tokens, failed


async def test_two_ranks_answer_as_one_does(model: Model, ranks: TwoRanks) -> None:
    most_under_way = 0
    started: list[Future[StepResult]] = []
    start = ranks.start

    def counted(plan: StepPlan) -> Future[StepResult]:
        nonlocal most_under_way
        started.append(start(plan))
        most_under_way = max(most_under_way, sum(not step.done() for step in started))
        return started[-1]

    ranks.start = counted  # type: ignore[method-assign]
    one = one_rank(model)
    assert await answered(ranks, PLACED) == await answered(one, PLACED)
    assert most_under_way == 2, "steps are started ahead"
    one.close()


async def test_a_request_that_cannot_be_computed_fails_on_both_ranks_and_no_other_does(
    model: Model, ranks: TwoRanks
) -> None:
    def poisoned(plan: StepPlan) -> None:
        if any(POISON in chunk.token_ids for chunk in plan.chunks):
            raise ValueError("poison")

    one = one_rank(model)
    for runner in runners(ranks):
        runner.before = poisoned
    jobs = (*PLACED[:3], placed(7, [40, POISON, 41]))
    tokens, failed = await answered(ranks, jobs)
    assert failed == ["ValueError: poison"]
    assert tokens == (await answered(one, PLACED[:3]))[0]
    one.close()


def step(token_id: int, page: int = 0) -> StepPlan:
    return StepPlan((Chunk((token_id,), 0, (PageId(page),), ()),))


async def ended_by(executor: TwoRanks) -> BaseException:
    """Return what ends a worker's loop."""
    worker = LoopWorker(new_scheduler(NUM_PAGES), executor.start, VOCAB)
    for each in PLACED:
        worker.inbox.put(each)
    with pytest.raises(ExceptionGroup) as caught:
        await asyncio.wait_for(worker.loop.run(), 60)
    (error,) = caught.value.exceptions
    assert worker.carried.failed.empty(), "nobody's request is at fault"
    return error


@pytest.mark.parametrize("number", [0, 1])
async def test_a_rank_that_computes_nothing_any_more_ends_the_worker(
    number: int, ranks: TwoRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    monkeypatch.setattr("os._exit", ended.append)
    steps = iter(range(100))

    def breaks(plan: StepPlan) -> None:
        if next(steps) >= 3:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    runners(ranks)[number].before = breaks
    error = await ended_by(ranks)
    assert isinstance(error, DeviceError)
    assert str(error).startswith(f"rank {number}: DeviceError: ")
    assert ended == [71]


@pytest.mark.parametrize("number", [0, 1])
async def test_a_rank_whose_process_ends_in_a_step_ends_the_worker(
    number: int, ranks: TwoRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    monkeypatch.setattr("os._exit", ended.append)
    computes, may_go_on = threading.Event(), threading.Event()

    def hang(plan: StepPlan) -> None:
        computes.set()
        may_go_on.wait(60)

    runners(ranks)[number].before = hang
    loop = asyncio.create_task(ended_by(ranks))
    await asyncio.to_thread(computes.wait, 60)
    ranks.end(number)
    error = await loop
    may_go_on.set()
    assert isinstance(error, DeviceError)
    assert str(error) == f"rank {number}: ProcessLookupError: its process has ended"
    assert ended == [71]


@pytest.mark.parametrize("number", [0, 1])
async def test_a_rank_that_answers_otherwise_is_a_bug_of_ours(number: int, ranks: TwoRanks) -> None:
    def other(result: StepResult) -> StepResult:
        tokens = [tuple([(SampledToken(1),) for _ in chunk]) for chunk in result.tokens]
        return replace(result, tokens=tuple(tokens))

    runners(ranks)[number].after = other
    error = await ended_by(ranks)
    assert isinstance(error, InvariantError)
    assert str(error) == "ranks 0 and 1 differ in tokens of a step"


async def test_a_request_that_only_one_rank_cannot_compute_is_no_requests_fault(ranks: TwoRanks) -> None:
    def poisoned(plan: StepPlan) -> None:
        if any(511 in chunk.token_ids for chunk in plan.chunks):
            raise ValueError("poison")

    runners(ranks)[1].before = poisoned
    assert "differ in" in str(await ended_by(ranks))


def test_steps_end_in_the_order_in_which_they_were_started_and_a_third_is_refused(ranks: TwoRanks) -> None:
    may_go_on = threading.Event()
    for runner in runners(ranks):
        runner.before = lambda plan: may_go_on.wait(60) and None
    first, second = ranks.start(step(1)), ranks.start(step(2, page=1))
    with pytest.raises(InvariantError, match="started a step while 2 are under way"):
        ranks.start(step(3, page=2))
    order: list[int] = []
    first.add_done_callback(lambda _: order.append(1))
    second.add_done_callback(lambda _: order.append(2))
    may_go_on.set()
    second.result(60)
    assert order == [1, 2]
    assert ranks.start(step(3, page=2)).result(60).tokens == ((),)


@pytest.mark.parametrize("build", [one_rank, lambda model: TwoRanks(lambda: Rank(model), PAGE_SIZE)])
def test_close_waits_for_what_was_started(build: Callable[[Model], Executor], model: Model) -> None:
    executor = build(model)
    steps = [executor.start(step(1)), executor.start(step(2))]
    executor.close()
    assert all(each.done() and each.exception() is None for each in steps)
    with pytest.raises(RuntimeError):
        executor.start(step(3))


def test_each_region_has_the_heads_of_its_rank_and_both_all_of_what_a_step_wrote(model: Model, ranks: TwoRanks) -> None:
    one, plan = one_rank(model), StepPlan((Chunk((7, 8, 9, 10, 11), 0, (PageId(3), PageId(5)), ()),))
    for executor in (one, ranks):
        executor.start(plan).result(60)
    whole = one.region
    assert [2 * region.page_bytes for region in ranks.regions] == [whole.page_bytes] * 2
    assert [region.num_pages for region in ranks.regions] == [NUM_PAGES] * 2
    kv = torch.cat([rank.part for rank in ranks.ranks], dim=3)
    assert torch.equal(kv.view(torch.uint8).view(NUM_PAGES, -1), torch.from_numpy(whole.view))
    assert kv[3].any()
    assert not kv[4].any()
    one.close()


def test_a_step_reads_and_writes_the_pages_that_it_names() -> None:
    pages = tuple(map(PageId, range(4)))
    chunk = Chunk((1, 2), PAGE_SIZE + 3, pages[:3], ())
    assert pages_of(StepPlan((chunk,), ((pages[0], pages[2]), (pages[2], pages[3]))), PAGE_SIZE) == (
        [pages[0], pages[1], pages[2]],
        [pages[1], pages[2], pages[3]],
    )
