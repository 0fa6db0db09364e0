"""The thread that drives copies, over a lane whose slices end when the test says so."""

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from pdserve.clock import FakeClock
from pdserve.errors import InvariantError, ProtocolError
from pdserve.ids import Incarnation, PageId, WorkerId
from pdserve.kvtransfer.backends.lane import Indices, LaneError
from pdserve.kvtransfer.backends.progress import WINDOW_S
from pdserve.kvtransfer.backends.pump import MAX_OUTSTANDING, MIN_SLICE_PAGES, SLICE_BYTES, Pump
from pdserve.kvtransfer.backends.route import MAX_SLICES_IN_FLIGHT
from pdserve.kvtransfer.mover import CopyStopped, Description, PairSpeed, ProbeError, Region
from pdserve.kvtransfer.session import Pages, Peer

PAGE_BYTES = SLICE_BYTES // MIN_SLICE_PAGES
NUM_PAGES = 32 * MIN_SLICE_PAGES
PROBE_PAGES = 2
FIRST, SECOND = Peer(WorkerId("first"), Incarnation(1)), Peer(WorkerId("second"), Incarnation(1))
DESCRIPTION = Description(0, NUM_PAGES, PAGE_BYTES, 0, PROBE_PAGES, b"").encode()


@dataclass(eq=False)
class Slice:
    remote: int
    src: tuple[int, ...] = ()
    dst: tuple[int, ...] = ()
    end: str | None = None  # "landed", or why it failed


@dataclass
class Lane:
    """Keeps every slice in flight until it is told how it ends."""

    carrier = "script"

    posted: list[Slice] = field(default_factory=list)
    gone: list[Slice] = field(default_factory=list)  # seen to have ended
    num_opened: int = 0
    num_looks: int = 0
    shut_down: bool = False
    breaks: bool = False
    news: threading.Condition = field(default_factory=threading.Condition)

    def open(self, description: Description) -> int:
        if self.breaks:
            raise ZeroDivisionError
        self.num_opened += 1
        return self.num_opened

    def shut(self, remote: int) -> None:
        pass

    def post(self, remote: int, src: Indices, dst: Indices) -> Slice:
        with self.news:
            self.posted.append(Slice(remote, tuple(src.tolist()), tuple(dst.tolist())))
            self.news.notify_all()
        if self.breaks:
            raise ZeroDivisionError
        return self.posted[-1]

    def landed(self, posted: Slice) -> bool:
        with self.news:
            self.num_looks += 1
            self.news.notify_all()
            if posted.end is None:
                return False
            assert posted not in self.gone
            self.gone.append(posted)
        if posted.end != "landed":
            raise LaneError(posted.end)
        return True

    def close(self) -> None:
        self.shut_down = True

    def until(self, holds: Callable[[], bool]) -> None:
        with self.news:
            assert self.news.wait_for(holds, timeout=20)

    def let_it_look(self) -> None:
        """Return after the thread has looked at what is in flight, and done what follows from it."""
        seen = self.num_looks
        self.until(lambda: self.num_looks > seen + 10)


@dataclass
class Rig:
    lane: Lane
    clock: FakeClock
    pump: Pump[int, Slice]
    stopped: queue.SimpleQueue[CopyStopped]

    def write(self, peer: Peer, num_slices: int) -> int:
        pages: Pages = tuple(PageId(n) for n in range(num_slices * MIN_SLICE_PAGES))
        return self.pump.write(peer, pages, pages)

    def rests(self) -> bool:
        """Return whether the thread soon has nothing to do: nobody is told when it begins to rest."""
        return any(self.pump.turn is None for _ in range(10_000_000))

    def next(self) -> CopyStopped:
        return self.stopped.get(timeout=20)


@pytest.fixture
def rig() -> Iterator[Rig]:
    lane, clock, stopped = Lane(), FakeClock(), queue.SimpleQueue[CopyStopped]()
    rows = np.broadcast_to(np.uint8(0), (NUM_PAGES, PAGE_BYTES))  # of no memory: the lane moves nothing
    region = Region(rows, rows[:PROBE_PAGES], 0, 0, lambda pages: (0,) * len(pages))
    pump = Pump("scripted", lane, region, stopped.put, clock)
    pump.attach(FIRST, DESCRIPTION)
    yield Rig(lane, clock, pump, stopped)
    pump.close()


def test_a_failed_copy_is_reported_only_after_its_other_slices_have_ended(rig: Rig) -> None:
    copy_id = rig.write(FIRST, 3)
    rig.lane.until(lambda: len(rig.lane.posted) == 3)
    rig.lane.posted[0].end = "cut"
    rig.lane.posted[2].end = "landed"
    rig.lane.let_it_look()
    assert rig.stopped.empty()
    rig.lane.posted[1].end = "landed"
    assert rig.next() == CopyStopped(copy_id, None, "cut", in_doubt=True)


