"""A lane whose slices end when a test says so, under the thread that drives copies."""

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from pdserve.clock import FakeClock
from pdserve.ids import Attempt, Incarnation, PageId, RequestId, WorkerId
from pdserve.kvtransfer.backends.lane import Indices, LaneError
from pdserve.kvtransfer.backends.pump import MIN_SLICE_PAGES, SLICE_BYTES, Pump
from pdserve.kvtransfer.mover import CopyStopped, Description, Region
from pdserve.kvtransfer.session import HandoffKey, Pages, Peer

HANDOFF, OTHER = (HandoffKey(RequestId(bytes([number]) * 16), Attempt(0)) for number in range(2))

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

    def write(self, peer: Peer, num_slices: int, handoff: HandoffKey = HANDOFF) -> int:
        pages: Pages = tuple(PageId(n) for n in range(num_slices * MIN_SLICE_PAGES))
        return self.pump.write(peer, handoff, pages, pages)

    def rests(self) -> bool:
        """Return whether the thread soon has nothing to do: nobody is told when it begins to rest."""
        return any(self.pump.turn is None for _ in range(10_000_000))

    def next(self) -> CopyStopped:
        return self.stopped.get(timeout=20)


@contextmanager
def scripted_rig() -> Iterator[Rig]:
    lane, clock, stopped = Lane(), FakeClock(), queue.SimpleQueue[CopyStopped]()
    rows = np.broadcast_to(np.uint8(0), (NUM_PAGES, PAGE_BYTES))  # of no memory: the lane moves nothing
    region = Region(rows, rows[:PROBE_PAGES], 0, 0, lambda pages: (0,) * len(pages))
    pump = Pump("scripted", lane, region, stopped.put, clock)
    pump.attach(FIRST, DESCRIPTION)
    yield Rig(lane, clock, pump, stopped)
    pump.close()
