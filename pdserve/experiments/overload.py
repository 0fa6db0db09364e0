"""What a live cluster does beyond its capacity, under several policies."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from pdserve.bench.summary import Sample, Slo, percentile
from pdserve.errors import Status
from pdserve.experiments.lengths import Lengths
from pdserve.experiments.live import ANY, LiveCluster, Tell

_LENIENT_TTFT, _LENIENT_TPOT = 6.0, 2.0  # times what is seen at light load
_LIGHT_LOAD = 0.3  # of the capacity


@dataclass(frozen=True, slots=True)
class Trial:
    """What is done, and for how long."""

    lengths: Lengths
    loads: tuple[float, ...]  # shares of the capacity
    seconds: float  # at each load
    slo: Slo | None  # None: a multiple of what is seen at light load
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Point:
    """One policy under one load. Every request that was sent counts in the goodput."""

    policy: str
    load: float
    rate_per_s: float
    num_requests: int
    goodput_per_s: float
    attainment: float  # share of all requests
    admitted_attainment: float  # share of those that were not refused
    refused: float  # share of all
    refusal_p99_s: float | None  # None: nothing was refused
    with_retry_after: float | None  # share of the refusals


@dataclass(frozen=True, slots=True)
class Goal:
    """What the cluster can do, and what is asked of it."""

    capacity_per_s: float
    slo: Slo


async def find_goal(cluster: LiveCluster, trial: Trial, seconds: float, tell: Tell) -> Goal:
    """Keep the cluster full, then serve a light load: teaches its router too."""
    tell("calibrating: keeping the cluster full")
    capacity = await cluster.capacity(trial.lengths.requests, seconds, trial.seed)
    tell(f"capacity: {capacity:.2f} requests/s; calibrating at {_LIGHT_LOAD:.0%} of it")
    light = await cluster.run(trial.lengths.poisson(_LIGHT_LOAD * capacity, seconds, trial.seed), ANY, trial.seed + 1)
    slo = trial.slo or _lenient(light)
    tell(f"objectives: TTFT {slo.ttft_ms or 0:.0f} ms, TPOT {slo.tpot_ms or 0:.0f} ms")
    return Goal(capacity, slo)


async def sweep(cluster: LiveCluster, policy: str, goal: Goal, trial: Trial, tell: Tell) -> list[Point]:
    """Serve each load in turn."""
    points = []
    for number, load in enumerate(trial.loads, start=2):
        rate = load * goal.capacity_per_s
        tell(f"{policy} at {load:.0%} of the capacity, {rate:.2f} requests/s")
        arrivals = trial.lengths.poisson(rate, trial.seconds, trial.seed + number)
        samples = await cluster.run(arrivals, goal.slo, trial.seed + number)
        points.append(point(policy, load, samples, goal, trial.seconds))
    return points


def point(policy: str, load: float, samples: Sequence[Sample], goal: Goal, seconds: float) -> Point:
    """Return what a run adds up to; rates are of the time during which requests were sent."""
    refused = [sample for sample in samples if sample.status == Status.RESOURCE_EXHAUSTED.value]
    num_met = sum(goal.slo.is_met(sample) for sample in samples)
    waits_s = sorted(sample.ended_s - sample.sent_s for sample in refused)
    return Point(
        policy=policy,
        load=load,
        rate_per_s=load * goal.capacity_per_s,
        num_requests=len(samples),
        goodput_per_s=num_met / seconds,
        attainment=num_met / max(1, len(samples)),
        admitted_attainment=num_met / max(1, len(samples) - len(refused)),
        refused=len(refused) / max(1, len(samples)),
        refusal_p99_s=percentile(waits_s, 0.99) if refused else None,
        with_retry_after=sum(s.retry_after_s is not None for s in refused) / len(refused) if refused else None,
    )


def kept(points: Sequence[Point], policy: str) -> float:
    """Return the goodput at the highest load as a share of the policy's best."""
    own = [point for point in points if point.policy == policy]
    return max(own, key=lambda each: each.load).goodput_per_s / max(1e-9, *(each.goodput_per_s for each in own))


def _lenient(light: Sequence[Sample]) -> Slo:
    ttfts = [sample.ttft_s for sample in light if sample.ttft_s is not None]
    tpots = [sample.tpot_s for sample in light if sample.tpot_s is not None]
    if not ttfts or not tpots:
        return Slo()
    return Slo(1e3 * _LENIENT_TTFT * median(ttfts), 1e3 * _LENIENT_TPOT * median(tpots))
