"""Show what experiments found."""

import json
from collections.abc import Sequence
from dataclasses import asdict

from pdserve.bench.errors import Accuracy, Errors
from pdserve.bench.summary import Percentiles
from pdserve.bench.tables import Column, Sheet
from pdserve.experiments.overload import Goal, Point, kept
from pdserve.experiments.prediction import Prediction
from pdserve.experiments.replay import Replay

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


def error_sheet(runs: Sequence[Accuracy], capacity_per_s: float, title: str) -> Sheet:
    """Return one row a run: how far predictions were off."""
    rows = [(run.name, str(run.num_requests), *_errors(run.ttft), *_errors(run.tpot)) for run in runs]
    return Sheet(f"{title}; capacity {capacity_per_s:.2f} requests/s", ERROR_COLUMNS, rows)


def prediction_json(found: Prediction, title: str) -> str:
    """Return errors and, for each request, what was predicted and seen, as JSON."""
    requests = [
        [(s.sent_s, s.prompt_len, s.predicted_ttft_s, s.ttft_s, s.predicted_tpot_s, s.tpot_s) for s in run]
        for run in found.samples
    ]
    fields = ("sent_s", "prompt_len", "predicted_ttft_s", "ttft_s", "predicted_tpot_s", "tpot_s")
    runs = [
        {**asdict(run), "requests": [dict(zip(fields, each, strict=True)) for each in told]}
        for run, told in zip(found.runs, requests, strict=True)
    ]
    return _json({"workload": title, "capacity_per_s": found.capacity_per_s, "runs": runs})


_OVERLOAD_COLUMNS = (
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


def overload_sheet(points: Sequence[Point], goal: Goal, title: str) -> Sheet:
    """Return one row a policy and load."""
    rows = []
    for each in points:
        waited = "-" if each.refusal_p99_s is None else f"{each.refusal_p99_s * 1e3:.0f} ms"
        hinted = "-" if each.with_retry_after is None else f"{each.with_retry_after:.0%}"
        shares = (each.attainment, each.admitted_attainment, each.refused)
        rates = (f"{each.load:.0%}", f"{each.rate_per_s:.2f}", f"{each.goodput_per_s:.2f}")
        rows.append((each.policy, *rates, *(f"{share:.1%}" for share in shares), waited, hinted))
    policies = dict.fromkeys(point.policy for point in points)
    notes = [f"{name} keeps {kept(points, name):.0%} of its best goodput" for name in policies]
    return Sheet(f"{title}; {_asked(goal)}", _OVERLOAD_COLUMNS, rows, notes)


def overload_json(points: Sequence[Point], goal: Goal, title: str) -> str:
    """Return the points as JSON."""
    return _json({"workload": title, "goal": asdict(goal), "points": [asdict(point) for point in points]})


_REPLAY_COLUMNS = (
    Column("load", "share of the capacity"),
    Column("side", is_text=True),
    Column("goodput/s", "requests within both objectives"),
    Column("attained", "share of all requests within both objectives", rank=1),
    Column("refused", rank=1),
    Column("TTFT", "p50 / p90, ms"),
    Column("TPOT", "p50 / p90, ms"),
    Column("TPOT error", "median of |predicted - seen| / seen", rank=2),
)


def replay_sheet(found: Sequence[Replay], goal: Goal, title: str) -> Sheet:
    """Return two rows a load, live and simulated."""
    rows = []
    for each in found:
        for side in (each.live, each.simulated):
            rates = (f"{side.goodput_per_s:.2f}", f"{side.attainment:.1%}", f"{side.refused:.1%}")
            times = (_half(side.ttft_ms), _half(side.tpot_ms), _errors(side.tpot_errors)[0])
            rows.append((f"{each.load:.0%}", side.name, *rates, *times))
    return Sheet(f"{title}; {_asked(goal)}", _REPLAY_COLUMNS, rows)


def replay_json(found: Sequence[Replay], goal: Goal, title: str) -> str:
    """Return both sides as JSON."""
    return _json({"workload": title, "goal": asdict(goal), "loads": [asdict(each) for each in found]})


def _json(value: object) -> str:
    return json.dumps(value, indent=1) + "\n"


def _asked(goal: Goal) -> str:
    slo = goal.slo
    return (
        f"capacity {goal.capacity_per_s:.2f} requests/s, TTFT {slo.ttft_ms or 0:.0f} ms, TPOT {slo.tpot_ms or 0:.0f} ms"
    )


def _half(values: Percentiles | None) -> str:
    return "-" if values is None else f"{values.p50:.0f} / {values.p90:.0f}"


def _errors(errors: Errors | None) -> tuple[str, str, str]:
    if errors is None:
        return "-", "-", "-"
    return f"{errors.median_error:.1%}", f"{errors.p90_error:.1%}", f"{errors.median_ratio:.2f}"
