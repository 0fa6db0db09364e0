"""Geometry of plots: lines over two axes, and stages of requests over time. `static/report.html` draws them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import floor, log10

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
