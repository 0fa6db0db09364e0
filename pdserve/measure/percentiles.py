"""Percentiles: the value below which a share of all values lies, interpolated linearly, as numpy does by default."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of one quantity, in its own unit."""

    p50: float
    p90: float
    p99: float
    max: float

    def text(self, factor: float = 1.0, digits: int = 0) -> str:
        """Return "p50 / p90 / p99", each multiplied by a factor."""
        return " / ".join(f"{factor * value:.{digits}f}" for value in (self.p50, self.p90, self.p99))


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the value below which `share` of the ordered values lie."""
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def percentiles(values: Iterable[float]) -> Percentiles | None:
    """Return the usual percentiles; None of no values."""
    ordered = sorted(values)
    return Percentiles(*(percentile(ordered, share) for share in (0.5, 0.9, 0.99, 1.0))) if ordered else None
