"""The last status that a router reported of its cluster, and conditions to wait for."""

import asyncio
from collections.abc import Callable

from pdserve.clock import MonotonicClock
from pdserve.launch.local import LocalCluster
from pdserve.proto.v1 import admin_pb2 as admin

FREE_WITHIN_S = 15.0
RECOVER_WITHIN_S = 90.0  # after the last fault, until all workers are ready again

Condition = Callable[[admin.ClusterStatus], bool]


class StatusBoard:
    """The router's last status, and a way to wait for one."""

    def __init__(self) -> None:
        self.last = admin.ClusterStatus()
        self.watchers: list[Callable[[admin.ClusterStatus], None]] = []
        self._changed = asyncio.Event()

    def put(self, status: admin.ClusterStatus) -> None:
        self.last = status
        for watcher in self.watchers:
            watcher(status)
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self) -> None:
        await self._changed.wait()

    async def until(self, wanted: Condition, timeout_s: float) -> bool:
        """Wait for a status; return whether it came in time."""
        try:
            async with asyncio.timeout(timeout_s):
                while not wanted(self.last):
                    await self.changed()
        except TimeoutError:
            return False
        return True


def all_free(status: admin.ClusterStatus) -> bool:
    """Return whether nothing is going on and every page of every ready worker is free (or free and cached)."""
    return not status.num_active and not status.num_held and not not_free(status)


def not_free(status: admin.ClusterStatus) -> str:
    """Return a description of what is going on."""
    held = [f"{status.num_active} active, {status.num_held} held"] if status.num_active or status.num_held else []
    for worker in status.workers:
        if worker.registration.ready and is_busy(worker):
            load = worker.load
            held.append(
                f"{worker.registration.worker_id}: {load.pages_free} of {worker.registration.num_pages} pages free, "
                f"{load.pages_quarantined} in quarantine, {load.pages_granted} granted, {load.num_handoffs} hand-offs"
            )
    return "; ".join(held)


def is_busy(worker: admin.WorkerStatus) -> bool:
    """Return whether a worker has anything in hand, as it last reported."""
    return worker.load.pages_free != worker.registration.num_pages or worker.load.num_handoffs > 0


def num_ready(status: admin.ClusterStatus) -> int:
    return sum(worker.registration.ready for worker in status.workers)


async def recovered(cluster: LocalCluster, board: StatusBoard) -> tuple[float | None, str]:
    """Wait for recovery; return how long until all pages were free, and what is still not free or not ready."""
    clock = MonotonicClock()
    ended_s = clock.now_s()
    is_free = await board.until(all_free, FREE_WITHIN_S)
    free_after_s, left_over = clock.now_s() - ended_s if is_free else None, not_free(board.last)
    num_workers = len(cluster.state.processes) - 1
    if not await board.until(lambda status: num_ready(status) == num_workers and all_free(status), RECOVER_WITHIN_S):
        left_over = not_free(board.last) or f"{num_ready(board.last)} of {num_workers} workers are ready again"
    return free_after_s, left_over
