"""Clusters that are started for a measurement: their capacity, and the status to wait for."""

import asyncio
import os
import sys
from asyncio.subprocess import DEVNULL, Process
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal

from pdserve.base.clock import MonotonicClock
from pdserve.base.errors import CommandError
from pdserve.launch.folder import ClusterState
from pdserve.launch.local import Listener, LocalCluster, running
from pdserve.launch.plan import PDSERVE, WORKER_ROLES, ClusterSpec, Flags, flag_arguments
from pdserve.measure.client import Access, Client, OpenLoop, connect, new_tenant, request_of, requests_of
from pdserve.measure.outcomes import ANY, Objective, Outcome
from pdserve.measure.workload import Arrival, random_prompts
from pdserve.proto.v1 import admin_pb2 as admin
from pdserve.proto.v1 import inference_pb2 as inference

FIRST_IN_FLIGHT, MOST_IN_FLIGHT = 24, 3072  # requests that run or wait at a time
_GAIN = 1.1  # the number in flight is doubled again if the last doubling brought so many times the answers
_FILLING = 1 / 4  # share of each try that is not counted, because batches still fill up
_RAMP_SHARE = 1 / 2  # length of each try of the ramp, as a share of the measurement's
_PAUSE_S = 0.1  # after a failure, unless the router names another time
_MOST_PAUSE_S = 1.0


class Ramp:
    """How many requests to keep in flight: doubled while that brings a tenth more answers."""

    def __init__(self) -> None:
        self.num_in_flight = FIRST_IN_FLIGHT
        self._best = 0.0

    def grow(self, answers_per_s: float) -> bool:
        """Take in what the present number brings; return whether it is doubled."""
        if answers_per_s < _GAIN * self._best or self.num_in_flight >= MOST_IN_FLIGHT:
            return False
        self._best = answers_per_s
        self.num_in_flight *= 2
        return True


class Clients:
    """Clients that each send a request when their last one has ended, in turn and over and over."""

    def __init__(self, client: OpenLoop, requests: Iterator[inference.GenerateRequest]) -> None:
        self._client = client
        self._requests = requests
        self._num_clients = 0
        self._is_over = False
        self.num_right = 0
        self.others: Counter[str] = Counter()  # what else came, by status

    def enlarge(self, tasks: asyncio.TaskGroup, num_clients: int) -> None:
        for _ in range(num_clients - self._num_clients):
            tasks.create_task(self._keep_asking())
        self._num_clients = num_clients

    async def answers_per_s(self, seconds: float) -> float:
        """Return how many right answers end a second, once batches have filled up."""
        await asyncio.sleep(_FILLING * seconds)
        begin, began_s = self.num_right, self._client.clock.now_s()
        await asyncio.sleep((1 - _FILLING) * seconds)
        return (self.num_right - begin) / (self._client.clock.now_s() - began_s)

    def end(self) -> None:
        self._is_over = True

    async def _keep_asking(self) -> None:
        while not self._is_over:
            outcome = await self._client.send(next(self._requests))
            if outcome.is_good:
                self.num_right += 1
                continue
            self.others[outcome.wrong or outcome.status] += 1
            await asyncio.sleep(min(_MOST_PAUSE_S, outcome.retry_after_s or _PAUSE_S))


async def saturate(
    client: OpenLoop, arrivals: Sequence[Arrival], prompts: Sequence[Sequence[int]], seconds: float
) -> float:
    """Return how many right answers a second the cluster gives at most, measured for `seconds`.

    Before, each number of requests in flight is tried for half as long. Few requests would measure badly: lengths
    differ, and so does what each costs. CommandError if no answer is right: it names what came instead.
    """
    clients, ramp = Clients(client, _endless(arrivals, prompts)), Ramp()
    async with asyncio.TaskGroup() as tasks:
        clients.enlarge(tasks, ramp.num_in_flight)
        while ramp.grow(await clients.answers_per_s(_RAMP_SHARE * seconds)) and clients.num_right:
            clients.enlarge(tasks, ramp.num_in_flight)
        is_refused = not clients.num_right and clients.others  # else the first answers are still to come
        found = 0.0 if is_refused else await clients.answers_per_s(seconds)
        clients.end()
    if not found:
        came = ", ".join(f"{count} x {status}" for status, count in clients.others.most_common()) or "nothing"
        raise CommandError(f"no request was answered in full while the cluster was kept full; what came: {came}")
    return found


