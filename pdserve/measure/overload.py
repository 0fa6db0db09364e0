"""What live clusters do up to and beyond their capacity, under several policies."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

from pdserve.launch.plan import ClusterSpec
from pdserve.measure.live import Findings, LiveCluster, LoadRun, Report, Trial, live_cluster
from pdserve.measure.outcomes import ANY, Objective, Outcome
from pdserve.measure.summary import summarize
from pdserve.measure.tables import Column, Sheet

_LENIENT_TTFT, _LENIENT_TPOT = 6.0, 2.0  # times what is seen at light load
_LIGHT_LOAD = 0.3  # of the capacity

_COLUMNS = (
    Column("policy", is_text=True),
    Column("load", "share of the capacity"),
    Column("requests/s", rank=3),
    Column("goodput/s", "requests within both objectives"),
    Column("attained", "share of all requests within both objectives"),
    Column("of admitted", "the same of those that were not refused", rank=1),
    Column("refused", rank=1),
    Column("refused within", "p99", rank=2),
    Column("with retry-after", "share of the refusals", rank=4),
)


async def measure_overload(
    spec_of: Callable[[str], ClusterSpec], policies: Sequence[str], trial: Trial, report: Report
) -> Findings:
    """Load a cluster of each policy in turn. All get the first one's loads and objective."""
    found: Findings | None = None
    for policy in policies:
        async with live_cluster(spec_of(policy), report) as cluster:
            own = await find_goal(cluster, trial, report)
            found = found or own
            runs = await _serve(cluster, policy, found, trial, report)
            found = replace(found, runs=(*found.runs, *runs))
    if found is None:
        raise ValueError("at least one policy is needed")
    return found


async def find_goal(cluster: LiveCluster, trial: Trial, report: Report) -> Findings:
    """Find the capacity, then an objective at light load unless the trial has one; this teaches the router too."""
    seconds = trial.calibration_s / 2
    capacity = await cluster.calibrate(trial, seconds, report)
    report(f"calibrating at {_LIGHT_LOAD:.0%} of the capacity")
    arrivals = trial.workload.during(seconds, _LIGHT_LOAD * capacity, trial.seed)
    light = await cluster.run(arrivals, ANY, trial.seed + 1)
    objective = trial.objective or _lenient(light)
    report(f"objective: {objective}")
    return Findings(trial.workload.name, capacity, objective, ())


async def _serve(cluster: LiveCluster, policy: str, goal: Findings, trial: Trial, report: Report) -> list[LoadRun]:
    served = cluster.loaded(trial, goal.capacity_per_s, goal.objective, report)
    return [
        LoadRun(load, summarize(policy, outcomes, goal.objective, trial.seconds)) async for load, _, outcomes in served
    ]


def _lenient(light: Sequence[Outcome]) -> Objective:
    ttfts_s = [outcome.ttft_s for outcome in light if outcome.ttft_s is not None]
    tpots_s = [outcome.tpot_s for outcome in light if outcome.tpot_s is not None]
    return Objective(_LENIENT_TTFT * median(ttfts_s), _LENIENT_TPOT * median(tpots_s)) if ttfts_s and tpots_s else ANY


def kept(runs: Sequence[LoadRun], policy: str) -> float:
    """Return the goodput at the highest load as a share of the policy's best."""
    own = [run for run in runs if run.summary.name == policy]
    best = max(1e-9, *(run.summary.goodput_per_s for run in own))
    return max(own, key=lambda run: run.load).summary.goodput_per_s / best


def overload_table(found: Findings) -> Sheet:
    rows = []
    for run in found.runs:
        each = run.summary
        shares = (f"{share:.1%}" for share in (each.attainment, each.admitted_attainment, each.refused))
        waited = "-" if each.refusal_s is None else f"{1e3 * each.refusal_s.p99:.0f} ms"
        hinted = "-" if each.retry_after is None else f"{each.retry_after:.0%}"
        rates = (f"{run.load * found.capacity_per_s:.2f}", f"{each.goodput_per_s:.2f}")
        rows.append((each.name, f"{run.load:.0%}", *rates, *shares, waited, hinted))
    policies = dict.fromkeys(run.summary.name for run in found.runs)
    notes = [f"{policy} keeps {kept(found.runs, policy):.0%} of its best goodput" for policy in policies]
    return Sheet(found.title, _COLUMNS, rows, notes)
