"""Measures the way to each receiver when it is first met."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from pdserve.kvtransfer.mover import Mover
from pdserve.kvtransfer.session import Peer
from pdserve.kvtransfer.speed import PairSpeed, ProbeError

logger = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 30.0  # copies come first: on a busy worker it may never be a probe's turn
MAX_MET = 4096


@dataclass(frozen=True, slots=True)
class Measured:
    speed: PairSpeed
    is_slow: bool


Report = Callable[[str, Measured | None], None]  # of the receiver with this worker id; None: what was reported is over


class Probes:
    """One probe for each peer. Whatever becomes of it, the pair works on."""

    def __init__(self, mover: Mover, report: Report, tasks: asyncio.TaskGroup, slow_bytes_per_s: int) -> None:
        self._mover = mover
        self._report = report
        self._tasks = tasks
        self._slow_bytes_per_s = slow_bytes_per_s
        self._met: OrderedDict[Peer, asyncio.Task[None]] = OrderedDict()

    def start(self, peer: Peer) -> None:
        if peer in self._met:
            return
        self._met[peer] = self._tasks.create_task(self._measure(peer), name=f"probe {peer.worker_id}")
        if len(self._met) > MAX_MET:
            self.forget(next(iter(self._met)))

    def forget(self, peer: Peer) -> None:
        """Drop what is known of a peer, if it was met."""
        task = self._met.pop(peer, None)
        if task is None:
            return
        task.cancel()
        if all(other.worker_id != peer.worker_id for other in self._met):
            self._report(peer.worker_id, None)

    def close(self) -> None:
        for task in self._met.values():
            task.cancel()

    async def _measure(self, peer: Peer) -> None:
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                speed = await asyncio.wrap_future(self._mover.probe(peer))
        except (ProbeError, TimeoutError) as error:
            logger.warning("the way to %s was not measured: %s", peer.worker_id, error or "there were always copies")
            return
        is_slow = speed.bytes_per_s < self._slow_bytes_per_s
        level = logging.WARNING if is_slow else logging.INFO
        logger.log(level, "%s%s", "SLOW: " if is_slow else "", _describe(peer, speed, self._slow_bytes_per_s))
        self._report(peer.worker_id, Measured(speed, is_slow))


def _describe(peer: Peer, speed: PairSpeed, floor: int) -> str:
    return (
        f"pages reach {peer.worker_id} at {speed.bytes_per_s / 1e6:.0f} MB/s, one page in {1e6 * speed.page_s:.0f} us, "
        f"carrier: {speed.carrier}; {floor / 1e6:.0f} MB/s are expected"
    )
