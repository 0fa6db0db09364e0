"""Copies that are made to fail: the same ones each time, and none after them suffers."""

import queue

import numpy as np

from pdserve.ids import Attempt, Incarnation, PageId, RequestId, WorkerId
from pdserve.kvtransfer.backends.faulty import FaultyLane
from pdserve.kvtransfer.backends.lane import Indices
from pdserve.kvtransfer.backends.pump import Pump
from pdserve.kvtransfer.mover import CopyStopped, Description, Region
from pdserve.kvtransfer.session import HandoffKey, Peer

HANDOFF = HandoffKey(RequestId(bytes(16)), Attempt(0))

PEER = Peer(WorkerId("peer"), Incarnation(1))
NUM_COPIES = 320


class AtOnce:
    """A lane on which everything lands while it is posted."""

    carrier = "none"

    def open(self, description: Description) -> int:
        return description.num_pages

    def shut(self, remote: int) -> None:
        pass

    def post(self, remote: int, src: Indices, dst: Indices) -> None:
        pass

    def landed(self, posted: None) -> bool:
        raise AssertionError(posted)

    def close(self) -> None:
        pass


def failures(share: float, seed: str) -> list[bool]:
    """Return which of some copies, each written after the last has stopped, have failed."""
    stopped = queue.SimpleQueue[CopyStopped]()
    pages = np.zeros((8, 16), np.uint8)
    pump = Pump("faulty", FaultyLane(AtOnce(), share, seed), Region.of(pages), stopped.put)
    try:
        pump.attach(PEER, Description(0, 8, 16, 0, 1, b"").encode())
        ends = []
        for _ in range(NUM_COPIES):
            pump.write(PEER, HANDOFF, (PageId(1),), (PageId(2),))
            ends.append(stopped.get(timeout=5))
    finally:
        pump.close()
    assert not any(end.in_doubt for end in ends), "nothing of a copy that fails is under way"
    return [end.digests is None for end in ends]


def test_about_the_share_that_was_asked_for_fails_and_the_peer_stays_usable() -> None:
    failed = failures(1 / 16, "a")
    assert 10 <= sum(failed) <= 30
    assert not all(failed[failed.index(True) :]), "the copy after a failed one opens the peer anew"


def test_equal_seeds_fail_the_same_copies() -> None:
    assert failures(1 / 16, "a") == failures(1 / 16, "a") != failures(1 / 16, "b")
