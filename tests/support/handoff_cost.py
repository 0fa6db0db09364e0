"""The cost of moving pages beside their bytes: one process writes into another's pages, as workers do.

    python tests/support/handoff_cost.py [--tcp]

`post` is the library's call that starts a slice. Over shared memory NIXL copies inside of it; over TCP it sends a part.
With pages of a few bytes, what is left of it is the price of a page.
"""

import queue
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection as Pipe
from statistics import median
from time import perf_counter, thread_time

import numpy as np

from pdserve.base.ids import Attempt, AttemptKey, Incarnation, PageId, Peer, RequestId, WorkerId
from pdserve.kvtransfer.backends.backend import Connection, Indices, Transfer, Way
from pdserve.kvtransfer.backends.nixl import NixlBackend
from pdserve.kvtransfer.backends.ucx import Network
from pdserve.kvtransfer.doors import CopyStopped, ReceiverMessage
from pdserve.kvtransfer.mover import Mover
from pdserve.kvtransfer.region import Region
from pdserve.measure.tables import compared, output

WRITER, TARGET = (Peer(WorkerId(f"benchmark-{name}"), Incarnation(1)) for name in ("writer", "target"))
HANDOFF = AttemptKey(RequestId(bytes(16)), Attempt(0))
WAIT_S = 60.0
_PAGE_BYTES = (64, 368_640)  # next to nothing, which leaves the price of a page, and a page of SmolLM2-135M
_NUM_PAGES = (1, 16, 64, 256)
_REPEATS = 20


@dataclass(frozen=True, slots=True)
class Cost:
    """Medians over some copies of `num_pages` pages each."""

    name: str
    ask_us: float  # a page's share of the call that asks for the copy, in the caller's thread
    post_us: float  # a page's share of the library's calls, on the clock
    post_cpu_us: float  # the same, of the thread's own time: what others on the machine take is left out
    digest_us: float  # of a page's digest, at one end; the writer's is part of what follows
    landed_us: float  # until the copy was reported
    bytes_per_s: float


def measure(page_bytes: int, counts: Sequence[int], repeats: int, *, tcp: bool) -> list[Cost]:
    """Copy each number of pages some times between two processes."""
    network = Network(tcp_only=tcp)
    with (
        _target(max(counts), page_bytes, network) as description,
        closing(_Writer(max(counts), page_bytes, description, network)) as writer,
    ):
        writer.copy(max(counts))  # makes the connection
        return [writer.cost(count, repeats) for count in counts]


class _TimedBackend(NixlBackend):
    """Adds up how long posting takes. Read its sums while nothing is being copied."""

    clock_s = cpu_s = 0.0

    def connect(self, way: Way, source: Region) -> Connection:
        return _TimedConnection(self, super().connect(way, source))


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

    def copy(self, num_pages: int) -> tuple[float, ...]:
        """Copy so many pages.

        Returns the seconds that asking took, posting on the clock and of the thread's own time, digests, and all of it.
        """
        pages = tuple(map(PageId, range(num_pages)))
        self._backend.clock_s = self._backend.cpu_s = 0.0
        began_s = perf_counter()
        self._mover.write(TARGET, HANDOFF, pages, pages)
        asked_s = perf_counter()
        stopped = self._stopped.get(timeout=WAIT_S).event
        ended_s = perf_counter()
        assert isinstance(stopped, CopyStopped), stopped
        assert stopped.digests is not None, stopped
        self._region.digests(pages)
        digests_s = perf_counter() - ended_s
        return asked_s - began_s, self._backend.clock_s, self._backend.cpu_s, digests_s, ended_s - began_s

    def cost(self, num_pages: int, repeats: int) -> Cost:
        taken = zip(*(self.copy(num_pages) for _ in range(repeats)), strict=True)
        ask_us, post_us, cpu_us, digest_us, landed_us = (1e6 * median(times_s) / num_pages for times_s in taken)
        bytes_per_s = 1e6 * self._page_bytes / landed_us
        return Cost(f"{num_pages} x {self._page_bytes}", ask_us, post_us, cpu_us, digest_us, landed_us, bytes_per_s)

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
        assert ours.poll(WAIT_S), "no target process"
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


if __name__ == "__main__":
    found = [cost for size in _PAGE_BYTES for cost in measure(size, _NUM_PAGES, _REPEATS, tcp="--tcp" in sys.argv)]
    output().print(compared(found, "pages x bytes; times are of each page"))
