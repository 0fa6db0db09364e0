"""Copies to a frozen peer do not stop: a prefill worker with too few pages left because of them drains and exits."""

import pytest
from default_rules import default_rules

from faultsim.engine import FakeRunner
from pdserve.engine.kvcache import KvCache
from pdserve.engine.scheduler import Limits, Scheduler
from pdserve.engine.sequence import Job
from pdserve.ids import Attempt, Incarnation, PageId, RequestId, WorkerId
from pdserve.kvtransfer import sender
from pdserve.kvtransfer.doors import HEARTBEAT_S, CancelCopies, ReceiverLost, ReceiverSaid, ToReceiver
from pdserve.kvtransfer.session import Grant, HandoffKey, Peer, Quiesced, Taken
from pdserve.prefill_worker.outgoing import ANSWER_S, STUCK_S
from pdserve.reports import Failure
from pdserve.sampling import SamplingParams
from pdserve.worker.admission import NUM_LOOKS
from pdserve.worker.core import WorkerCore
from pdserve.worker.messages import Command, DrainAsked, Failed, Placed, RouterRef, Ticked

PAGE_SIZE, NUM_PAGES, VOCAB = 4, 16, 100
FROZEN = Peer(WorkerId("frozen"), Incarnation(1))


class Worker:
    """A prefill worker whose copies never stop by themselves."""

    def __init__(self) -> None:
        limits = Limits(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=40, eos_token_ids=frozenset())
        self.scheduler = Scheduler(KvCache(NUM_PAGES, PAGE_SIZE, None), limits)
        self.runner = FakeRunner(NUM_PAGES, PAGE_SIZE, VOCAB)
        self.core = WorkerCore(self.scheduler, VOCAB, self.runner.page_bytes, b"secret", default_rules(max_tasks=8))
        self.now_s = 100.0

    def place(self, number: int, num_pages: int) -> list[Command]:
        key, tokens = key_of(number), tuple(range(num_pages * PAGE_SIZE))
        job = Job(key.request_id, key.attempt, tokens, len(tokens), SamplingParams(max_tokens=4), (0,))
        return self.core.handle(Placed(RouterRef(1), job, 1e9, target=FROZEN, target_address="host:1"), self.now_s)

    def send(self, number: int, num_pages: int) -> None:
        """Compute a prompt, and begin to copy it."""
        self.place(number, num_pages)
        pages = tuple(map(PageId, range(num_pages)))
        grant = Grant(0, pages, (1,) * num_pages, bytes(16), 4.0)
        self.hear(number, grant)
        plan = self.core.plan(self.now_s)
        assert plan is not None
        self.core.commit(plan, self.runner.run(plan), self.now_s)

    def hear(self, number: int, event: sender.Event) -> list[Command]:
        return self.core.handle(ReceiverSaid(FROZEN, key_of(number), event), self.now_s)

    def lose_peer(self) -> list[Command]:
        return self.core.handle(ReceiverLost(FROZEN, "reset"), self.now_s)

    def pass_time(self, seconds: float) -> list[Command]:
        commands: list[Command] = []
        for _ in range(round(seconds / HEARTBEAT_S)):
            self.now_s += HEARTBEAT_S
            commands += self.core.handle(Ticked(HEARTBEAT_S), self.now_s)
        return commands

    def commit(self, number: int) -> None:
        """Send a prompt, and its commit."""
        self.send(number, 4)
        self.hear(number, sender.CopyStopped((7,) * 4))


def key_of(number: int) -> HandoffKey:
    return HandoffKey(RequestId(number.to_bytes(16)), Attempt(0))


@pytest.fixture
def worker() -> Worker:
    return Worker()


def test_a_worker_whose_pages_a_frozen_peer_holds_drains_says_why_and_may_exit(worker: Worker) -> None:
    worker.send(1, 9)
    assert [c for c in worker.lose_peer() if isinstance(c, CancelCopies)] == [CancelCopies(FROZEN, key_of(1))]
    worker.place(2, 9)
    worker.hear(2, Grant(0, tuple(map(PageId, range(9))), (1,) * 9, bytes(16), 4.0))
    assert worker.core.plan(worker.now_s) is None, "it waits for pages"
    commands = worker.pass_time(STUCK_S - 2 * HEARTBEAT_S)
    assert not worker.core.load().draining
    commands = worker.pass_time((4 + NUM_LOOKS) * HEARTBEAT_S)
    refused = [(c.key, c.code, c.reason) for c in commands if isinstance(c, Failed)]
    assert refused == [(key_of(2), Failure.OVERLOADED, "9 of 16 pages are quarantined")]
    load = worker.core.load()
    assert (load.draining, load.drain_reason) == (True, "9 of 16 pages are quarantined")
    assert (load.pages_held, load.pages_quarantined) == (0, 9)
    assert worker.core.drained


def test_a_worker_with_pages_to_spare_goes_on_and_gets_them_back_when_the_copies_stop(worker: Worker) -> None:
    worker.send(1, 8)
    worker.lose_peer()
    worker.pass_time(2 * STUCK_S)
    assert worker.core.load().pages_quarantined == 8
    assert not worker.core.load().draining
    assert not [c for c in worker.hear(1, sender.CopyStopped(None, "cancelled")) if not isinstance(c, ToReceiver)]
    assert worker.core.load().pages_quarantined == 0
    assert worker.scheduler.cache.pool.num_free == NUM_PAGES


def test_a_worker_that_is_asked_to_drain_waits_for_copies_but_not_for_ever(worker: Worker) -> None:
    worker.send(1, 4)
    worker.lose_peer()
    worker.core.handle(DrainAsked(), worker.now_s)
    worker.pass_time(STUCK_S - 2 * HEARTBEAT_S)
    assert not worker.core.drained
    worker.pass_time(4 * HEARTBEAT_S)
    assert worker.core.drained


def test_a_draining_worker_waits_for_a_hand_off_that_goes_on(worker: Worker) -> None:
    worker.send(1, 4)
    worker.core.handle(DrainAsked(), worker.now_s)
    worker.pass_time(3 * STUCK_S)
    assert not worker.core.drained


def test_time_in_which_the_worker_itself_was_frozen_makes_no_copy_stuck(worker: Worker) -> None:
    worker.send(1, 9)
    worker.lose_peer()
    worker.now_s += 60.0
    worker.core.handle(Ticked(60.0), worker.now_s)
    assert not worker.core.load().draining


def test_a_commit_that_is_never_answered_ends_its_attempt_here(worker: Worker) -> None:
    worker.commit(1)
    assert not any(isinstance(command, Failed) for command in worker.pass_time(ANSWER_S - 2 * HEARTBEAT_S))
    commands = worker.pass_time(2 * HEARTBEAT_S)
    (failed,) = [command for command in commands if isinstance(command, Failed)]
    assert (failed.key, failed.code) == (key_of(1), Failure.PEER_LOST)
    (quiesced,) = [command.message for command in commands if isinstance(command, ToReceiver)]
    assert isinstance(quiesced, Quiesced)
    assert worker.core.idle


def test_a_commit_that_is_answered_late_was_taken(worker: Worker) -> None:
    worker.commit(1)
    worker.pass_time(ANSWER_S - 2 * HEARTBEAT_S)
    assert worker.hear(1, Taken()) == []
    assert worker.core.idle
