"""Live clusters at shares of their capacity: what clients see at each load."""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from pdserve.base.errors import CommandError
from pdserve.launch.plan import ClusterSpec
from pdserve.measure.live import LiveCluster, Report, live_cluster, saturate
from pdserve.measure.outcomes import ANY, Objective, Outcome, Summary, summarize
from pdserve.measure.tables import counted
from pdserve.measure.workload import Arrival, Workload, random_prompts

_LENIENT_TTFT, _LENIENT_TPOT = 6.0, 2.0  # times what is seen at light load
_LIGHT_LOAD = 0.3  # of the capacity


@dataclass(frozen=True, slots=True)
class Trial:
    """How a cluster is loaded, and for how long."""

    workload: Workload
    loads: tuple[float, ...]  # shares of the capacity
    seconds: float  # at each load
    calibration_s: float
    objective: Objective | None = None  # None: multiples of what is seen at light load
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Findings:
    """What was found: the capacity of the first cluster, and one run a load and cluster."""

    workload: str
    capacity_per_s: float
    objective: Objective
    runs: tuple[Summary, ...] = ()

    @property
    def title(self) -> str:
        return f"{self.workload}; capacity {self.capacity_per_s:.2f} requests/s; {self.objective}"


async def measure_loads(specs: Mapping[str, ClusterSpec], trial: Trial, report: Report) -> Findings:
    """Load a cluster of each spec in turn. All get the first one's loads and objective."""
    found: Findings | None = None
    for name, spec in specs.items():
        async with live_cluster(spec, report) as cluster:
            own = await calibrate(cluster, trial, report)
            found = found or own
            async for load, _, outcomes in served(cluster, trial, found, report):
                summary = summarize(f"{load:.0%}, {name}", outcomes, found.objective, trial.seconds)
                found = replace(found, runs=(*found.runs, summary))
    if found is None:
        raise ValueError("at least one cluster is needed")
    return found


async def calibrate(cluster: LiveCluster, trial: Trial, report: Report) -> Findings:
    """Find the capacity, then an objective at light load unless the trial has one; this teaches the router too."""
    seconds, arrivals = trial.calibration_s / 2, trial.workload.arrivals
    report("calibrating: keeping the cluster full")
    prompts = random_prompts(arrivals, cluster.vocab_size, trial.seed)
    capacity = await saturate(cluster.client, arrivals, prompts, seconds)
    report(f"capacity: {capacity:.2f} requests/s; calibrating at {_LIGHT_LOAD:.0%} of it")
    light = await cluster.run(trial.workload.during(seconds, _LIGHT_LOAD * capacity, trial.seed), ANY, trial.seed + 1)
    objective = trial.objective or _lenient(light)
    report(f"objective: {objective}")
    return Findings(trial.workload.name, capacity, objective)


async def served(
    cluster: LiveCluster, trial: Trial, goal: Findings, report: Report
) -> AsyncIterator[tuple[float, Sequence[Arrival], list[Outcome]]]:
    """Serve each load of a trial in turn; yield it, what was sent and what came of it."""
    for seed, load in enumerate(trial.loads, start=trial.seed + 2):
        rate = load * goal.capacity_per_s
        report(f"measuring at {load:.0%} of the capacity, {rate:.2f} requests/s")
        arrivals = trial.workload.during(trial.seconds, rate, seed)
        if not arrivals:
            raise CommandError(
                f"no request comes in {trial.seconds:g} s at {rate:.2f} requests/s: --seconds is too short"
            )
        with counted("requests", len(arrivals)) as advance:
            outcomes = await cluster.run(arrivals, goal.objective, seed, advance)
        yield load, arrivals, outcomes


def _lenient(light: Sequence[Outcome]) -> Objective:
    ttfts_s = [outcome.ttft_s for outcome in light if outcome.ttft_s is not None]
    tpots_s = [outcome.tpot_s for outcome in light if outcome.tpot_s is not None]
    return Objective(_LENIENT_TTFT * median(ttfts_s), _LENIENT_TPOT * median(tpots_s)) if ttfts_s and tpots_s else ANY
