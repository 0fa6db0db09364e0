"""The lines of a table."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Row:
    """A check's or a benchmark's outcome."""

    name: str
    time_us: float | None = None
    rate: float | None = None
    unit: str = ""
    peers: dict[str, float] = field(default_factory=dict)  # name -> microseconds
    note: str = ""
    failed: bool = False


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