def test_a_later_copy_that_lands_first_is_reported_later(rig: Rig) -> None:
    first, second = rig.write(FIRST, 1), rig.write(FIRST, 1)
    rig.lane.until(lambda: len(rig.lane.posted) == 2)
    rig.lane.posted[1].end = "landed"
    rig.lane.let_it_look()
    assert rig.stopped.empty()
    rig.lane.posted[0].end = "landed"
    assert [rig.next().copy_id, rig.next().copy_id] == [first, second]


def test_a_stuck_peer_holds_up_no_other_and_gets_few_slices_at_once(rig: Rig) -> None:
    rig.pump.attach(SECOND, DESCRIPTION)
    rig.write(FIRST, 20)
    rig.lane.until(lambda: len(rig.lane.posted) == MAX_SLICES_IN_FLIGHT)
    copy_id = rig.write(SECOND, 1)
    rig.lane.until(lambda: len(rig.lane.posted) > MAX_SLICES_IN_FLIGHT)
    rig.lane.posted[-1].end = "landed"
    assert rig.next().copy_id == copy_id
    rig.lane.let_it_look()
    assert len(rig.lane.posted) == MAX_SLICES_IN_FLIGHT + 1


def test_a_forgotten_peers_copies_are_reported_at_once_and_their_slices_watched_to_their_end(rig: Rig) -> None:
    ids = [rig.write(FIRST, 1), rig.write(FIRST, 1)]
    rig.lane.until(lambda: len(rig.lane.posted) == 2)
    rig.pump.forget(FIRST)
    assert [rig.next(), rig.next()] == [CopyStopped(i, None, "the process of first has ended") for i in ids]
    for posted in rig.lane.posted:
        posted.end = "cancelled"
    rig.lane.until(lambda: rig.lane.gone == rig.lane.posted)


def test_after_a_failure_nothing_is_posted_until_the_next_copy_opens_the_peer_anew(rig: Rig) -> None:
    ids = [rig.write(FIRST, 10), rig.write(FIRST, 1)]
    rig.lane.until(lambda: len(rig.lane.posted) == MAX_SLICES_IN_FLIGHT)
    rig.lane.posted[0].end = "cut"
    rig.lane.let_it_look()
    with pytest.raises(ProtocolError, match="2 copies to it are still outstanding"):
        rig.pump.attach(FIRST, DESCRIPTION)
    for posted in rig.lane.posted[1:]:
        posted.end = "landed"
    # The second copy was never posted: nothing of it is under way.
    assert [rig.next(), rig.next()] == [CopyStopped(i, None, "cut", in_doubt=i == ids[0]) for i in ids]
    assert len(rig.lane.posted) == MAX_SLICES_IN_FLIGHT
    mended = rig.write(FIRST, 1)
    rig.lane.until(lambda: len(rig.lane.posted) == MAX_SLICES_IN_FLIGHT + 1)
    assert rig.lane.posted[-1].remote == 2
    rig.lane.posted[-1].end = "landed"
    stopped = rig.next()
    assert stopped.copy_id == mended
    assert stopped.digests is not None


def test_too_many_copies_at_once_are_refused(rig: Rig) -> None:
    for _ in range(MAX_OUTSTANDING):
        rig.write(FIRST, 1)
    refused = rig.write(FIRST, 1)
    assert rig.next() == CopyStopped(refused, None, "16384 copies are outstanding already")


def test_the_thread_comes_round_while_something_is_in_flight_and_then_rests(rig: Rig) -> None:
    rig.write(FIRST, 1)
    rig.lane.until(lambda: len(rig.lane.posted) == 1)
    rig.lane.let_it_look()
    before = rig.pump.turn
    rig.lane.let_it_look()
    assert before is not None
    assert rig.pump.turn not in (None, before)
    rig.lane.posted[0].end = "landed"
    rig.next()
    assert rig.rests()


