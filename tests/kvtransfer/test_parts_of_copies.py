"""What a worker orders of the movers of its ranks, each of them does; what becomes of one rank's part, it is told."""

import asyncio
import queue
import socket
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace

import pytest
from connections import unread
from looking import until
from ranked_movers import ranked_mover, remote_mover
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

import pdserve.kvtransfer.remote_mover as remote
from pdserve.base.clock import VirtualClock
from pdserve.base.errors import ConfigError, InvariantError, ProtocolError
from pdserve.base.ids import Incarnation, PageId, Peer, WorkerId
from pdserve.kvtransfer.channels import MAX_SLICES_IN_FLIGHT, MIN_SLICE_PAGES
from pdserve.kvtransfer.doors import CopyStopped, ReceiverMessage
from pdserve.kvtransfer.mover import MAX_OUTSTANDING
from pdserve.kvtransfer.mover_process import serve
from pdserve.kvtransfer.ranked_mover import RankedMover
from pdserve.kvtransfer.region import Description, encode_ranks
from pdserve.kvtransfer.remote_mover import RemoteMover
from pdserve.kvtransfer.remote_orders import Answer, Order
from pdserve.kvtransfer.routes import Share
from pdserve.kvtransfer.speed import WINDOW_S
from pdserve.net.frames import Channel, packed

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

    def looked_at(self, holds: Callable[[], bool]) -> bool:
        """Return once something holds, as a worker's heartbeats see: what another rank says comes with the next one."""
        return until(lambda: bool(self.mover.turns) and holds())

    def both_stopped(self) -> list[CopyStopped]:
        """Return how both parts of a copy have ended, in the order of ranks."""
        ended = [self.stopped.get(timeout=20).event for _ in self.backends]
        assert all(isinstance(each, CopyStopped) for each in ended)
        return sorted(ended, key=lambda each: each.part)  # type: ignore[union-attr, return-value]


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with two_ranks() as ranks:
        yield ranks


@contextmanager
def two_ranks() -> Iterator[Ranks]:
    backends, clock = (scripted_backend(SHARES[0]), scripted_backend(SHARES[1])), VirtualClock()
    stopped = queue.SimpleQueue[ReceiverMessage]()
    with ranked_mover(backends, stopped.put, clock) as mover:
        for peer in (FIRST, SECOND):
            mover.attach(peer, DESCRIPTION)
        yield Ranks(backends, clock, mover, stopped)


def test_of_a_cancelled_hand_off_no_rank_posts_any_more(ranks: Ranks) -> None:
    ranks.write(FIRST, 10)
    ranks.mover.cancel(FIRST, HANDOFF)
    ranks.mover.attach(FIRST, DESCRIPTION)  # returns once each rank's thread has done what was ordered before
    for rank in (0, 1):
        ranks.land(rank)
    first = CopyStopped(None, "cancelled")
    assert ranks.both_stopped() == [first, replace(first, part=1)]
    assert [len(backend.posted) for backend in ranks.backends] == [MAX_SLICES_IN_FLIGHT] * 2


@pytest.mark.parametrize("lost", [0, 1])
def test_a_part_whose_last_bytes_may_still_come_is_in_doubt_whichever_rank_wrote_it(ranks: Ranks, lost: int) -> None:
    ranks.write(FIRST, 1)
    ranks.backends[lost].posted[0].end = "reset"
    ranks.land(1 - lost)
    ended = ranks.both_stopped()
    assert ended[lost] == CopyStopped(None, "reset", in_doubt=True, part=lost)
    assert not ended[1 - lost].in_doubt


@pytest.mark.parametrize("refusing", [0, 1])
def test_a_peer_to_which_any_rank_cannot_connect_is_at_fault_and_not_this_worker(ranks: Ranks, refusing: int) -> None:
    ranks.backends[refusing].refuses = "no way there"
    with pytest.raises(ProtocolError, match="mover_metadata: no way there"):
        ranks.mover.attach(Peer(WorkerId("third"), Incarnation(1)), DESCRIPTION)


def test_each_rank_reports_its_part_of_a_copy_to_a_process_that_has_ended(ranks: Ranks) -> None:
    ranks.write(FIRST, 1)
    ranks.mover.forget(FIRST)
    first = CopyStopped(None, "the process of first has ended")
    assert ranks.both_stopped() == [first, replace(first, part=1)]


