"""Show the summaries of a benchmark."""

import json
from collections.abc import Sequence
from dataclasses import asdict

from rich.table import Table

from pdserve.bench.summary import Percentiles, Slo, Summary


def table(summaries: Sequence[Summary], slo: Slo) -> Table:
    """Return one row a run; three numbers are p50, p90 and p99 in milliseconds."""
    view = Table(caption="three numbers: p50 / p90 / p99", caption_justify="left")
    view.add_column("workload")
    headings = ("s", "in tok/s", "out tok/s", "TTFT ms", "TPOT ms", "ITL ms", "hand-off MB", "hand-off ms")
    for heading in (*headings, _objective(slo), "failed"):
        view.add_column(heading, justify="right")
    for run in summaries:
        view.add_row(
            run.name,
            f"{run.duration_s:.2f}",
            f"{run.input_tokens_per_s:.0f}",
            f"{run.output_tokens_per_s:.0f}",
            *map(_three, (run.ttft_ms, run.tpot_ms, run.itl_ms)),
            f"{run.handoff_bytes / 1e6:.1f}",
            _three(run.handoff_ms),
            f"{run.goodput_per_s:.2f} ({run.attainment:.0%})",
            ", ".join(f"{count} {status}" for status, count in run.failures.items()) or "0",
        )
    return view


def as_json(summaries: Sequence[Summary], slo: Slo) -> str:
    """Return the summaries as JSON."""
    runs = [asdict(summary) for summary in summaries]
    return json.dumps({"slo": asdict(slo), "runs": runs}, indent=2) + "\n"


def _three(values: Percentiles | None) -> str:
    if values is None:
        return "-"
    return " / ".join(f"{value:.1f}" for value in (values.p50, values.p90, values.p99))


def _objective(slo: Slo) -> str:
    limits = [f"{name} {ms:g} ms" for name, ms in (("TTFT", slo.ttft_ms), ("TPOT", slo.tpot_ms)) if ms]
    return f"goodput/s ({', '.join(limits) or 'no objective'})"
