"""Percentiles: the value below which a share of all values lies, interpolated linearly."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of one quantity, in its own unit."""

    p50: float
    p90: float
    p99: float
    max: float


def shown(values: Percentiles | None, share: str, factor: float = 1.0, digits: int = 1) -> str:
    """Return one of the percentiles, "p50" to "max", multiplied by a factor; "-" where there are none."""
    return "-" if values is None else f"{factor * getattr(values, share):.{digits}f}"


def shown_all(values: Percentiles | None, factor: float = 1.0, digits: int = 0) -> str:
    """Return "p50 / p90 / p99", each multiplied by a factor; "-" where there are none."""
    if values is None:
        return "-"
    return " / ".join(f"{factor * value:.{digits}f}" for value in (values.p50, values.p90, values.p99))


def percentiles(values: Iterable[float]) -> Percentiles | None:
    """Return the usual percentiles; None of no values."""
    known = np.fromiter(values, dtype=np.float64)
    return Percentiles(*np.percentile(known, (50, 90, 99, 100)).tolist()) if len(known) else None
