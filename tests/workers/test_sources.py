"""A fetch waits, starts its prompt, is given up and fails alike, whichever source the pages come from."""

from dataclasses import replace

import pytest
from host_source import PAGE_S, Host
from wired_cores import PAGE_SIZE, ROUTER, core_worker, job, wanted

from pdserve.base.ids import AttemptKey
from pdserve.engine.sequence import Job
from pdserve.protocol.reports import Stage
from pdserve.worker.messages import Cancelled, Command, Due, Failed, Placed, Progress, Tokens

TURN = job(1, 22)  # 5 pages of 4, and 2 tokens
NEXT = replace(job(2, 30), token_ids=(*TURN.token_ids, *range(8)))
KEY = AttemptKey(*NEXT.key)
DUE_S = 5 * PAGE_S


class Worker:
    """A worker whose host has the pages of TURN; of these the device has the first `num_left`."""

    def __init__(self, num_pages: int = 32, num_left: int = 0) -> None:
        self.node = core_worker("p", num_pages)
        self.core, self.said = self.node.core, list[Command]()
        self.take(self.core.handle(Placed(ROUTER, TURN, 1e9), 0.0))
        self.compute()
        self.host = Host(self.node)
        self.host.keep(TURN.token_ids, num_left)
        self.said.clear()

    def take(self, commands: list[Command]) -> None:
        assert not [each for each in commands if isinstance(each, Failed)]
        self.said += commands

    def place(self) -> None:
        self.take(self.core.handle(Placed(ROUTER, NEXT, 1e9), 0.0))

    def compute(self, now_s: float = 0.0) -> bool:
        """Compute what there is to compute; return whether there was anything."""
        num_steps = 0
        while (plan := self.core.plan(now_s)) is not None:
            self.take(self.core.commit(plan, self.node.runner.run(plan), now_s))
            num_steps += 1
        return num_steps > 0

    def stages(self, stage: Stage) -> list[tuple[int, int]]:
        found = [each for each in self.said if isinstance(each, Progress) and each.stage is stage]
        return [(each.cached_tokens, each.pages_reused) for each in found]

    def output(self, each: Job) -> list[int]:
        tokens = [said for said in self.said if isinstance(said, Tokens) and said.key == each.key]
        return [token.token_id for said in tokens for token in said.tokens]

    def assert_answered(self) -> None:
        """The answer is that of one engine, each stage was reported once, and nothing is held."""
        assert self.output(NEXT) == wanted(NEXT)
        assert len(self.stages(Stage.FETCHED)) == 1
        assert len(self.stages(Stage.PREFILL_STARTED)) == 1
        self.assert_nothing_held()

    def assert_nothing_held(self) -> None:
        pool = self.node.scheduler.cache.pool
        self.node.scheduler.cache.check()
        assert self.core.idle
        assert not self.host.under_way
        assert not [pages for claim in self.core.claims() for pages in (claim.held, claim.granted) if pages]
        assert pool.num_free == pool.num_pages
        assert self.core.due_s > 1e9


@pytest.mark.parametrize("num_left", [0, 2])
def test_a_prompt_is_computed_from_where_the_hosts_pages_end_and_gives_the_same_tokens(num_left: int) -> None:
    worker = Worker(num_left=num_left)
    worker.place()
    assert not worker.compute(), "it waits for its pages"
    worker.take(worker.host.land(KEY, 0.5))
    assert worker.compute(0.5)
    assert worker.stages(Stage.FETCHED) == [((5 - num_left) * PAGE_SIZE, num_left)]
    assert worker.stages(Stage.PREFILL_STARTED) == [(5 * PAGE_SIZE, 0)]
    worker.assert_answered()


def test_what_came_is_held_until_the_prompt_has_started() -> None:
    worker = Worker()
    worker.place()
    worker.take(worker.host.land(KEY, 0.5))
    cache = worker.node.scheduler.cache
    others = cache.take(cache.pool.num_free)
    assert others is not None
    cache.pool.release(others)
    worker.compute(0.5)
    assert worker.stages(Stage.PREFILL_STARTED) == [(5 * PAGE_SIZE, 0)]
    worker.assert_answered()


def test_pages_that_are_later_than_their_source_has_predicted_are_given_up_and_computed() -> None:
    worker = Worker()
    worker.place()
    assert worker.core.due_s == DUE_S
    worker.take(worker.core.handle(Due(), DUE_S - 0.01))
    assert not worker.compute(DUE_S - 0.01)
    worker.take(worker.core.handle(Due(), DUE_S))
    assert not worker.host.under_way
    assert worker.compute(DUE_S)
    assert worker.stages(Stage.FETCHED) == [(0, 0)]
    worker.assert_answered()


def test_a_source_that_fails_costs_no_more_than_computing() -> None:
    worker = Worker()
    worker.place()
    worker.take(worker.host.fail(KEY, 0.5))
    assert worker.compute(0.5)
    assert worker.stages(Stage.FETCHED) == [(0, 0)]
    worker.assert_answered()


def test_without_room_nothing_is_begun_and_the_prompt_starts_at_once() -> None:
    worker = Worker(num_pages=12)
    cache = worker.node.scheduler.cache
    taken = cache.take(cache.pool.num_free - 4)
    assert taken is not None
    worker.place()
    assert not worker.host.under_way
    assert worker.stages(Stage.FETCHED) == [(0, 0)]
    cache.pool.release(taken)
    assert worker.compute()
    worker.assert_answered()


@pytest.mark.parametrize("num_left", [0, 3])
def test_a_prompt_that_ends_while_it_waits_gives_all_pages_back(num_left: int) -> None:
    worker = Worker(num_left=num_left)
    worker.place()
    worker.take(worker.core.handle(Cancelled(*NEXT.key), 0.5))
    assert not worker.compute(0.5)
    worker.assert_nothing_held()


def test_what_the_device_has_is_not_brought_from_the_host() -> None:
    worker = Worker(num_left=5)
    worker.place()
    assert not worker.host.under_way
    assert worker.compute()
    assert worker.stages(Stage.FETCHED) == [(0, 5)]
    worker.assert_answered()
