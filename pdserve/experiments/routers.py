"""Several routers over one set of workers: how right each one's predictions are, and what a late one knows is cached.

Two prefill workers hold different prompts before a late router starts. A router that does not know which of them holds
a prompt finds it by chance only, so the share that it finds over several prompts tells whether it knows.
"""

import asyncio
import os
import random
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

import grpc

from pdserve.bench.errors import Accuracy, accuracy
from pdserve.bench.summary import Sample
from pdserve.bench.workload import Arrival, prompts
from pdserve.clock import MonotonicClock
from pdserve.errors import ConfigError
from pdserve.experiments.lengths import Lengths
from pdserve.experiments.live import LiveCluster, Tell, connected, live_cluster
from pdserve.launch.admin import AdminClient
from pdserve.launch.folder import free_port
from pdserve.launch.local import LaunchError
from pdserve.launch.plan import ClusterSpec, flag_arguments
from pdserve.launch.state import ClusterState

_HOST = "127.0.0.1"
_READY_TIMEOUT_S = 60.0
_LATE_LOAD = 0.6  # of the capacity, while routers learn
_ANSWER_TOKENS = 2
_MOST_FILLS = 10  # bursts of prompts, until every prefill worker holds its share


@dataclass(frozen=True, slots=True)
class Trial:
    """What is done, and for how long."""

    lengths: Lengths
    num_routers: int = 4
    loads: tuple[float, ...] = (0.6,)  # shares of the capacity
    calibration_s: float = 60.0
    seconds: float = 45.0  # of each run
    rounds: int = 2  # of one run with one router and one with all, by turns
    num_prefixes: int = 8  # that each late router is asked for
    prefix_tokens: int = 256
    seed: int = 0


@dataclass(frozen=True, slots=True)
class LateRouter:
    """What a router knew that started after prompts were cached."""

    name: str
    listening_s: float  # from its process's start until it answered its operator
    complete_s: float  # the same, until all workers were attached to it
    found: int  # of the prompts, those that it sent to the worker that held them
    asked: int
    missed_until_s: float  # from its listening until it was last asked for one that it did not find; 0: it found all
    asked_by_s: float  # from its listening until the last of them was answered


@dataclass(frozen=True, slots=True)
class Findings:
    """What came of it."""

    capacity_per_s: float
    late: tuple[LateRouter, ...]
    runs: tuple[Accuracy, ...]  # for each load: by one router, by all, and by each of all


@dataclass(frozen=True, slots=True)
class _Late:
    cluster: LiveCluster
    listening_s: float
    complete_s: float
    listened_at_s: float


async def measure_routers(spec: ClusterSpec, trial: Trial, tell: Tell) -> Findings:
    """Start a cluster and further routers one by one; compare what each knows and predicts."""
    ports = [free_port(_HOST) for _ in range(trial.num_routers)]
    attached = replace(
        spec,
        worker_flags={**spec.worker_flags, "routers": tuple(f"{_HOST}:{port}" for port in ports)},
        internal_port=ports[0],
    )
    async with live_cluster(attached, tell) as first, AsyncExitStack() as stack:
        clusters, late = [first], list[LateRouter]()
        for number, port in enumerate(ports[1:], start=1):
            begun = await _fill_caches(first, trial, number, tell)
            started = await stack.enter_async_context(late_router(attached, first.state, f"router-{number}", port))
            late.append(await _ask_prefixes(started, begun, f"router-{number}"))
            tell(f"router-{number} found {late[-1].found} of {late[-1].asked} prompts")
            clusters.append(started.cluster)
        capacity = await _calibrate(clusters, trial, tell)
        runs = await _compare(clusters, trial, capacity, tell)
    return Findings(capacity, tuple(late), tuple(runs))


# ---- a late router


