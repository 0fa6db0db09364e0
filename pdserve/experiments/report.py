"""Show what experiments found."""

import json
from dataclasses import asdict

from rich.table import Table

from pdserve.bench.errors import Errors
from pdserve.experiments.prediction import Prediction


def prediction_table(found: Prediction, title: str) -> Table:
    """Return one row a load: how far predictions were off."""
    table = Table(title=f"{title}; capacity {found.capacity_per_s:.2f} requests/s")
    for column in ("load", "requests", "TTFT error p50", "p90", "predicted/seen", "TPOT error p50", "p90"):
        table.add_column(column, justify="right")
    table.add_column("predicted/seen", justify="right")
    for run in found.runs:
        table.add_row(run.name, str(run.num_requests), *_errors(run.ttft), *_errors(run.tpot))
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
    return json.dumps({"workload": title, "capacity_per_s": found.capacity_per_s, "runs": runs}, indent=1) + "\n"


def _errors(errors: Errors | None) -> tuple[str, str, str]:
    if errors is None:
        return "-", "-", "-"
    return f"{errors.median_error:.1%}", f"{errors.p90_error:.1%}", f"{errors.median_ratio:.2f}"
