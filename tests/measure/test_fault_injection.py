"""Workers are hit as planned, and what the router notices of it is timed."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from cluster_states import cluster_state

from pdserve.base.clock import MonotonicClock
from pdserve.launch.folder import ClusterState, ProcessState
from pdserve.measure.chaos import FaultInjector, FaultPlan
from pdserve.proto.v1 import admin_pb2 as admin
from pdserve.proto.v1 import link_pb2 as link

SLEEPER = (sys.executable, "-I", "-c", "import signal; signal.pause()")


def status(*names: str, ready: bool = True) -> admin.ClusterStatus:
    told = [link.Register(worker_id=name, incarnation=1, ready=ready) for name in names]
    return admin.ClusterStatus(workers=[admin.WorkerStatus(registration=each) for each in told])


def state(**pids: int | None) -> Callable[[], ClusterState]:
    processes = tuple(
        ProcessState(name=name, role="router" if name == "router" else "decode", pid=pid, incarnation=1, num_restarts=0)
        for name, pid in pids.items()
    )
    shown = cluster_state(processes=processes)
    return lambda: shown


@asynccontextmanager
async def child() -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(*SLEEPER)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def changed(process: asyncio.subprocess.Process, how: int) -> None:
    """Return once a child has been stopped, or continued."""
    async with asyncio.timeout(10):
        await asyncio.to_thread(os.waitid, os.P_PID, process.pid, how | os.WNOWAIT)


async def test_a_worker_that_serves_is_killed_rather_than_one_that_loads_and_never_the_router() -> None:
    async with child() as router, child() as loading, child() as serving:
        pids = {"router": router.pid, "loading": loading.pid, "serving": serving.pid}
        injector = FaultInjector(state(**pids), FaultPlan(every_s=0.01), MonotonicClock())
        injector.see(status("serving"))
        striking = asyncio.create_task(injector.run())
        await serving.wait()
        striking.cancel()
        assert (router.returncode, loading.returncode) == (None, None)
        assert injector.faults[0].was_attached
        assert injector.faults[0].noticed_s is None
        injector.see(status())
        noticed_s = injector.faults[0].noticed_s
        assert noticed_s is not None
        assert noticed_s > 0
        injector.see(status())
        assert injector.faults[0].noticed_s == noticed_s


async def test_a_frozen_worker_is_thawed_whatever_happens() -> None:
    async with child() as worker:
        injector = FaultInjector(state(decode=worker.pid), FaultPlan(every_s=0.0, freeze_s=600.0), MonotonicClock())
        striking = asyncio.create_task(injector.run())
        await changed(worker, os.WSTOPPED)
        striking.cancel()
        await changed(worker, os.WCONTINUED)


async def test_a_worker_between_two_starts_cannot_be_hit() -> None:
    injector = FaultInjector(state(decode=None), FaultPlan(every_s=0.0), MonotonicClock())
    striking = asyncio.create_task(injector.run())
    for _ in range(10):
        await asyncio.sleep(0)
    striking.cancel()
    assert injector.faults == []
