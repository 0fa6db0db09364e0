"""Copies to a frozen peer do not stop: a prefill worker with too few pages left because of them drains and exits."""

import pytest
from lone_core import PAGE_SIZE, LoneCore, grant, job, key_of

from pdserve.base.ids import Incarnation, Peer, WorkerId
from pdserve.kvtransfer.doors import HEARTBEAT_S, CancelCopies, CopyStopped, ReceiverLost, ToReceiver
from pdserve.kvtransfer.session import Quiesced, Taken
from pdserve.prefill_worker.outgoing import ANSWER_S, STUCK_S
from pdserve.protocol.reports import Failure
from pdserve.worker.admission import NUM_LOOKS
from pdserve.worker.messages import Command, DrainAsked, Failed, Ticked

NUM_PAGES = 16
FROZEN = Peer(WorkerId("frozen"), Incarnation(1))


class Worker(LoneCore):
    """A prefill worker whose copies never stop by themselves."""

    def start(self, number: int, num_pages: int) -> None:
        """Place a prompt that has its grant."""
        self.place(job(number, num_pages * PAGE_SIZE), target=FROZEN)
        self.hear(FROZEN, number, grant(num_pages))

    def send(self, number: int, num_pages: int) -> None:
        """Compute a prompt, and begin to copy it."""
        self.start(number, num_pages)
        self.step()

    def lose_peer(self) -> list[Command]:
        return self.handle(ReceiverLost(FROZEN, "reset"))

    def commit(self, number: int) -> None:
        """Send a prompt, and its commit."""
        self.send(number, 4)
        self.hear(FROZEN, number, CopyStopped((7,) * 4))


@pytest.fixture
def worker() -> Worker:
    return Worker(NUM_PAGES)


def test_a_worker_whose_pages_a_frozen_peer_holds_drains_says_why_and_may_exit(worker: Worker) -> None:
    worker.send(1, 9)
    assert [c for c in worker.lose_peer() if isinstance(c, CancelCopies)] == [CancelCopies(FROZEN, key_of(1))]
    worker.start(2, 9)
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
    assert not [c for c in worker.hear(FROZEN, 1, CopyStopped(None, "cancelled")) if not isinstance(c, ToReceiver)]
    assert worker.core.load().pages_quarantined == 0
    assert worker.cache.pool.num_free == NUM_PAGES


def test_a_worker_that_is_asked_to_drain_waits_for_copies_but_not_for_ever(worker: Worker) -> None:
    worker.send(1, 4)
    worker.lose_peer()
    worker.handle(DrainAsked())
    worker.pass_time(STUCK_S - 2 * HEARTBEAT_S)
    assert not worker.core.drained
    worker.pass_time(4 * HEARTBEAT_S)
    assert worker.core.drained


def test_a_draining_worker_waits_for_a_hand_off_that_goes_on(worker: Worker) -> None:
    worker.send(1, 4)
    worker.handle(DrainAsked())
    worker.pass_time(3 * STUCK_S)
    assert not worker.core.drained


def test_time_in_which_the_worker_itself_was_frozen_makes_no_copy_stuck(worker: Worker) -> None:
    worker.send(1, 9)
    worker.lose_peer()
    worker.now_s += 60.0
    worker.handle(Ticked(60.0))
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
    assert worker.hear(FROZEN, 1, Taken()) == []
    assert worker.core.idle
