"""The list of what `make gpu` runs. A benchmark elsewhere joins by appending its Section here."""

from collections.abc import Callable
from dataclasses import dataclass

from pdserve.kernels.gpu import attention_bench, ceilings, checks, rows_bench, tune
from pdserve.kernels.gpu.rows import Choice, Row

__all__ = ["SECTIONS", "Choice", "Row", "Section", "table"]


@dataclass(frozen=True, slots=True)
class Section:
    """A table of the program's output."""

    name: str
    group: str  # the word that asks for it: check, bench, tune
    run: Callable[[Choice], list[Row]]


SECTIONS = [
    Section("ceilings", "bench", ceilings.run),
    Section("checks against float64", "check", checks.run),
    Section("prefill attention", "bench", attention_bench.prefill),
    Section("decode attention", "bench", attention_bench.decode),
    Section("pages, rows and sampling", "bench", rows_bench.run),
    Section("tuning", "tune", tune.run),
]


def table(title: str, rows: list[Row]) -> str:
    """Lay rows out as short lines: name, our time, our rate, then each peer's time and how much faster we are."""
    lines = [f"\n== {title}"]
    for row in rows:
        words = [f"{row.name:<44}"]
        if row.time_us is not None:
            words.append(f"{row.time_us:10.1f} us")
        if row.rate is not None:
            words.append(f"{row.rate:8.1f} {row.unit}")
        for peer, time_us in row.peers.items():
            faster = f" ({time_us / row.time_us:.2f}x)" if row.time_us else ""
            words.append(f"{peer} {time_us:.1f}{faster}")
        if row.failed:
            words.append("FAILED")
        lines.append("  ".join([*words, row.note]))
    return "\n".join(lines) + "\n"