@asynccontextmanager
async def late_router(spec: ClusterSpec, state: ClusterState, name: str, internal_port: int) -> AsyncIterator[_Late]:
    """Run one more router for the cluster's workers for the length of the block."""
    clock, public_port = MonotonicClock(), free_port(_HOST)
    flags = {
        **spec.router_flags,
        "model": spec.model,
        "served_model_name": spec.served_model_name,
        "secret_file": state.secret_file,
        "router_id": name,
        "host": _HOST,
        "port": public_port,
        "internal_host": _HOST,
        "internal_port": internal_port,
    }
    began_s = clock.now_s()
    process = await _start(flags)
    try:
        own = state.model_copy(update={"endpoint": f"{_HOST}:{public_port}", "admin": f"{_HOST}:{internal_port}"})
        async with asyncio.TaskGroup() as tasks:
            guard = tasks.create_task(_raise_when_ended(process, name))
            listened_s, complete_s = await _attended(own, name, spec.num_prefill + spec.num_decode, clock)
            guard.cancel()
        async with connected(own) as cluster:
            yield _Late(cluster, listened_s - began_s, complete_s - began_s, listened_s)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _start(flags: Mapping[str, object]) -> asyncio.subprocess.Process:
    tether = (sys.executable, "-P", "-m", "pdserve.launch.tether", str(os.getpid()))
    command = (sys.executable, "-P", "-m", "pdserve", "router", *flag_arguments(flags))
    return await asyncio.create_subprocess_exec(*tether, *command, stdin=asyncio.subprocess.DEVNULL)


async def _raise_when_ended(process: asyncio.subprocess.Process, name: str) -> None:
    raise LaunchError(f"{name} ended with status {await process.wait()} before its workers were attached")


async def _attended(state: ClusterState, name: str, num_workers: int, clock: MonotonicClock) -> tuple[float, float]:
    """Wait for a router and for its workers; return when it listened, and when all were attached and ready."""
    listened_s: float | None = None
    try:
        async with asyncio.timeout(_READY_TIMEOUT_S), AdminClient(state.admin, state.secret_file) as operator:
            while True:
                try:
                    async for status in operator.watch(wait_for_ready=True):
                        listened_s = listened_s or clock.now_s()
                        if sum(worker.registration.ready for worker in status.workers) == num_workers:
                            return listened_s, clock.now_s()
                except grpc.aio.AioRpcError as error:
                    if error.code() is not grpc.StatusCode.UNAVAILABLE:
                        raise
    except TimeoutError as error:
        text = f"{name}: {num_workers} workers were not attached within {_READY_TIMEOUT_S:.0f} s"
        raise LaunchError(text) from error


# ---- what is cached


@dataclass(frozen=True, slots=True)
class _Cached:
    """Prompts of one tenant that workers hold."""

    tenant: str
    prompts: tuple[tuple[int, ...], ...]


async def _fill_caches(cluster: LiveCluster, trial: Trial, number: int, tell: Tell) -> _Cached:
    """Have prompts computed until each prefill worker holds as many as any other; return those."""
    tell(f"caching {trial.num_prefixes} prompts before router-{number} starts")
    shape = Arrival(0.0, trial.prefix_tokens, _ANSWER_TOKENS)
    tenant, each = cluster.client.new_tenant(), trial.num_prefixes // 2
    held: dict[str, list[tuple[int, ...]]] = {p.name: [] for p in cluster.state.processes if p.role == "prefill"}
    for turn in range(_MOST_FILLS):
        seed = trial.seed + 1000 * number + turn
        ids = [tuple(prompt) for prompt in prompts([shape] * trial.num_prefixes, cluster.vocab_size, seed)]
        async with asyncio.TaskGroup() as tasks:
            asked = [(prompt, tasks.create_task(cluster.client.ask(shape, prompt, tenant))) for prompt in ids]
        for prompt, task in asked:
            if (worker := task.result().prefill_worker) in held:
                held[worker].append(prompt)
        if all(len(prompts_) >= each for prompts_ in held.values()):
            return _Cached(tenant, tuple(prompt for prompts_ in held.values() for prompt in prompts_[:each]))
    counts = {name: len(prompts_) for name, prompts_ in held.items()}
    raise ConfigError(f"prefixes: {each} prompts are wanted on each prefill worker, computed were {counts}")


