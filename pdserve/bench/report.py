"""Show the summaries of a benchmark."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict

from pdserve.bench.ladder import PARTS
from pdserve.bench.summary import Percentiles, Slo, Summary
from pdserve.bench.tables import Comparison

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


def table(summaries: Sequence[Summary]) -> Comparison:
    """Return one column a run, one row a quantity."""
    rows = [(name, [rate(run) for run in summaries]) for name, rate in RATES.items()]
    for name, times in TIMES.items():
        shares = ("p50", "p90", "p99")
        rows += [(f"{name} {share} ms", [_shown(times(run), share) for run in summaries]) for share in shares]
    return Comparison("", [run.name for run in summaries], rows)


def parts_table(summaries: Sequence[Summary]) -> Comparison:
    """Return one column a run, one row a part of a request's way from rung to rung."""
    rows = []
    for name in PARTS:
        found = [run.parts_ms.get(name) for run in summaries]
        rows.append((name, ["-" if p is None else f"{p.p50:.1f} / {p.p90:.1f} / {p.p99:.1f}" for p in found]))
    return Comparison("from rung to rung, ms: p50 / p90 / p99", [run.name for run in summaries], rows)


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