def test_a_broken_thread_reports_nothing_and_takes_no_orders(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.write(FIRST, 1)
    rig.lane.until(lambda: len(rig.lane.posted) == 1)
    rig.lane.breaks = True
    rig.write(FIRST, 1)
    rig.lane.until(lambda: len(rig.lane.posted) == 2)
    with pytest.raises(InvariantError, match="has died"):
        rig.pump.attach(SECOND, DESCRIPTION)
    with pytest.raises(InvariantError, match="has died"):
        rig.write(FIRST, 1)
    assert rig.stopped.empty()
    assert "ZeroDivisionError" in caplog.text


def test_a_thread_that_breaks_while_it_attaches_a_peer_keeps_nobody_waiting(rig: Rig) -> None:
    rig.lane.breaks = True
    answer: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def attach() -> None:
        try:
            rig.pump.attach(Peer(WorkerId("third"), Incarnation(1)), DESCRIPTION)
        except InvariantError as error:
            answer.put(error)

    threading.Thread(target=attach, daemon=True).start()
    assert str(answer.get(timeout=5)) == "the mover's thread has died"


def test_closing_gives_the_lane_back_only_if_nothing_is_in_flight(rig: Rig) -> None:
    rig.write(FIRST, 1)
    rig.lane.until(lambda: len(rig.lane.posted) == 1)
    rig.pump.close()
    assert not rig.lane.shut_down
    assert rig.stopped.empty()


def end_in_turn(rig: Rig, took_s: list[float]) -> None:
    """Let slices land one after the other, each after a time, beginning with the next that is posted."""
    first = len(rig.lane.gone)
    for number, seconds in enumerate(took_s):
        rig.lane.until(lambda at=first + number: len(rig.lane.posted) > at)  # type: ignore[misc]
        rig.clock.advance(seconds)
        rig.lane.posted[first + number].end = "landed"
        rig.lane.until(lambda at=first + number: len(rig.lane.gone) > at)  # type: ignore[misc]


def test_a_probe_tells_the_fastest_of_its_writes_and_leaves_out_the_one_that_connects(rig: Rig) -> None:
    answer = rig.pump.probe(FIRST)
    end_in_turn(rig, [0.001, 0.5, 0.25, 0.5, 0.2, 0.1, 0.2, 0.2])
    assert answer.result(timeout=20) == PairSpeed(2 * PAGE_BYTES / 0.25, pytest.approx(0.1), "script")


def test_a_probe_writes_into_probe_memory_alone(rig: Rig) -> None:
    answer = rig.pump.probe(FIRST)
    end_in_turn(rig, [0.1] * 8)
    answer.result(timeout=20)
    assert {index for posted in rig.lane.posted for index in (*posted.src, *posted.dst)} == {NUM_PAGES, NUM_PAGES + 1}


def test_what_a_probe_measures_beside_a_copy_counts_for_nothing(rig: Rig) -> None:
    answer = rig.pump.probe(FIRST)
    rig.lane.until(lambda: len(rig.lane.posted) == 1)
    rig.write(FIRST, 1)
    rig.lane.until(lambda: len(rig.lane.posted) == 2)
    rig.lane.posted[0].end = "landed"
    rig.lane.until(lambda: len(rig.lane.gone) == 1)
    rig.lane.let_it_look()
    assert len(rig.lane.posted) == 2  # the probe waits for the copy
    rig.lane.posted[1].end = "landed"
    rig.next()
    end_in_turn(rig, [0.1] * 7)
    assert not answer.done()
    end_in_turn(rig, [0.1])
    assert answer.result(timeout=20).bytes_per_s == pytest.approx(2 * PAGE_BYTES / 0.1)


def test_a_probe_that_fails_leaves_the_pair_whole(rig: Rig) -> None:
    answer = rig.pump.probe(FIRST)
    rig.lane.until(lambda: len(rig.lane.posted) == 1)
    rig.lane.posted[0].end = "cut"
    with pytest.raises(ProbeError, match="cut"):
        answer.result(timeout=20)
    copy_id = rig.write(FIRST, 1)
    rig.lane.until(lambda: len(rig.lane.posted) == 2)
    rig.lane.posted[1].end = "landed"
    stopped = rig.next()
    assert (stopped.copy_id, stopped.reason) == (copy_id, "")


def test_a_probe_of_a_peer_that_is_forgotten_fails_and_its_slice_is_watched_to_its_end(rig: Rig) -> None:
    answer = rig.pump.probe(FIRST)
    rig.lane.until(lambda: len(rig.lane.posted) == 1)
    rig.pump.forget(FIRST)
    with pytest.raises(ProbeError, match="given up"):
        answer.result(timeout=20)
    rig.lane.posted[0].end = "landed"
    rig.lane.until(lambda: rig.lane.gone == rig.lane.posted)


def test_a_transfer_that_does_not_move_is_told_of_and_not_ended(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    copy_id = rig.write(FIRST, 1)
    rig.lane.until(lambda: len(rig.lane.posted) == 1)
    rig.clock.advance(WINDOW_S)
    rig.lane.let_it_look()
    assert rig.pump.num_stalled == 1
    assert f"first: {SLICE_BYTES} bytes in flight hardly move" in caplog.text
    assert rig.stopped.empty()
    rig.lane.posted[0].end = "landed"
    assert rig.next().copy_id == copy_id
    assert rig.pump.num_stalled == 0
