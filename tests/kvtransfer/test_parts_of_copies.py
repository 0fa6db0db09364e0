"""What a worker orders of the movers of its ranks, each of them does; what becomes of one rank's part, it is told."""

import queue
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
from scripted_backend import (
    FIRST,
    HANDOFF,
    NUM_PAGES,
    PAGE_BYTES,
    PROBE_PAGES,
    SECOND,
    ScriptedBackend,
    scripted_backend,
)

from pdserve.base.clock import VirtualClock
from pdserve.base.ids import PageId, Peer
from pdserve.kvtransfer.channels import MAX_SLICES_IN_FLIGHT, MIN_SLICE_PAGES
from pdserve.kvtransfer.doors import CopyStopped, ReceiverMessage
from pdserve.kvtransfer.ranked_mover import RankedMover
from pdserve.kvtransfer.region import Description, encode_ranks
from pdserve.kvtransfer.routes import Share
from pdserve.kvtransfer.speed import WINDOW_S

SHARES = Share((0, 1), (0, 1)), Share((0, 1), (1, 2))
DESCRIPTION = encode_ranks([(share, Description(0, NUM_PAGES, PAGE_BYTES, 0, PROBE_PAGES, b"")) for share in SHARES])


@dataclass
class Ranks:
    """Two ranks, whose slices end when a test says so."""

    backends: tuple[ScriptedBackend, ScriptedBackend]
    clock: VirtualClock
    mover: RankedMover
    stopped: "queue.SimpleQueue[ReceiverMessage]"

    def write(self, peer: Peer, num_slices: int) -> None:
        """Write a copy, and return when each rank has posted what it may of it."""
        before = [len(backend.posted) for backend in self.backends]
        pages = tuple(PageId(n) for n in range(num_slices * MIN_SLICE_PAGES))
        self.mover.write(peer, HANDOFF, pages, pages)
        num_posted = min(num_slices, MAX_SLICES_IN_FLIGHT)
        for backend, had in zip(self.backends, before, strict=True):
            backend.until(lambda at=backend, end=had + num_posted: len(at.posted) == end)  # type: ignore[misc]

    def land(self, rank: int) -> None:
        for posted in self.backends[rank].posted:
            posted.end = "landed"

    def both_stopped(self) -> list[CopyStopped]:
        """Return how both parts of a copy have ended, in the order of ranks."""
        ended = [self.stopped.get(timeout=20).event for _ in self.backends]
        assert all(isinstance(each, CopyStopped) for each in ended)
        return sorted(ended, key=lambda each: each.part)  # type: ignore[union-attr, return-value]


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    backends, clock = (scripted_backend(SHARES[0]), scripted_backend(SHARES[1])), VirtualClock()
    stopped = queue.SimpleQueue[ReceiverMessage]()
    mover = RankedMover(backends, stopped.put, clock)
    for peer in (FIRST, SECOND):
        mover.attach(peer, DESCRIPTION)
    yield Ranks(backends, clock, mover, stopped)
    mover.close()


def test_of_a_cancelled_hand_off_no_rank_posts_any_more(ranks: Ranks) -> None:
    ranks.write(FIRST, 10)
    ranks.mover.cancel(FIRST, HANDOFF)
    for rank in (0, 1):
        ranks.land(rank)
    first = CopyStopped(None, "cancelled")
    assert ranks.both_stopped() == [first, replace(first, part=1)]
    assert [len(backend.posted) for backend in ranks.backends] == [MAX_SLICES_IN_FLIGHT] * 2


def test_each_rank_reports_its_part_of_a_copy_to_a_process_that_has_ended(ranks: Ranks) -> None:
    ranks.write(FIRST, 1)
    ranks.mover.forget(FIRST)
    first = CopyStopped(None, "the process of first has ended")
    assert ranks.both_stopped() == [first, replace(first, part=1)]


@pytest.mark.parametrize("busy", [0, 1])
def test_a_rank_that_still_writes_is_watched_whichever_it_is(ranks: Ranks, busy: int) -> None:
    ranks.write(FIRST, 1)
    ranks.land(1 - busy)
    ranks.backends[busy].let_it_look()
    before = ranks.mover.turns[busy]
    ranks.backends[busy].let_it_look()
    assert before is not None
    assert ranks.mover.turns[busy] not in (None, before)
    assert any(ranks.mover.turns[1 - busy] is None for _ in range(10_000_000)), "it soon has nothing to do"


@pytest.mark.parametrize("stalled", [0, 1])
def test_a_peer_counts_as_stalled_once_if_the_bytes_of_any_rank_hardly_move(ranks: Ranks, stalled: int) -> None:
    ranks.write(FIRST, 1)
    ranks.clock.advance(WINDOW_S)
    for backend in ranks.backends:
        backend.let_it_look()
    assert ranks.mover.num_stalled == 1
    ranks.land(1 - stalled)
    assert ranks.stopped.get(timeout=20).event.reason == ""
    assert ranks.mover.num_stalled == 1
    ranks.land(stalled)
    assert ranks.stopped.get(timeout=20).event.reason == ""
    assert ranks.mover.num_stalled == 0


def test_peers_to_which_different_ranks_are_stalled_are_added_up(ranks: Ranks) -> None:
    for rank, peer in enumerate((FIRST, SECOND)):
        ranks.write(peer, 1)
        ranks.backends[1 - rank].posted[-1].end = "landed"
        ranks.stopped.get(timeout=20)
    ranks.clock.advance(WINDOW_S)
    for backend in ranks.backends:
        backend.let_it_look()
    assert ranks.mover.num_stalled == 2


async def test_what_an_ended_process_has_sent_is_cut_off_from_the_pages_of_each_rank(ranks: Ranks) -> None:
    await ranks.mover.settle(FIRST)
    assert [backend.cuts for backend in ranks.backends] == [[FIRST]] * 2


def test_closing_closes_the_library_of_each_rank(ranks: Ranks) -> None:
    ranks.write(FIRST, 1)
    ranks.land(0)
    ranks.stopped.get(timeout=20)
    ranks.mover.close()
    assert [backend.closed_in_flight for backend in ranks.backends] == [False, True]