def test_a_rank_forgets_a_peer_that_ends_while_it_is_attached() -> None:
    backend, num_peers = scripted_backend(SHARES[1]), 10
    with remote_mover(backend, 1, print) as rank, closing(rank):
        assert rank.description
        for number in range(num_peers):
            peer = Peer(WorkerId("peer"), Incarnation(number))
            attaching = rank.attach(peer, DESCRIPTION)
            rank.forget(peer)
            attaching.result(20)
        rank.attach(FIRST, DESCRIPTION).result(20)
        assert (backend.num_opened, backend.num_closed) == (num_peers + 1, num_peers)


@pytest.mark.parametrize("busy", [0, 1])
def test_a_rank_that_still_writes_is_watched_whichever_it_is(ranks: Ranks, busy: int) -> None:
    ranks.write(FIRST, 1)
    ranks.land(1 - busy)
    seen = set[int | None]()
    until(lambda: seen.add(ranks.mover.turns[busy]) or len(seen - {None}) > 3)  # type: ignore[func-returns-value]
    until(lambda: ranks.mover.turns[1 - busy] is None)


@contextmanager
def begun() -> Iterator[tuple[RemoteMover, Channel]]:
    """Yield a mover that has begun, and the rank's end of its socket."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        mover, rank = RemoteMover(ours, FIRST, 1, print), Channel(theirs)
        begin = rank.receive(Order)  # type: ignore[arg-type]
        rank.send(Answer(begin.number, b"described"))
        assert mover.description == b"described"
        yield mover, rank


def test_a_rank_that_does_not_answer_looks_like_one_whose_thread_hangs() -> None:
    with begun() as (mover, _rank):
        asked, *after = [mover.turn for _ in range(4)]
        assert asked is None, "it had nothing to do so far"
        assert after == [after[0]] * 3
        assert after[0] is not None


def test_the_turn_of_a_thread_that_hangs_stays_the_same_however_late_its_rank_answers() -> None:
    with begun() as (mover, rank):
        seen = list[int | None]()
        for is_late in (False, True, False, True):
            seen.append(mover.turn)
            look = rank.receive(Order)  # type: ignore[arg-type]
            if is_late:
                seen.append(mover.turn)
            rank.send(Answer(look.number, turn=7))
            settling = mover.settle(SECOND)
            settle = rank.receive(Order)  # type: ignore[arg-type]
            rank.send(Answer(settle.number))
            settling.result(20)  # so the look before it has been answered as well
    assert seen == [None, *[7] * 5]


@pytest.mark.parametrize("stalled", [0, 1])
def test_a_peer_counts_as_stalled_once_if_the_bytes_of_any_rank_hardly_move(ranks: Ranks, stalled: int) -> None:
    ranks.write(FIRST, 1)
    ranks.clock.advance(WINDOW_S)
    for backend in ranks.backends:
        backend.let_it_look()
    assert ranks.looked_at(lambda: ranks.mover.num_stalled == 1)
    ranks.land(1 - stalled)
    assert ranks.stopped.get(timeout=20).event.reason == ""
    assert ranks.looked_at(lambda: ranks.mover.num_stalled == 1)
    ranks.land(stalled)
    assert ranks.stopped.get(timeout=20).event.reason == ""
    assert ranks.looked_at(lambda: ranks.mover.num_stalled == 0)


def test_peers_to_which_different_ranks_are_stalled_are_added_up(ranks: Ranks) -> None:
    for rank, peer in enumerate((FIRST, SECOND)):
        ranks.write(peer, 1)
        ranks.backends[1 - rank].posted[-1].end = "landed"
        ranks.stopped.get(timeout=20)
    ranks.clock.advance(WINDOW_S)
    for backend in ranks.backends:
        backend.let_it_look()
    assert ranks.looked_at(lambda: ranks.mover.num_stalled == 2)


async def test_what_an_ended_process_has_sent_is_cut_off_from_the_pages_of_each_rank(ranks: Ranks) -> None:
    await ranks.mover.settle(FIRST)
    assert [backend.cuts for backend in ranks.backends] == [[FIRST]] * 2


@pytest.mark.parametrize("slow", [0, 1])
async def test_an_ended_process_is_settled_once_each_rank_has_cut_it_off(ranks: Ranks, slow: int) -> None:
    ranks.backends[slow].may_cut.clear()
    settling = asyncio.create_task(ranks.mover.settle(FIRST))
    await asyncio.to_thread(until, lambda: ranks.backends[1 - slow].cuts == [FIRST])
    await asyncio.wait([settling], timeout=0.2)
    assert not settling.done()
    ranks.backends[slow].may_cut.set()
    async with asyncio.timeout(20):
        await settling


def test_a_rank_waits_until_it_has_read_what_an_ended_process_has_sent() -> None:
    backend = scripted_backend(SHARES[1])
    with remote_mover(backend, 1, print) as rank, closing(rank), unread() as reader:
        assert rank.description
        settling = rank.settle(FIRST)
        assert until(lambda: backend.cuts == [FIRST])
        with pytest.raises(TimeoutError):
            settling.result(0.2)
        assert reader.recv(4) == b"late"
        settling.result(20)


def test_closing_closes_the_library_of_each_rank() -> None:
    with two_ranks() as ranks:
        ranks.write(FIRST, 1)
        ranks.land(0)
        ranks.stopped.get(timeout=20)
    assert [backend.closed_in_flight for backend in ranks.backends] == [False, True]


def test_what_was_asked_of_a_rank_that_ends_fails_and_its_copies_are_never_taken_for_stopped() -> None:
    ours, theirs = socket.socketpair()
    stopped = queue.SimpleQueue[ReceiverMessage]()
    with ours:
        with theirs:
            mover = RemoteMover(ours, FIRST, 1, stopped.put)
            mover.write(SECOND, HANDOFF, (PageId(1),), (PageId(2),))
            settling = mover.settle(SECOND)
        for each in (settling, mover.attach(SECOND, b"")):
            with pytest.raises(InvariantError, match="rank 1: its process has ended"):
                each.result(20)
        assert mover.turn is not None
    assert stopped.empty()


def test_what_was_asked_of_a_rank_whose_reports_cannot_be_read_fails(caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        mover = RemoteMover(ours, FIRST, 1, print)
        settling = mover.settle(SECOND)
        theirs.sendall(packed(b"no report"))
        for each in (settling, mover.attach(SECOND, b"")):
            with pytest.raises(InvariantError, match="rank 1: its reports cannot be read: "):
                each.result(20)
        assert mover.turn == mover.turn == 0
    assert "reports of rank 1 cannot be read any more" in caplog.text


def test_what_is_configured_wrongly_for_a_rank_is_told_with_its_number() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        mover, rank = RemoteMover(ours, FIRST, 1, print), Channel(theirs)
        begin = rank.receive(Order)  # type: ignore[arg-type]
        rank.send(Answer(begin.number, problem="transfer_backend: missing", whose="operator"))
        with pytest.raises(ConfigError, match=r"^rank 1: transfer_backend: missing$"):
            mover.description  # noqa: B018


def test_a_rank_that_does_not_close_its_mover_is_logged_with_the_reason(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "CLOSE_S", 0.01)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        RemoteMover(ours, FIRST, 1, print).close()
    assert "rank 1 has not closed its mover: it is silent for 0.01 s" in caplog.text


def test_a_rank_whose_first_rank_has_ended_is_driven_by_nobody() -> None:
    ours, theirs = socket.socketpair()
    ours.close()
    lost = list[bool]()
    with pytest.raises(ExceptionGroup):
        asyncio.run(serve(theirs, lambda *_: pytest.fail("nobody has asked for one"), lambda: lost.append(True)))
    assert lost == [True]


def test_no_more_copies_are_ordered_than_a_mover_takes() -> None:
    ours, theirs = socket.socketpair()
    stopped = queue.SimpleQueue[ReceiverMessage]()
    with ours, theirs:  # the rank is frozen
        mover = RemoteMover(ours, FIRST, 1, stopped.put)
        for _ in range(MAX_OUTSTANDING):
            mover.write(SECOND, HANDOFF, (), ())
        assert stopped.empty()
        mover.write(SECOND, HANDOFF, (), ())
        ended = stopped.get(timeout=20).event
    assert ended == CopyStopped(None, "16384 copies are outstanding already", part=1)
