"""Reports of measurements: one HTML file each, readable offline, in dark and light, without scripts.

Plots are lines over two axes, or stages of requests over time. `static/report.html` draws what has its place from here.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby, pairwise
from math import floor, log10
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

import jinja2

from pdserve import __version__
from pdserve.measure.outcomes import Objective, Outcome, Summary
from pdserve.measure.tables import Comparison, compared
from pdserve.protocol.reports import Stage
from pdserve.router.requests.timeline import parts

if TYPE_CHECKING:
    from pdserve.measure.load import Run

MAX_ROWS = 60  # of a timeline
_TEMPLATES = Path(__file__).parent / "static"
WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 12, 44  # margins
ROW = 9  # height of a request in a timeline
Bar = tuple[str, float, float]  # name, start and end
_STEPS = (1, 2, 2.5, 5, 10)
_MAX_POINTS = 100  # of a distribution, about


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis from 0 on, `length` long where it is drawn."""

    label: str
    end: float
    length: int

    def at(self, value: float) -> float:
        """Return how far along it a value is; what is beyond its end is drawn there."""
        return self.length * min(1.0, value / self.end) if self.end > 0 else 0.0

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """Places of round numbers along it, with the numbers."""
        if self.end <= 0:
            return [(0.0, "0")]
        power = 10.0 ** floor(log10(self.end / 6))
        step = next(each * power for each in _STEPS if each * power >= self.end / 6)
        return [(self.at(n * step), f"{n * step:g}") for n in range(int(self.end / step + 1e-9) + 1)]


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Plot:
    title: str
    x: Axis
    y: Axis
    lines: Sequence[Line]
    has_marks: bool  # at each point

    height: int = HEIGHT

    def places(self, line: Line) -> list[tuple[float, float]]:
        return [(LEFT + self.x.at(x), HEIGHT - BOTTOM - self.y.at(y)) for x, y in line.points]


@dataclass(frozen=True, slots=True)
class Timeline:
    title: str
    x: Axis
    rows: Sequence[tuple[str, Sequence[Bar]]]
    names: Sequence[str]  # of all bars

    @property
    def height(self) -> int:
        return TOP + ROW * len(self.rows) + BOTTOM


def timeline(title: str, label: str, rows: Sequence[tuple[str, Sequence[Bar]]]) -> Timeline:
    bars = [bar for _, of_row in rows for bar in of_row]
    axis = Axis(label, max((end for *_, end in bars), default=0.0), WIDTH - LEFT - RIGHT)
    return Timeline(title, axis, rows, list(dict.fromkeys(name for name, *_ in bars)))


def plot(
    title: str, labels: tuple[str, str], lines: Sequence[Line], *, y_end: float = 0.0, has_marks: bool = False
) -> Plot:
    x_end = max((x for line in lines for x, _ in line.points), default=0.0)
    highest = max((y for line in lines for _, y in line.points), default=0.0)
    x = Axis(labels[0], x_end, WIDTH - LEFT - RIGHT)
    return Plot(title, x, Axis(labels[1], y_end or 1.05 * highest, HEIGHT - TOP - BOTTOM), lines, has_marks)


