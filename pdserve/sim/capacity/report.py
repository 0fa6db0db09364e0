"""Results of simulations as a table, as JSON and as a plot."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from pdserve.errors import ConfigError
from pdserve.sim.capacity.measure import Percentiles, Point


def table(points: Sequence[Point], title: str) -> Table:
    rows = Table(title=title)
    for column in ("cluster", "policy", "req/s/GPU", "attainment", "goodput/GPU", "refused", "TTFT ms", "TPOT ms"):
        rows.add_column(column, justify="left" if column in {"cluster", "policy"} else "right")
    rows.add_column("busy", justify="right")
    for point in points:
        rows.add_row(
            str(point.shape),
            point.policy,
            f"{point.rate_per_gpu:.2f}",
            f"{point.attainment:.1%}",
            f"{point.goodput_per_gpu:.2f}",
            f"{point.refused:.1%}",
            _ms(point.ttft_s),
            _ms(point.tpot_s),
            " ".join(f"{share:.0%}" for share in point.utilization.values()),
        )
    return rows


def _ms(times: Percentiles) -> str:
    return f"{times.p50 * 1e3:.0f} / {times.p90 * 1e3:.0f} / {times.p99 * 1e3:.0f}"


def as_json(points: Sequence[Point], title: str) -> str:
    return json.dumps({"title": title, "points": [asdict(point) for point in points]}, indent=1)


def plot(points: Sequence[Point], title: str, wanted: float, path: Path) -> None:
    """Draw attainment over the rate, a line for each cluster and policy; ConfigError without matplotlib."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - an extra that only plots need
    except ImportError as error:
        raise ConfigError("--plot: needs matplotlib: pip install 'pdserve[plots]'") from error
    figure = Figure(figsize=(7, 4.2))
    axes = figure.add_subplot()
    lines: dict[str, list[Point]] = {}
    for point in points:
        lines.setdefault(f"{point.shape}, {point.policy}", []).append(point)
    for name, line in lines.items():
        ordered = sorted(line, key=lambda point: point.rate_per_gpu)
        axes.plot([p.rate_per_gpu for p in ordered], [100 * p.attainment for p in ordered], marker="o", label=name)
    axes.axhline(100 * wanted, linestyle=":", color="grey")
    axes.set_xlabel("requests per second and GPU")
    axes.set_ylabel("requests within both objectives, %")
    axes.set_ylim(0, 102)
    axes.set_title(title)
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110, bbox_inches="tight")
