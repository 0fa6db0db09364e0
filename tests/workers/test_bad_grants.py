"""A prefill worker is granted what its prompt cannot use: that costs this hand-off alone."""

import pytest
from lone_core import LoneCore, grant, job

from pdserve.base.ids import Incarnation, Peer, WorkerId
from pdserve.kvtransfer.doors import StartCopy
from pdserve.kvtransfer.session import Taken
from pdserve.worker.messages import Command

D = Peer(WorkerId("d0"), Incarnation(1))
OTHER = Peer(WorkerId("d1"), Incarnation(1))


class Worker(LoneCore):
    """A prefill worker."""

    def start(self, number: int) -> list[Command]:
        return self.place(job(number, 12), target=D)

    def grant(self, number: int, num_pages: int, *, peer: Peer = D) -> list[Command]:
        return self.hear(peer, number, grant(num_pages))


def of(kind: type, commands: list[Command]) -> list[Command]:
    return [command for command in commands if isinstance(command, kind)]


@pytest.fixture
def worker() -> Worker:
    return Worker(32, 64)


def test_an_early_grant_of_another_peer_does_not_take_the_place_of_the_right_one(worker: Worker) -> None:
    worker.grant(1, 3)
    worker.grant(1, 1, peer=OTHER)
    worker.start(1)
    (copy,) = of(StartCopy, worker.step())
    assert isinstance(copy, StartCopy)
    assert copy.peer == D
    assert len(copy.dst) == 3


def test_a_word_of_taking_what_was_never_sent_does_not_lose_an_early_grant(worker: Worker) -> None:
    worker.grant(1, 3)
    worker.hear(D, 1, Taken())
    worker.start(1)
    assert len(of(StartCopy, worker.step())) == 1