async def _ask_prefixes(late: _Late, cached: _Cached, name: str) -> LateRouter:
    """Ask a late router for each prompt; count those that went where they are held."""
    client, found, missed_until_s, now_s = late.cluster.client, 0, 0.0, 0.0
    for prompt in cached.prompts:
        longer, asked_s = (*prompt, *prompt[:8]), client.clock.now_s() - late.listened_at_s
        sample = await client.ask(Arrival(0.0, len(longer), _ANSWER_TOKENS), longer, cached.tenant)
        now_s = client.clock.now_s() - late.listened_at_s
        if 2 * sample.cached_tokens > len(prompt):
            found += 1
        else:
            missed_until_s = asked_s
    return LateRouter(name, late.listening_s, late.complete_s, found, len(cached.prompts), missed_until_s, now_s)


# ---- predictions


async def _calibrate(clusters: Sequence[LiveCluster], trial: Trial, tell: Tell) -> float:
    """Let all routers learn what steps cost; return the capacity."""
    tell("calibrating: keeping the cluster full")
    capacity = await clusters[0].capacity(trial.lengths.requests, trial.calibration_s / 2, trial.seed)
    tell(f"capacity: {capacity:.2f} requests/s; calibrating at {_LATE_LOAD:.0%} of it through all routers")
    arrivals = trial.lengths.poisson(_LATE_LOAD * capacity, trial.calibration_s / 2, trial.seed)
    await _spread(clusters, arrivals, trial.seed)
    return capacity


async def _compare(clusters: Sequence[LiveCluster], trial: Trial, capacity: float, tell: Tell) -> list[Accuracy]:
    """Send each load through one router and through all, by turns; return how far off predictions were."""
    runs = list[Accuracy]()
    for load in trial.loads:
        alone, spread = list[Sample](), [list[Sample]() for _ in clusters]
        for turn in range(trial.rounds):
            seed = trial.seed + 100 * turn + round(1000 * load)
            tell(f"round {turn + 1} of {trial.rounds} at {load:.0%} of the capacity: one router, then all")
            arrivals = trial.lengths.poisson(load * capacity, trial.seconds, seed)
            alone += (await _spread(clusters[:1], arrivals, seed))[0]
            arrivals = trial.lengths.poisson(load * capacity, trial.seconds, seed + 1)
            for samples, share in zip(spread, await _spread(clusters, arrivals, seed + 1), strict=True):
                samples.extend(share)
        together = [sample for samples in spread for sample in samples]
        runs.append(accuracy(f"{load:.0%}, one router", alone))
        runs.append(accuracy(f"{load:.0%}, {len(clusters)} routers", together))
        runs += [accuracy(f"{load:.0%}, router {place}", samples) for place, samples in enumerate(spread)]
    return runs


async def _spread(clusters: Sequence[LiveCluster], arrivals: Sequence[Arrival], seed: int) -> list[list[Sample]]:
    """Send each request through a router drawn at random; return what came of them, by router."""
    shares = split(arrivals, len(clusters), seed)
    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(cluster.run(share, seed=seed + place))
            for place, (cluster, share) in enumerate(zip(clusters, shares, strict=True))
        ]
    return [each.result() for each in running]


def split(arrivals: Sequence[Arrival], count: int, seed: int) -> list[list[Arrival]]:
    """Deal arrivals out at random to so many routers; each keeps its time."""
    draw = random.Random(seed)
    shares = [list[Arrival]() for _ in range(count)]
    for arrival in arrivals:
        shares[draw.randrange(count)].append(arrival)
    return shares