def _endless(arrivals: Sequence[Arrival], prompts: Sequence[Sequence[int]]) -> Iterator[inference.GenerateRequest]:
    """Yield the requests again and again, each time of another tenant: none finds its prompt cached."""
    while True:
        tenant = new_tenant()
        for arrival, prompt in zip(arrivals, prompts, strict=True):
            yield request_of(arrival, prompt, tenant, ANY)


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


async def recovered(state: Callable[[], ClusterState], board: StatusBoard) -> tuple[float | None, str]:
    """Wait for recovery; return how long until all pages were free, and what is still not free or not ready.

    The board's status may be older than the last answer's end, so the router is asked before and after.
    """
    clock, router = MonotonicClock(), state().operator()
    ended_s = clock.now_s()
    board.put(await router.status(within_s=RECOVER_WITHIN_S))
    is_free = await board.until(all_free, FREE_WITHIN_S)
    free_after_s, left_over = clock.now_s() - ended_s if is_free else None, not_free(board.last)
    num_workers = sum(process.role in WORKER_ROLES for process in state().processes)
    if not await board.until(lambda status: num_ready(status) == num_workers and all_free(status), RECOVER_WITHIN_S):
        left_over = not_free(board.last) or f"{num_ready(board.last)} of {num_workers} workers are ready again"
    board.put(await router.status(within_s=RECOVER_WITHIN_S))
    return free_after_s, left_over


Report = Callable[[str], None]  # prints progress for a person who waits


@dataclass(frozen=True, slots=True)
class LiveCluster:
    """A running cluster and a connection to it."""

    state: ClusterState
    client: Client
    vocab_size: int

    async def run(
        self,
        arrivals: Sequence[Arrival],
        objective: Objective = ANY,
        seed: int = 0,
        advance: Callable[[], None] = lambda: None,
    ) -> list[Outcome]:
        """Send requests at their times; return what came of each. `advance` is called when one has ended."""
        prompts = random_prompts(arrivals, self.vocab_size, seed)
        return await self.client.run(requests_of(arrivals, prompts, objective), lambda _: advance())

    async def status(self) -> admin.ClusterStatus:
        """Return the router's view of the cluster."""
        return await self.state.operator().status()


@asynccontextmanager
async def started(spec: ClusterSpec, report: Report) -> AsyncIterator[tuple[LocalCluster, LiveCluster, StatusBoard]]:
    """Run a cluster for the length of the block, which begins when it is ready; the board has its router's status."""
    board = StatusBoard()
    async with running(spec, Listener(on_status=board.put, on_notice=report, status_interval_s=0.0)) as cluster:
        await cluster.ready.wait()
        async with connected(cluster.state) as live:
            yield cluster, live, board


@asynccontextmanager
async def live_cluster(spec: ClusterSpec, report: Report) -> AsyncIterator[LiveCluster]:
    """Run a cluster for the length of the block, and report its start."""
    report(f"starting {spec.num_prefill} prefill and {spec.num_decode} decode workers of {spec.served_model_name}")
    async with started(spec, report) as (_, live, _):
        yield live


@asynccontextmanager
async def connected(state: ClusterState) -> AsyncIterator[LiveCluster]:
    """Be a client of a cluster that runs already."""
    async with connect(state.endpoint, Access(state.ca_file) if state.ca_file else None) as channel:
        client = Client(channel, MonotonicClock())
        yield LiveCluster(state, client, await client.vocab_size())


@asynccontextmanager
async def serving_process(kind: Literal["router", "frontend"], flags: Flags) -> AsyncIterator[Process]:
    """Run a router or a frontend, which ends with this process, for the length of the block."""
    wrapper = (sys.executable, "-P", "-m", "pdserve.base.signals", str(os.getpid()))
    command = (*wrapper, *PDSERVE, kind, *flag_arguments(flags))
    process = await asyncio.create_subprocess_exec(*command, stdin=DEVNULL)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
