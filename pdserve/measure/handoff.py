"""The cost of moving pages beside their bytes: one process writes into another's pages, as workers do.

`post` is the library's call that starts a slice. Over shared memory NIXL copies inside of it; over TCP it sends a part.
With pages of a few bytes, what is left of it is the price of a page.
"""

import queue
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection as Pipe
from time import perf_counter, thread_time

import numpy as np

from pdserve.errors import CommandError
from pdserve.ids import Attempt, Incarnation, PageId, RequestId, WorkerId
from pdserve.kvtransfer.backends.backend import Connection, Indices, Transfer
from pdserve.kvtransfer.backends.nixl import NixlBackend
from pdserve.kvtransfer.backends.ucx import Network
from pdserve.kvtransfer.doors import ReceiverMessage
from pdserve.kvtransfer.mover import Mover
from pdserve.kvtransfer.region import Description, Region
from pdserve.kvtransfer.sender import CopyStopped
from pdserve.kvtransfer.session import HandoffKey, Peer

WRITER, TARGET = (Peer(WorkerId(f"benchmark-{name}"), Incarnation(1)) for name in ("writer", "target"))
HANDOFF = HandoffKey(RequestId(bytes(16)), Attempt(0))
WAIT_S = 60.0
_PAGE_BYTES = (64, 368_640)  # next to nothing, which leaves the price of a page, and a page of SmolLM2-135M
_NUM_PAGES = (1, 16, 64, 256)
_REPEATS = 20


class CopyFailedError(CommandError):
    """A copy of the benchmark has failed."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Medians over some copies of `num_pages` pages each."""

    name: str
    page_bytes: int
    num_pages: int
    ask_us: float  # a page's share of the call that asks for the copy, in the caller's thread
    post_us: float  # a page's share of the library's calls, on the clock
    post_cpu_us: float  # the same, of the thread's own time: what others on the machine take is left out
    digest_us: float  # of a page's digest, at one end; the writer's is part of what follows
    landed_us: float  # until the copy was reported
    bytes_per_s: float


def measure(page_bytes: int, counts: Sequence[int], repeats: int, *, tcp: bool) -> list[Cost]:
    """Copy each number of pages some times between two processes."""
    network = Network(tcp_only=tcp)
    with _target(max(counts), page_bytes, network) as description:
        writer = _Writer(max(counts), page_bytes, description, network)
        try:
            writer.copy(max(counts))  # makes the connection
            return [writer.cost(count, repeats) for count in counts]
        finally:
            writer.close()


def measure_handoff(*, tcp: bool) -> list[Cost]:
    """Measure pages of next to nothing, and pages of a model."""
    return [cost for page_bytes in _PAGE_BYTES for cost in measure(page_bytes, _NUM_PAGES, _REPEATS, tcp=tcp)]


class _TimedBackend(NixlBackend):
    """Adds up how long posting takes. Read its sums while nothing is being copied."""

    clock_s = cpu_s = 0.0

    def connect(self, description: Description) -> Connection:
        return _TimedConnection(self, super().connect(description))


@dataclass(frozen=True, slots=True, eq=False)
class _TimedConnection:
    _backend: _TimedBackend
    _connection: Connection

    def post(self, src: Indices, dst: Indices) -> Transfer | None:
        clock_s, cpu_s = perf_counter(), thread_time()
        try:
            return self._connection.post(src, dst)
        finally:
            self._backend.clock_s += perf_counter() - clock_s
            self._backend.cpu_s += thread_time() - cpu_s

    def close(self) -> None:
        self._connection.close()


class _Writer:
    def __init__(self, num_pages: int, page_bytes: int, description: bytes, network: Network) -> None:
        self._page_bytes = page_bytes
        self._region = region = Region.of(np.ones((num_pages, page_bytes), np.uint8))
        self._stopped: queue.SimpleQueue[ReceiverMessage] = queue.SimpleQueue()
        self._backend = _TimedBackend(WRITER, region, network)
        self._mover = Mover(self._backend, self._stopped.put)
        self._mover.attach(TARGET, description)

    def copy(self, num_pages: int) -> tuple[float, float]:
        """Copy so many pages; return the seconds that asking took, and those until it was reported."""
        pages = tuple(map(PageId, range(num_pages)))
        began_s = perf_counter()
        self._mover.write(TARGET, HANDOFF, pages, pages)
        asked_s = perf_counter()
        stopped = self._stopped.get(timeout=WAIT_S).event
        ended_s = perf_counter()
        if not isinstance(stopped, CopyStopped) or stopped.digests is None:
            raise CopyFailedError(str(stopped))
        return asked_s - began_s, ended_s - began_s

    def cost(self, num_pages: int, repeats: int) -> Cost:
        taken = []
        for _ in range(repeats):
            self._backend.clock_s = self._backend.cpu_s = 0.0
            asked_s, landed_s = self.copy(num_pages)
            taken.append((asked_s, self._backend.clock_s, self._backend.cpu_s, self._digests_s(num_pages), landed_s))
        asked_s, post_s, cpu_s, digests_s, landed_s = (statistics.median(times) for times in zip(*taken, strict=True))
        share = 1e6 / num_pages
        return Cost(
            name=f"{num_pages} x {self._page_bytes}",
            page_bytes=self._page_bytes,
            num_pages=num_pages,
            ask_us=share * asked_s,
            post_us=share * post_s,
            post_cpu_us=share * cpu_s,
            digest_us=share * digests_s,
            landed_us=share * landed_s,
            bytes_per_s=num_pages * self._page_bytes / landed_s,
        )

    def _digests_s(self, num_pages: int) -> float:
        began_s = perf_counter()
        self._region.digests(tuple(map(PageId, range(num_pages))))
        return perf_counter() - began_s

    def close(self) -> None:
        self._mover.close()


@contextmanager
def _target(num_pages: int, page_bytes: int, network: Network) -> Iterator[bytes]:
    """Have a process whose pages are written into; yields its description."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_be_target, args=(theirs, num_pages, page_bytes, network), daemon=True)
    process.start()
    try:
        if not ours.poll(WAIT_S):
            raise CopyFailedError(f"no target process within {WAIT_S:g} s")
        yield ours.recv_bytes()
    finally:
        ours.close()  # ends it
        process.join()


def _be_target(parent: Pipe, num_pages: int, page_bytes: int, network: Network) -> None:
    """Offer pages until the parent has gone."""
    region = Region.of(np.zeros((num_pages, page_bytes), np.uint8))
    mover = Mover(NixlBackend(TARGET, region, network), lambda _: None)
    parent.send_bytes(mover.describe())
    with suppress(EOFError):
        parent.recv_bytes()
    mover.close()
