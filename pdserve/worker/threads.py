"""The engine's thread, and how the CPU threads that it computes with wait for one another."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from pdserve.worker.seats import Seat, take_seat

SPIN_COUNT = "20000"  # fractions of a millisecond
PLACING = {"OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY"}  # by which users bind threads themselves


@contextmanager
def thread_defaults(
    environment: MutableMapping[str, str], num_threads: int | None, weights: Path | None = None
) -> Iterator[Seat | None]:
    """Choose how OpenMP's threads share the machine, for the block that loads torch; what the user set stays.

    Prefill and decode workers rarely compute at the same moment under light load, so each may use all cores. Threads
    spin between the many short loops of a step, or waking them would double the time of a decode step; they soon
    stop, so that an idle worker leaves the cores to the other one. Each keeps to a core of its own, if there is one for
    each: two that met on one core, because others kept the next one busy, would wait for each other in every loop.
    Workers with a common folder of weights begin at different cores.
    """
    cores, seat = os.sched_getaffinity(0), None
    if num_threads is None and "OMP_NUM_THREADS" not in environment:
        if weights is not None and len(cores) > 1 and not PLACING & environment.keys():
            seat = take_seat(weights, cores)
        if seat is not None:
            environment["OMP_PLACES"] = ",".join(f"{{{core}}}" for core in seat.order)
        environment.setdefault("OMP_PROC_BIND", "true")
        environment["OMP_NUM_THREADS"] = str(len(cores))
    environment.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    environment.setdefault("KMP_BLOCKTIME", "1")
    yield seat
    os.sched_setaffinity(0, cores)  # OpenMP has bound this thread, which computes nothing, and all that it will start


@asynccontextmanager
async def engine_thread() -> AsyncIterator[ThreadPoolExecutor]:
    """Start the one thread of a process that torch computes in, from loading the weights to the last step.

    OpenMP keeps a team of threads for every thread that ever computed. With a second team it would count more threads
    than cores, and none would spin any more: a decode step would take a third longer. At the end of the block, what was
    submitted is waited for.
    """
    executor = ThreadPoolExecutor(1, "engine")
    try:
        yield executor
    finally:
        await asyncio.to_thread(executor.shutdown)
