"""Copies that NIXL is made to fail: the same ones each time, and none after them suffers."""

import queue

import numpy as np
from divided_pages import Divided, by_heads, random_pages
from mover_settings import pages
from ranked_movers import ranked_mover

from pdserve.base.clock import new_incarnation
from pdserve.base.ids import Attempt, AttemptKey, Incarnation, PageId, Peer, RequestId, WorkerId
from pdserve.kvtransfer.backends.nixl import NixlBackend
from pdserve.kvtransfer.backends.ucx import Network
from pdserve.kvtransfer.doors import ReceiverMessage
from pdserve.kvtransfer.mover import Mover
from pdserve.kvtransfer.region import Region

HANDOFF = AttemptKey(RequestId(bytes(16)), Attempt(0))

PEER = Peer(WorkerId("peer"), Incarnation(1))
NUM_COPIES = 320


def failures(share: float, seed: str) -> list[bool]:
    """Return which of some copies, each written after the last has stopped, have failed."""
    stopped = queue.SimpleQueue[ReceiverMessage]()
    ours, theirs = np.ones((8, 4096), np.uint8), np.zeros((8, 4096), np.uint8)
    receiver = Mover(NixlBackend(PEER, Region.of(theirs), Network()), lambda _: None)
    me = Peer(WorkerId(seed), new_incarnation())
    writer = Mover(NixlBackend(me, Region.of(ours), Network(), share), stopped.put)
    try:
        writer.attach(PEER, receiver.describe())
        ends = []
        for _ in range(NUM_COPIES):
            writer.write(PEER, HANDOFF, (PageId(1),), (PageId(2),))
            ends.append(stopped.get(timeout=5).event)
    finally:
        writer.close()
        receiver.close()
    assert not any(end.in_doubt for end in ends), "nothing of a copy that fails is under way"
    return [end.digests is None for end in ends]


def test_about_the_share_that_was_asked_for_fails_and_the_peer_stays_usable() -> None:
    failed = failures(1 / 16, "a")
    assert 10 <= sum(failed) <= 30
    assert not all(failed[failed.index(True) :]), "the copy after a failed one opens the peer anew"


def test_equal_seeds_fail_the_same_copies() -> None:
    assert failures(1 / 16, "a") == failures(1 / 16, "a") != failures(1 / 16, "b")


def test_a_slice_that_cannot_be_posted_to_a_second_rank_leaves_no_copy_in_doubt_when_the_first_one_has_it() -> None:
    stopped, network = queue.SimpleQueue[ReceiverMessage](), Network(tcp_only=True)  # where no slice lands at once
    ours, theirs = (Divided.of(random_pages(8, seed), by_heads(seed)).regions for seed in (1, 2))
    writing = NixlBackend(Peer(WorkerId("c"), new_incarnation()), ours[0], network, 0.4)
    with (
        ranked_mover([NixlBackend(PEER, region, network) for region in theirs], lambda _: None) as receiver,
        ranked_mover([writing], stopped.put) as writer,
    ):
        writer.attach(PEER, receiver.describe())
        ends = []
        for _ in range(60):
            writer.write(PEER, HANDOFF, pages(1), pages(2))
            ends.append(stopped.get(timeout=20).event)
    assert 20 <= sum(end.digests is None for end in ends) <= 55
    assert not any(end.in_doubt for end in ends)
