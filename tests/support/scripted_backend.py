"""A mover over a backend whose slices end when a test says so."""

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from pdserve.base.clock import VirtualClock
from pdserve.base.ids import Attempt, AttemptKey, Incarnation, PageId, Peer, RequestId, WorkerId
from pdserve.kvtransfer.backends.backend import Indices, PostError, TransferLostError, Way
from pdserve.kvtransfer.channels import MIN_SLICE_PAGES, SLICE_BYTES
from pdserve.kvtransfer.doors import CopyStopped, ReceiverMessage
from pdserve.kvtransfer.mover import Mover
from pdserve.kvtransfer.region import Description, Region
from pdserve.kvtransfer.routes import Share
from pdserve.protocol.page_tables import Pages

HANDOFF, OTHER = (AttemptKey(RequestId(bytes([number]) * 16), Attempt(0)) for number in range(2))

PAGE_BYTES = SLICE_BYTES // MIN_SLICE_PAGES
NUM_PAGES = 32 * MIN_SLICE_PAGES
PROBE_PAGES = 2
FIRST, SECOND = Peer(WorkerId("first"), Incarnation(1)), Peer(WorkerId("second"), Incarnation(1))
DESCRIPTION = Description(0, NUM_PAGES, PAGE_BYTES, 0, PROBE_PAGES, b"").encode()


@dataclass(eq=False)
class Slice:
    backend: "ScriptedBackend"
    connection: int
    src: tuple[int, ...]
    dst: tuple[int, ...]
    end: str | None = None  # "landed", or why it failed

    def has_landed(self) -> bool:
        return self.backend.looks_at(self)


@dataclass
class Connection:
    backend: "ScriptedBackend"
    number: int

    def post(self, src: Indices, dst: Indices) -> Slice:
        return self.backend.post(Slice(self.backend, self.number, tuple(src.tolist()), tuple(dst.tolist())))

    def close(self) -> None:
        self.backend.num_closed += 1


@dataclass
class ScriptedBackend:
    """Keeps every slice in flight until it is told how it ends."""

    region: Region
    posted: list[Slice] = field(default_factory=list)
    gone: list[Slice] = field(default_factory=list)  # seen to have ended
    sources: list[Region] = field(default_factory=list)  # of each connection
    cuts: list[Peer] = field(default_factory=list)
    num_closed: int = 0
    num_looks: int = 0
    closed_in_flight: bool | None = None
    breaks: bool = False
    breaks_at_looks: bool = False
    refuses: str = ""  # why nobody can be connected to
    may_cut: threading.Event = field(default_factory=threading.Event)
    news: threading.Condition = field(default_factory=threading.Condition)

    name = "scripted"
    carrier = "script"
    metadata = b""

    def __post_init__(self) -> None:
        self.may_cut.set()

    @property
    def num_opened(self) -> int:
        return len(self.sources)

    def begin(self) -> None:
        pass

    def progress(self) -> None:
        pass

    def connect(self, way: Way, source: Region) -> Connection:
        if self.breaks:
            raise ZeroDivisionError
        if self.refuses:
            raise PostError(self.refuses)
        self.sources.append(source)
        return Connection(self, self.num_opened)

    def post(self, posted: Slice) -> Slice:
        with self.news:
            self.posted.append(posted)
            self.news.notify_all()
        if self.breaks:
            raise ZeroDivisionError
        return posted

    def looks_at(self, posted: Slice) -> bool:
        with self.news:
            self.num_looks += 1
            self.news.notify_all()
            if self.breaks_at_looks:
                raise ZeroDivisionError
            if posted.end is None:
                return False
            assert posted not in self.gone
            self.gone.append(posted)
        if posted.end != "landed":
            raise TransferLostError(posted.end)
        return True

    def cut(self, peer: Peer) -> None:
        assert self.may_cut.wait(20)
        self.cuts.append(peer)

    def close(self, *, in_flight: bool) -> None:
        self.closed_in_flight = in_flight

    def until(self, holds: Callable[[], bool]) -> None:
        with self.news:
            assert self.news.wait_for(holds, timeout=20)

    def let_it_look(self) -> None:
        """Return after the thread has looked at what is in flight, and done what follows from it."""
        seen = self.num_looks
        self.until(lambda: self.num_looks > seen + 10)


@dataclass
class Rig:
    backend: ScriptedBackend
    clock: VirtualClock
    mover: Mover
    stopped: queue.SimpleQueue[ReceiverMessage]

    def write(self, peer: Peer, num_slices: int, handoff: AttemptKey = HANDOFF) -> None:
        pages: Pages = tuple(PageId(n) for n in range(num_slices * MIN_SLICE_PAGES))
        self.mover.write(peer, handoff, pages, pages)

    def rests(self) -> bool:
        """Return whether the thread soon has nothing to do: nobody is told when it begins to rest."""
        return any(self.mover.turn is None for _ in range(10_000_000))

    def next(self) -> CopyStopped:
        return self.stopped.get(timeout=20).event


def scripted_backend(share: Share | None = None) -> ScriptedBackend:
    rows = np.broadcast_to(np.uint8(0), (NUM_PAGES, PAGE_BYTES))  # of no memory: the backend moves nothing
    return ScriptedBackend(Region(rows, rows[:PROBE_PAGES], 0, 0, lambda pages: (0,) * len(pages), share=share))


@contextmanager
def scripted_rig() -> Iterator[Rig]:
    backend, clock, stopped = scripted_backend(), VirtualClock(), queue.SimpleQueue[ReceiverMessage]()
    mover = Mover(backend, stopped.put, clock)
    mover.attach(FIRST, DESCRIPTION)
    yield Rig(backend, clock, mover, stopped)
    mover.close()
