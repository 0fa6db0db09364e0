"""One worker through whose doors KV leaves and arrives at once; what becomes of both with a request, or a peer."""

import pytest
from lone_core import LoneCore, grant, job, key_of

from pdserve.base.ids import AttemptKey, Incarnation, Peer, WorkerId
from pdserve.kvtransfer import doors
from pdserve.kvtransfer.session import Grant
from pdserve.protocol.reports import Failure
from pdserve.worker.admission import Draining
from pdserve.worker.messages import Command, DrainAsked, DrainCancelled, Failed, Tokens

NUM_PAGES = 32
PEER = Peer(WorkerId("other"), Incarnation(3))
PROMPT = tuple(range(10))  # three pages
LEAVES, ARRIVES, STAYS = map(key_of, (1, 2, 3))


class Worker(LoneCore):
    """A core that is attached to a peer, which is both a receiver and a sender."""

    def __init__(self) -> None:
        super().__init__(NUM_PAGES)
        self.handle(doors.SenderAttached(PEER))
        self.handle(doors.ReceiverAttached(PEER))

    def arrive(self, max_tokens: int = 3) -> Grant:
        """Place a request that is to arrive; return what is granted for it."""
        commands = self.place(job(2, len(PROMPT), max_tokens), source=PEER)
        (grant,) = [c.message for c in commands if isinstance(c, doors.ToSender)]
        return grant

    def leave(self) -> None:
        self.place(job(1, len(PROMPT), max_tokens=3), target=PEER)

    def stay(self) -> list[Command]:
        return self.place(job(3, len(PROMPT), max_tokens=3))

    def grant(self) -> None:
        """Let the receiver grant room for what leaves."""
        self.hear(PEER, 1, grant(3))


@pytest.fixture
def worker() -> Worker:
    return Worker()


def keys_of(kind: type[Tokens] | type[Failed], commands: list[Command]) -> list[AttemptKey]:
    return [command.key for command in commands if isinstance(command, kind)]


def test_a_process_that_has_ended_closes_both_doors_to_it_and_is_forgotten_once(worker: Worker) -> None:
    worker.arrive()
    worker.leave()
    worker.stay()
    worker.grant()
    worker.step()
    commands = worker.handle(doors.PeerGone(PEER))
    assert sorted(keys_of(Failed, commands)) == [LEAVES, ARRIVES]
    assert {c.code for c in commands if isinstance(c, Failed)} == {Failure.PEER_LOST}
    assert commands[-1] == doors.Forget(PEER)
    assert commands.count(doors.Forget(PEER)) == 1
    assert worker.core.load().pages_granted == 0
    worker.hear(PEER, 1, doors.CopyStopped(None, "its process ended"))
    assert worker.core.load().pages_held == 3, "of the request that stays"


def test_a_worker_that_drains_takes_work_again_unless_a_signal_came_or_it_drains_by_itself(worker: Worker) -> None:
    worker.leave()
    worker.handle(DrainAsked())
    assert keys_of(Failed, worker.stay()) == [STAYS]
    worker.handle(DrainCancelled())
    assert not worker.core.load().draining
    assert keys_of(Failed, worker.stay()) == []
    worker.handle(DrainAsked(is_final=True))
    worker.handle(DrainAsked())
    worker.handle(DrainCancelled())
    assert worker.core.load().draining
    draining = Draining(max_quarantined_share=0.5)
    while not draining.look(num_quarantined=6, num_pages=10):
        pass
    draining.take(DrainCancelled())
    assert draining.is_on
