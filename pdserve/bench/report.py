"""Show the summaries of a benchmark."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict

from rich.table import Table

from pdserve.bench.ladder import PARTS
from pdserve.bench.summary import Percentiles, Slo, Summary

RATES: dict[str, Callable[[Summary], str]] = {
    "seconds": lambda run: f"{run.duration_s:.2f}",
    "input tokens/s": lambda run: f"{run.input_tokens_per_s:.0f}",
    "output tokens/s": lambda run: f"{run.output_tokens_per_s:.0f}",
    "requests/s": lambda run: f"{run.requests_per_s:.2f}",
    "goodput/s": lambda run: f"{run.goodput_per_s:.2f}",
    "attainment": lambda run: f"{run.attainment:.0%}",
    "failed": lambda run: ", ".join(f"{count} {status}" for status, count in run.failures.items()) or "0",
    "hand-off MB": lambda run: f"{run.handoff_bytes / 1e6:.1f}",
}
TIMES: dict[str, Callable[[Summary], Percentiles | None]] = {
    "TTFT": lambda run: run.ttft_ms,
    "TPOT": lambda run: run.tpot_ms,
    "ITL": lambda run: run.itl_ms,
    "hand-off": lambda run: run.handoff_ms,
}


def table(summaries: Sequence[Summary]) -> Table:
    """Return one column a run, one row a quantity."""
    view = Table()
    view.add_column("")
    for run in summaries:
        view.add_column(run.name, justify="right")
    for name, rate in RATES.items():
        view.add_row(name, *(rate(run) for run in summaries))
    for name, times in TIMES.items():
        for share in ("p50", "p90", "p99"):
            view.add_row(f"{name} {share} ms", *(_shown(times(run), share) for run in summaries))
    return view


def parts_table(summaries: Sequence[Summary]) -> Table:
    """Return one column a run, one row a part of a request's way from rung to rung."""
    view = Table(title="from rung to rung, ms: p50 / p90 / p99")
    view.add_column("")
    for run in summaries:
        view.add_column(run.name, justify="right")
    for name in PARTS:
        found = (run.parts_ms.get(name) for run in summaries)
        view.add_row(name, *("-" if p is None else f"{p.p50:.1f} / {p.p90:.1f} / {p.p99:.1f}" for p in found))
    return view


def as_json(summaries: Sequence[Summary], slo: Slo) -> str:
    """Return the summaries as JSON."""
    runs = [asdict(summary) for summary in summaries]
    return json.dumps({"slo": asdict(slo), "runs": runs}, indent=2) + "\n"


def _shown(values: Percentiles | None, share: str) -> str:
    return "-" if values is None else f"{getattr(values, share):.1f}"


def objective(slo: Slo) -> str:
    """Return what goodput counts, in words."""
    limits = [f"{name} {ms:g} ms" for name, ms in (("TTFT", slo.ttft_ms), ("TPOT", slo.tpot_ms)) if ms is not None]
    return f"goodput counts requests that ended well{' within ' if limits else ''}{' and '.join(limits)}"