def shares(values: Iterable[float]) -> list[tuple[float, float]]:
    """Return (value, share in percent of all that are at most this much), up to the 99th percentile."""
    ordered = sorted(values)
    last = max(1, round(0.99 * len(ordered)))
    step = max(1, last // _MAX_POINTS)
    picked = [*range(step, last, step), last] if ordered else []
    return [(ordered[count - 1], 100.0 * count / len(ordered)) for count in picked]


def stepped(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the corners of a line that keeps the value of each point until the next one."""
    corners = [((x, before), (x, y)) for (_, before), (x, y) in pairwise(points)]
    return [*points[:1], *(corner for both in corners for corner in both)]


def write_page(
    path: Path, title: str, note: str, table: Comparison, charts: Sequence[Plot], timelines: Sequence[Timeline] = ()
) -> None:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    made = f"pdserve {__version__}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    page = environment.get_template("report.html").render(
        title=title, note=note, made=made, table=table, charts=charts, timelines=timelines, plots=sys.modules[__name__]
    )
    path.write_text(page, encoding="utf-8")


def write_report(path: Path, title: str, runs: "Sequence[Run]", objective: Objective) -> None:
    """Write a report of load runs, with where the time of their requests went."""
    charts = [*_over_rate(runs), *_distributions(runs)]
    timelines = [timeline for run in runs for timeline in _timelines(run)]
    note = f"Goodput counts requests that ended well ({objective})"
    write_page(path, title, note, compared(run.summary for run in runs), charts, timelines)


def _distributions(runs: "Sequence[Run]") -> list[Plot]:
    times: tuple[tuple[str, Callable[[Outcome], float | None]], ...] = (
        ("Time to first token", lambda outcome: outcome.ttft_s),
        ("Mean time per later token", lambda outcome: outcome.tpot_s),
    )
    charts = []
    for title, time_of in times:
        seen = [[1e3 * time for each in run.outcomes if (time := time_of(each)) is not None] for run in runs]
        lines = [Line(run.summary.name, shares(values)) for run, values in zip(runs, seen, strict=True)]
        charts.append(plot(title, ("ms", "% of requests"), lines, y_end=100.0))
    return charts


def _over_rate(runs: "Sequence[Run]") -> list[Plot]:
    """Return what changes with the rate; nothing where no workload was sent at several."""
    rated = [(run.workload, run.rate_per_s, run) for run in runs if run.rate_per_s is not None]
    rated.sort(key=itemgetter(0, 1))
    swept = {name: [run for *_, run in group] for name, group in groupby(rated, key=itemgetter(0))}
    if max(map(len, swept.values()), default=0) < 2:
        return []

    def line(name: str, value: Callable[[Summary], float]) -> Line:
        return Line(name, [(run.rate_per_s or 0.0, value(run.summary)) for run in swept[name]])

    def over(title: str, unit: str, value: Callable[[Summary], float], y_end: float = 0.0) -> Plot:
        lines = [line(name, value) for name in swept]
        return plot(title, ("requests sent per second", unit), lines, y_end=y_end, has_marks=True)

    return [
        over("Goodput", "requests per second within the objectives", lambda summary: summary.goodput_per_s),
        over("Attainment", "% of requests within the objectives", lambda summary: 100 * summary.attainment, 100.0),
        over("Time to first token, 90th percentile", "ms", lambda each: 1e3 * each.ttft_s.p90 if each.ttft_s else 0.0),
        over("Time per token, 90th percentile", "ms", lambda each: 1e3 * each.tpot_s.p90 if each.tpot_s else 0.0),
    ]


def _timelines(run: "Run") -> Iterator[Timeline]:
    """Yield what the first requests that ended well went through: from arrival to decoding, and over the run."""
    shown = sorted((each for each in run.rounds[-1] if each.stages_s), key=lambda each: each.sent_s)[:MAX_ROWS]
    rows = [
        (f"request {each.number}, {each.prompt_tokens} + {each.num_tokens} tokens", each.sent_s, _bars(each))
        for each in shown
    ]
    before = [(label, [bar for bar in bars if bar[0] != "decode"]) for label, _, bars in rows]
    yield timeline(f"{run.summary.name}: from arrival to decoding", "ms after arrival", before)
    over = [
        (label, [(name, sent_s + start / 1e3, sent_s + end / 1e3) for name, start, end in bars])
        for label, sent_s, bars in rows
    ]
    yield timeline(f"{run.summary.name}: over the run", "seconds of the run", over)


def _bars(outcome: Outcome) -> list[Bar]:
    """Return name, start and end of each part of a request's time, ms after its arrival."""
    stages = sorted(((Stage(name), 1e3 * at_s) for name, at_s in outcome.stages_s.items()), key=lambda step: step[1])
    return list(parts(stages))
