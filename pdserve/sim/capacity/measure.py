"""What simulations add up to: attainment and goodput at a rate, and the highest rate that keeps the attainment."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from pdserve.perfmodel.profile import Profile
from pdserve.sim.capacity.cluster import simulate
from pdserve.sim.capacity.shape import Objective, Outcome, Run, Shape
from pdserve.sim.capacity.workload import Workload

_MAX_DOUBLINGS = 12


@dataclass(frozen=True, slots=True)
class Percentiles:
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class Point:
    """One cluster under one load. Every request that arrived counts in the attainment."""

    shape: Shape
    policy: str
    rate_per_gpu: float  # requests per second that arrived
    attainment: float
    goodput_per_gpu: float  # requests per second that met both objectives
    refused: float  # share
    missed: dict[str, float]  # share of all requests, by what was missed: ttft, tpot, refused
    ttft_s: Percentiles
    tpot_s: Percentiles
    utilization: dict[str, float]  # of each pool: share of the time that it computed


@dataclass(frozen=True, slots=True)
class Question:
    """What is simulated."""

    profile: Profile
    workload: Workload
    objective: Objective


def measure(question: Question, shape: Shape, policy: str, rate_per_gpu: float) -> Point:
    """Simulate one cluster under one load."""
    workload = question.workload.at_rate(rate_per_gpu * shape.num_gpus)
    run = simulate(question.profile, shape, policy, workload, question.objective)
    return summarize(run, question.objective, shape, policy, rate_per_gpu)


def summarize(run: Run, objective: Objective, shape: Shape, policy: str, rate_per_gpu: float) -> Point:
    outcomes = run.outcomes
    misses = Counter(_miss(outcome, objective) for outcome in outcomes)
    served = [outcome for outcome in outcomes if not outcome.refused]
    attainment = misses.pop("", 0) / len(outcomes)
    return Point(
        shape=shape,
        policy=policy,
        rate_per_gpu=rate_per_gpu,
        attainment=attainment,
        goodput_per_gpu=attainment * rate_per_gpu,
        refused=misses["refused"] / len(outcomes),
        missed={name: count / len(outcomes) for name, count in sorted(misses.items())},
        ttft_s=_percentiles([outcome.ttft_s for outcome in served]),
        tpot_s=_percentiles([outcome.tpot_s for outcome in served if outcome.num_tokens > 1]),
        utilization=_utilization(run),
    )


def highest_rate(
    question: Question, shape: Shape, policy: str, wanted: float, *, at_least: float = 0.0, precision: float = 0.04
) -> Point | None:
    """Bisect the highest rate per GPU that keeps the wanted attainment; None if `at_least` is not kept."""

    def attempt(rate_per_gpu: float) -> Point:
        return measure(question, shape, policy, rate_per_gpu)

    low = attempt(at_least) if at_least > 0 else _first_good(attempt, wanted)
    if low is None or low.attainment < wanted:
        return None
    high_rate = low.rate_per_gpu
    for _ in range(_MAX_DOUBLINGS):
        high_rate *= 2
        point = attempt(high_rate)
        if point.attainment < wanted:
            break
        low = point
    while high_rate > low.rate_per_gpu * (1 + precision):
        point = attempt((low.rate_per_gpu + high_rate) / 2)
        if point.attainment >= wanted:
            low = point
        else:
            high_rate = point.rate_per_gpu
    return low


def _first_good(attempt: Callable[[float], Point], wanted: float) -> Point | None:
    for rate_per_gpu in (1.0, 0.25, 0.05):
        point = attempt(rate_per_gpu)
        if point.attainment >= wanted:
            return point
    return None


def _miss(outcome: Outcome, objective: Objective) -> str:
    if outcome.refused:
        return "refused"
    if outcome.ttft_s > objective.ttft_s:
        return "ttft"
    return "tpot" if outcome.tpot_s > objective.tpot_s else ""


def _percentiles(values: list[float]) -> Percentiles:
    ordered = sorted(values) or [0.0]
    last = len(ordered) - 1
    return Percentiles(ordered[round(0.5 * last)], ordered[round(0.9 * last)], ordered[round(0.99 * last)])


def _utilization(run: Run) -> dict[str, float]:
    pools: dict[str, list[float]] = {}
    for name, share in run.busy.items():
        pools.setdefault("prefill" if name.startswith("p") else "decode", []).append(share)
    return {pool: sum(shares) / len(shares) for pool, shares in pools.items()}
