"""What a hand-off costs between ranks with memory of their own, by their degrees: NIXL over shared memory, in turn."""

import asyncio
import multiprocessing as mp
import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection
from statistics import median
from time import perf_counter

import numpy as np

from pdserve.base.clock import new_incarnation
from pdserve.base.errors import InvariantError
from pdserve.base.ids import Attempt, AttemptKey, PageId, Peer, RequestId, WorkerId
from pdserve.base.values import value
from pdserve.executor.rank_memory import own_pages
from pdserve.kvtransfer.backends.nixl import NixlBackend
from pdserve.kvtransfer.backends.ucx import Network
from pdserve.kvtransfer.doors import CopyStopped, ReceiverMessage
from pdserve.kvtransfer.mover import Mover
from pdserve.kvtransfer.mover_process import serve
from pdserve.kvtransfer.ranked_mover import RankedMover
from pdserve.kvtransfer.region import Region
from pdserve.kvtransfer.remote_mover import RemoteMover
from pdserve.kvtransfer.session import of_parts
from pdserve.kvtransfer.ways import ways_to
from pdserve.model.weights import Rank
from pdserve.protocol.kvlayout import KvLayout
from pdserve.settings.degrees import Degrees

SHAPES = {
    "SmolLM2-135M": KvLayout("", 30, 3, 64, 16, "bfloat16", "xxh3_runs"),
    "Llama-8B": KvLayout("", 32, 8, 128, 16, "bfloat16", "xxh3_runs"),
}
DEGREES = {
    "1": Degrees(1, 1),
    "tp 2": Degrees(2, 1),
    "tp 3": Degrees(3, 1),
    "tp 4": Degrees(4, 1),
    "pp 2": Degrees(1, 2),
}
PAIRS = (
    ("1", "1"), ("tp 2", "tp 2"), ("pp 2", "pp 2"), ("1", "tp 2"), ("tp 2", "1"), ("tp 2", "tp 4"), ("tp 4", "tp 2"),
    ("tp 2", "tp 3"), ("1", "pp 2"), ("pp 2", "1"), ("pp 2", "tp 2"),
)  # fmt: skip
_WARM_UP, _WITHIN_S = 2, 60.0  # rounds; for a copy
_HANDOFF = AttemptKey(RequestId(bytes(16)), Attempt(0))


@value
class HandoffTimes:
    """Medians of a hand-off: of the copy, digests of the sender included, and of the receiver's digests."""

    model: str
    pair: str
    descriptors: int
    kv_bytes: int
    copy_ms: float
    digests_ms: float
    gb_per_s: float  # of both
    to_equal: float  # of both: the median of the rounds' ratios to `1 -> 1`


class _Worker:
    """Ranks with pages of their own, and their movers."""

    def __init__(self, name: str, layout: KvLayout, degrees: Degrees, num_pages: int) -> None:
        self.peer = Peer(WorkerId(name.replace(" ", "-")), new_incarnation())
        self.stopped = queue.SimpleQueue[ReceiverMessage]()
        self._driving = ExitStack()
        draw, ranks = np.random.default_rng(), range(degrees.num_ranks)
        owns = [own_pages(Rank.at(rank, degrees), layout) for rank in ranks]
        self.regions = [
            Region.of_rank(draw.integers(0, 256, (num_pages, own.page_bytes), np.uint8), own.share, own.whole)
            for own in owns
        ]
        first, *others = [NixlBackend(self.peer, region, Network()) for region in self.regions]
        driven = [self._driven(backend, part) for part, backend in enumerate(others, start=1)]
        self.mover = RankedMover(Mover(first, self.stopped.put), driven)

    def _driven(self, backend: NixlBackend, part: int) -> RemoteMover:
        """Return the mover of a further rank, a thread of this process that is driven as a process is."""
        ours, theirs = socket.socketpair()
        self._driving.enter_context(ours)
        serving = serve(theirs, lambda _, report: Mover(backend, report), lambda: None)
        thread = threading.Thread(target=asyncio.run, args=(serving,), daemon=True)
        thread.start()
        self._driving.callback(thread.join)
        return RemoteMover(ours, self.peer, part, self.stopped.put)

    def close(self) -> None:
        self.mover.close()
        self._driving.close()


