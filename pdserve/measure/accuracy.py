"""How right the router's predictions are on a live cluster, after a calibration that began with a wrong profile."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from pdserve.launch.plan import ClusterSpec
from pdserve.measure.live import Findings, LiveCluster, LoadRun, Report, Trial, live_cluster
from pdserve.measure.outcomes import ANY, Outcome
from pdserve.measure.summary import Errors, summarize
from pdserve.measure.tables import Column, Sheet

_FULL_SHARE = 2 / 3  # of the calibration, which finds the capacity
_CALIBRATION_LOAD = 0.6  # of the capacity, for the rest of it

ERROR_COLUMNS = (
    Column("load", is_text=True),
    Column("requests", rank=2),
    Column("TTFT error p50", "of predicted times, |predicted - seen| / seen"),
    Column("TTFT error p90", rank=1),
    Column("TTFT ratio", "median of predicted / seen", rank=3),
    Column("TPOT error p50"),
    Column("TPOT error p90", rank=1),
    Column("TPOT ratio", rank=3),
)


@dataclass(frozen=True, slots=True)
class Accuracy:
    findings: Findings
    outcomes: tuple[Sequence[Outcome], ...]  # of each run


def accuracy_json(found: Accuracy) -> dict[str, object]:
    """Return errors and, for each request, what was predicted and seen."""
    runs = [
        {**asdict(run), "requests": [_seen(outcome) for outcome in outcomes]}
        for run, outcomes in zip(found.findings.runs, found.outcomes, strict=True)
    ]
    return {**asdict(found.findings), "runs": runs}


def _seen(outcome: Outcome) -> dict[str, object]:
    fields = ("sent_s", "prompt_tokens", "predicted_ttft_s", "ttft_s", "predicted_tpot_s", "tpot_s")
    return {name: getattr(outcome, name) for name in fields}


def error_table(findings: Findings) -> Sheet:
    """Return one row a run: how far predictions were off."""
    rows = [
        (
            run.summary.name,
            str(run.summary.num_requests),
            *_cells(run.summary.ttft_error),
            *_cells(run.summary.tpot_error),
        )
        for run in findings.runs
    ]
    return Sheet(findings.title, ERROR_COLUMNS, rows)


def _cells(errors: Errors | None) -> tuple[str, str, str]:
    if errors is None:
        return "-", "-", "-"
    return f"{errors.p50:.1%}", f"{errors.p90:.1%}", f"{errors.ratio_p50:.2f}"


async def measure_accuracy(spec: ClusterSpec, trial: Trial, report: Report) -> Accuracy:
    """Start a cluster, calibrate it by load alone, then compare predictions at each load."""
    async with live_cluster(spec, report) as cluster:
        return await _measure(cluster, trial, report)


async def _measure(cluster: LiveCluster, trial: Trial, report: Report) -> Accuracy:
    full_s = _FULL_SHARE * trial.calibration_s
    capacity = await cluster.calibrate(trial, full_s, report)
    rate = _CALIBRATION_LOAD * capacity
    arrivals = trial.workload.during(trial.calibration_s - full_s, rate, trial.seed)
    report(f"calibrating at {_CALIBRATION_LOAD:.0%} of the capacity")
    await cluster.run(arrivals, seed=trial.seed + 1)
    runs, all_outcomes = list[LoadRun](), list[Sequence[Outcome]]()
    async for load, _, outcomes in cluster.loaded(trial, capacity, ANY, report):
        name = f"{load:.0%}, {load * capacity:.2f}/s"
        runs.append(LoadRun(load, summarize(name, outcomes, ANY, trial.seconds)))
        all_outcomes.append(outcomes)
    return Accuracy(Findings(trial.workload.name, capacity, ANY, tuple(runs)), tuple(all_outcomes))
