"""Show what experiments found."""

import json
from collections.abc import Sequence
from dataclasses import asdict

from rich.table import Table

from pdserve.bench.errors import Errors
from pdserve.bench.summary import Percentiles
from pdserve.experiments.overload import Goal, Point, kept
from pdserve.experiments.prediction import Prediction
from pdserve.experiments.replay import Replay


def prediction_table(found: Prediction, title: str) -> Table:
    """Return one row a load: how far predictions were off."""
    table = Table(title=f"{title}; capacity {found.capacity_per_s:.2f} requests/s")
    for column in ("load", "requests", "TTFT error p50", "p90", "predicted/seen", "TPOT error p50", "p90"):
        table.add_column(column, justify="right")
    table.add_column("predicted/seen", justify="right")
    for run in found.runs:
        table.add_row(run.name, str(run.num_requests), *error_cells(run.ttft), *error_cells(run.tpot))
    return table


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


def overload_table(points: Sequence[Point], goal: Goal, title: str) -> Table:
    """Return one row a policy and load."""
    table = Table(title=f"{title}; {_asked(goal)}")
    for column in (
        "policy",
        "load",
        "requests/s",
        "goodput/s",
        "attained",
        "of admitted",
        "refused",
        "refused in, p99",
    ):
        table.add_column(column, justify="left" if column == "policy" else "right")
    table.add_column("with retry-after", justify="right")
    for each in points:
        waited = "-" if each.refusal_p99_s is None else f"{each.refusal_p99_s * 1e3:.0f} ms"
        hinted = "-" if each.with_retry_after is None else f"{each.with_retry_after:.0%}"
        shares = (each.attainment, each.admitted_attainment, each.refused)
        rates = (f"{each.load:.0%}", f"{each.rate_per_s:.2f}", f"{each.goodput_per_s:.2f}")
        table.add_row(each.policy, *rates, *(f"{share:.1%}" for share in shares), waited, hinted)
    policies = dict.fromkeys(point.policy for point in points)
    table.caption = "; ".join(f"{name} keeps {kept(points, name):.0%} of its best goodput" for name in policies)
    return table


def overload_json(points: Sequence[Point], goal: Goal, title: str) -> str:
    """Return the points as JSON."""
    return _json({"workload": title, "goal": asdict(goal), "points": [asdict(point) for point in points]})


def replay_table(found: Sequence[Replay], goal: Goal, title: str) -> Table:
    """Return two rows a load, live and simulated, and how far they are apart."""
    table = Table(title=f"{title}; {_asked(goal)}")
    for column in ("load", "", "goodput/s", "attained", "refused", "TTFT p50/p90 ms", "TPOT p50/p90 ms"):
        table.add_column(column, justify="right")
    table.add_column("error of predicted TPOT", justify="right")
    for each in found:
        for side in (each.live, each.simulated):
            rates = (f"{side.goodput_per_s:.2f}", f"{side.attainment:.1%}", f"{side.refused:.1%}")
            times = (_half(side.ttft_ms), _half(side.tpot_ms), error_cells(side.tpot_errors)[0])
            table.add_row(f"{each.load:.0%}", side.name, *rates, *times)
    return table


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


def error_cells(errors: Errors | None) -> tuple[str, str, str]:
    """Return the cells of a table that tell the median error, its p90 and the median of predicted : seen."""
    if errors is None:
        return "-", "-", "-"
    return f"{errors.median_error:.1%}", f"{errors.p90_error:.1%}", f"{errors.median_ratio:.2f}"