def measure_handoffs(model: str, num_pages: int, rounds: int) -> Iterator[HandoffTimes]:
    """Copy all pages between each pair of degrees, one pair after the other in each round."""
    layout = SHAPES[model]
    pairs = [pair for pair in PAIRS if max(DEGREES[end].tensor for end in pair) <= layout.num_kv_heads]
    here, there = mp.get_context("spawn").Pipe()
    receiver = mp.get_context("spawn").Process(target=_receive, args=(there, model, num_pages), daemon=True)
    receiver.start()
    there.close()  # else nobody would notice that it ends
    with ExitStack() as ends:
        ends.callback(receiver.join)
        ends.callback(here.send, None)
        described: dict[str, tuple[Peer, bytes]] = here.recv()
        workers = {name: _Worker(name, layout, DEGREES[name], num_pages) for name in {source for source, _ in pairs}}
        for worker in workers.values():
            ends.callback(worker.close)
        for source, target in pairs:
            workers[source].mover.attach(*described[target])
        times: dict[tuple[str, str], list[tuple[float, float]]] = {pair: [] for pair in pairs}
        for _ in range(_WARM_UP + rounds):
            for source, target in pairs:
                begun_s = perf_counter()
                digests = _copied(workers[source], described[target][0], num_pages)
                copy_s = perf_counter() - begun_s
                here.send((target, digests))
                times[source, target].append((copy_s, here.recv()))
        for pair in pairs:
            source, target = pair
            yield _found(model, pair, workers[source], described[target][1], (times[pair], times[pairs[0]]))


def _found(
    model: str, pair: tuple[str, str], worker: _Worker, description: bytes, times: tuple[list[tuple[float, float]], ...]
) -> HandoffTimes:
    own, equal = (of[_WARM_UP:] for of in times)
    ways = [way for each in worker.regions for way in ways_to(description, each, each.page_bytes)]
    num_pages = worker.regions[0].num_pages
    num_bytes = num_pages * sum([region.page_bytes for region in worker.regions])
    copy_s, digests_s = (median(column) for column in zip(*own, strict=True))
    return HandoffTimes(
        model, " -> ".join(pair), num_pages * sum([way.route.source.count for way in ways if way.route]),
        num_bytes, 1e3 * copy_s, 1e3 * digests_s, num_bytes / (copy_s + digests_s) / 1e9,
        median([sum(mine) / sum(theirs) for mine, theirs in zip(own, equal, strict=True)]),
    )  # fmt: skip


def _copied(worker: _Worker, target: Peer, num_pages: int) -> tuple[int, ...]:
    """Copy all pages; return their digests."""
    pages = tuple(map(PageId, range(num_pages)))
    worker.mover.write(target, _HANDOFF, pages, pages)
    stopped = [worker.stopped.get(timeout=_WITHIN_S).event for _ in worker.regions]
    digests = [each.digests for each in stopped if isinstance(each, CopyStopped) and each.digests is not None]
    if len(digests) < len(stopped):
        raise InvariantError(f"a copy has failed: {stopped}")
    return of_parts(digests)


def _receive(there: Connection, model: str, num_pages: int) -> None:
    """Be written to, in a process of its own; answer each hand-off's digests with the time that it takes to check."""
    layout, pages = SHAPES[model], tuple(map(PageId, range(num_pages)))
    workers = {
        name: _Worker(f"to-{name}", layout, degrees, num_pages)
        for name, degrees in DEGREES.items()
        if degrees.tensor <= layout.num_kv_heads
    }
    there.send({name: (worker.peer, worker.mover.describe()) for name, worker in workers.items()})
    while (asked := there.recv()) is not None:
        begun_s = perf_counter()
        if workers[asked[0]].mover.first_mismatch(pages, asked[1]) is not None:
            raise InvariantError(f"a page is not what was sent to {asked[0]}")
        there.send(perf_counter() - begun_s)
    for worker in workers.values():
        worker.mover.close()
