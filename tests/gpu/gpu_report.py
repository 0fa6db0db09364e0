"""What a section finds: rows of figures, and how they are laid out."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpu_device import Device


@dataclass(frozen=True, slots=True)
class Row:
    """A check's or a benchmark's outcome. A figure's name ends in its unit."""

    name: str
    figures: dict[str, float] = field(default_factory=dict)
    note: str = ""
    failed: bool = False


Case = tuple[str, Callable[[], Iterable[Row]]]  # its name, and what runs it


@dataclass(frozen=True, slots=True)
class Section:
    """Cases that belong together. What they share is set up between them, in `cases`."""

    name: str
    weight: float  # its share of the time
    cases: Callable[["Device"], Iterator[Case]]


def timed(name: str, time_us: float, amount: float, unit: str, note: str = "") -> Row:
    """Return a row with a time and a rate: amount / second, in `unit`."""
    return Row(name, {"us": time_us, unit: 1e6 * amount / time_us}, note)


def failure(name: str, error: BaseException | str) -> Row:
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    return Row(name, note=text[:400], failed=True)


def line(row: Row) -> str:
    figures = "  ".join(f"{_short(value)} {name}" for name, value in row.figures.items())
    return "  ".join(part for part in (f"  {row.name:<44}", "FAILED" * row.failed, figures, row.note) if part)


def _short(value: float) -> str:
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
