"""Several routers over one set of workers: how right each one's predictions are, and what a late one knows is cached.

Two prefill workers hold different prompts before a late router starts. A router that does not know which of them holds
a prompt finds it by chance only, so the share that it finds over several prompts shows whether it knows.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

import grpc

from pdserve.clock import MonotonicClock
from pdserve.errors import ConfigError
from pdserve.launch.folder import ClusterState, free_port
from pdserve.launch.local import LaunchError
from pdserve.launch.plan import ClusterSpec
from pdserve.measure.accuracy import error_table
from pdserve.measure.client import new_tenant, request_of
from pdserve.measure.live import Findings, LiveCluster, LoadRun, Report, Trial, connected, live_cluster, router_process
from pdserve.measure.outcomes import ANY, Outcome
from pdserve.measure.summary import summarize
from pdserve.measure.tables import Column, Sheet
from pdserve.measure.workload import Arrival, random_prompts

_HOST = "127.0.0.1"
_READY_TIMEOUT_S = 60.0
_LATE_LOAD = 0.6  # of the capacity, while routers learn
_ANSWER_TOKENS = 2
_NUM_PREFIXES, _PREFIX_TOKENS = 8, 256  # that each late router is asked for
_ROUNDS = 2  # of one run with one router and one with all, by turns
_MOST_FILLS = 10  # bursts of prompts, until every prefill worker holds its share


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
class RouterFindings:
    late: tuple[LateRouter, ...]
    findings: Findings  # for each load: by one router, by all, and by each of all


@dataclass(frozen=True, slots=True)
class _Late:
    cluster: LiveCluster
    listening_s: float
    complete_s: float
    listened_at_s: float


async def measure_routers(spec: ClusterSpec, num_routers: int, trial: Trial, report: Report) -> RouterFindings:
    """Start a cluster and further routers one by one; compare what each knows and predicts."""
    ports = [free_port(_HOST) for _ in range(num_routers)]
    attached = replace(
        spec,
        worker_flags={**spec.worker_flags, "routers": tuple(f"{_HOST}:{port}" for port in ports)},
        internal_port=ports[0],
    )
    async with live_cluster(attached, report) as first, AsyncExitStack() as stack:
        clusters, late = [first], list[LateRouter]()
        for number, port in enumerate(ports[1:], start=1):
            report(f"caching {_NUM_PREFIXES} prompts before router-{number} starts")
            tenant, prompts = await _fill_caches(first, trial.seed + 1000 * number)
            started = await stack.enter_async_context(late_router(attached, first.state, f"router-{number}", port))
            late.append(await _ask_prefixes(started, tenant, prompts, f"router-{number}"))
            report(f"router-{number} found {late[-1].found} of {late[-1].asked} prompts")
            clusters.append(started.cluster)
        capacity = await _calibrate(clusters, trial, report)
        runs = await _compare(clusters, trial, capacity, report)
    return RouterFindings(tuple(late), Findings(trial.workload.name, capacity, ANY, tuple(runs)))


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
    async with router_process(flags) as process:
        own = state.model_copy(update={"endpoint": f"{_HOST}:{public_port}", "admin": f"{_HOST}:{internal_port}"})
        async with asyncio.TaskGroup() as tasks:
            guard = tasks.create_task(_raise_when_ended(process, name))
            listened_s, complete_s = await _attended(own, name, spec.num_prefill + spec.num_decode, clock)
            guard.cancel()
        async with connected(own) as cluster:
            yield _Late(cluster, listened_s - began_s, complete_s - began_s, listened_s)


async def _raise_when_ended(process: asyncio.subprocess.Process, name: str) -> None:
    raise LaunchError(f"{name} ended with status {await process.wait()} before its workers were attached")


async def _attended(state: ClusterState, name: str, num_workers: int, clock: MonotonicClock) -> tuple[float, float]:
    """Wait for a router and for its workers; return when it listened, and when all were attached and ready."""
    listened_s: float | None = None
    operator = state.operator()
    try:
        async with asyncio.timeout(_READY_TIMEOUT_S):
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


async def _fill_caches(cluster: LiveCluster, seed: int) -> tuple[str, list[list[int]]]:
    """Have prompts of a tenant computed until each prefill worker holds as many as any other; return both."""
    shape = Arrival(0.0, _PREFIX_TOKENS, _ANSWER_TOKENS)
    tenant, each = new_tenant(), _NUM_PREFIXES // 2
    held: dict[str, list[list[int]]] = {p.name: [] for p in cluster.state.processes if p.role == "prefill"}
    for turn in range(_MOST_FILLS):
        prompts = random_prompts([shape] * _NUM_PREFIXES, cluster.vocab_size, seed + turn)
        requests = [(0.0, request_of(shape, prompt, tenant, ANY)) for prompt in prompts]
        for prompt, outcome in zip(prompts, await cluster.client.run(requests), strict=True):
            if outcome.prefill_worker in held:
                held[outcome.prefill_worker].append(prompt)
        if all(len(own) >= each for own in held.values()):
            return tenant, [prompt for own in held.values() for prompt in own[:each]]
    counts = {name: len(own) for name, own in held.items()}
    raise ConfigError(f"prefixes: {each} prompts are wanted on each prefill worker, computed were {counts}")


async def _ask_prefixes(late: _Late, tenant: str, prompts: list[list[int]], name: str) -> LateRouter:
    """Ask a late router for each prompt; count those that went where they are held."""
    client, found, missed_until_s, now_s = late.cluster.client, 0, 0.0, 0.0
    for prompt in prompts:
        longer = [*prompt, *prompt[:8]]
        request = request_of(Arrival(0.0, len(longer), _ANSWER_TOKENS), longer, tenant, ANY)
        outcome = await client.send(request, late.listened_at_s)
        now_s = client.clock.now_s() - late.listened_at_s
        if 2 * outcome.cached_tokens > len(prompt):
            found += 1
        else:
            missed_until_s = outcome.sent_s
    return LateRouter(name, late.listening_s, late.complete_s, found, len(prompts), missed_until_s, now_s)


# ---- predictions


async def _calibrate(clusters: Sequence[LiveCluster], trial: Trial, report: Report) -> float:
    """Let all routers learn what steps cost; return the capacity."""
    seconds = trial.calibration_s / 2
    capacity = await clusters[0].calibrate(trial, seconds, report)
    report(f"calibrating at {_LATE_LOAD:.0%} of the capacity through all routers")
    await _spread(clusters, trial.workload.during(seconds, _LATE_LOAD * capacity, trial.seed), trial.seed)
    return capacity


async def _compare(clusters: Sequence[LiveCluster], trial: Trial, capacity: float, report: Report) -> list[LoadRun]:
    """Send each load through one router and through all, by turns; return how far off predictions were."""
    runs = list[LoadRun]()
    for load in trial.loads:
        alone, spread = list[Outcome](), [list[Outcome]() for _ in clusters]
        for turn in range(_ROUNDS):
            seed = trial.seed + 100 * turn + round(1000 * load)
            report(f"round {turn + 1} of {_ROUNDS} at {load:.0%} of the capacity: one router, then all")
            arrivals = trial.workload.during(trial.seconds, load * capacity, seed)
            alone += (await _spread(clusters[:1], arrivals, seed))[0]
            arrivals = trial.workload.during(trial.seconds, load * capacity, seed + 1)
            for outcomes, share in zip(spread, await _spread(clusters, arrivals, seed + 1), strict=True):
                outcomes.extend(share)
        named = {"one router": alone, f"{len(clusters)} routers": [each for own in spread for each in own]}
        named.update({f"router {place}": outcomes for place, outcomes in enumerate(spread)})
        seconds = _ROUNDS * trial.seconds
        runs += [LoadRun(load, summarize(f"{load:.0%}, {name}", own, ANY, seconds)) for name, own in named.items()]
    return runs


async def _spread(clusters: Sequence[LiveCluster], arrivals: Sequence[Arrival], seed: int) -> list[list[Outcome]]:
    """Send each request through a router chosen at random; return what came of them, by router."""
    shares = split(arrivals, len(clusters), seed)
    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(cluster.run(share, seed=seed + place))
            for place, (cluster, share) in enumerate(zip(clusters, shares, strict=True))
        ]
    return [each.result() for each in running]


def split(arrivals: Sequence[Arrival], count: int, seed: int) -> list[list[Arrival]]:
    """Deal arrivals out at random to so many routers; each keeps its time."""
    rng = random.Random(seed)
    shares = [list[Arrival]() for _ in range(count)]
    for arrival in arrivals:
        shares[rng.randrange(count)].append(arrival)
    return shares


# ---- tables


_LATE_COLUMNS = (
    Column("router", is_text=True),
    Column("listening after", "s", rank=2),
    Column("workers attached after", "s", rank=1),
    Column("prompts found"),
    Column("last miss after", "s"),
    Column("all answered after", "s", rank=3),
)


def routers_tables(found: RouterFindings) -> tuple[Sheet, Sheet]:
    """Return what late routers knew, and how far predictions were off."""
    rows = []
    for each in found.late:
        starts = (f"{each.listening_s:.2f}", f"{each.complete_s:.2f}", f"{each.found} of {each.asked}")
        rows.append((each.name, *starts, f"{each.missed_until_s:.2f}", f"{each.asked_by_s:.2f}"))
    return Sheet("Routers that started after prompts were cached", _LATE_COLUMNS, rows), error_table(found.findings)
