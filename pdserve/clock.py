"""Time as decisions see it: seconds on a clock that only goes forward.

Only durations cross a wire; readings of this clock mean nothing to another process.
"""

import time
from typing import Protocol

_LOADED_S = time.monotonic()  # early in a process's life: before anything that takes long to import


class Clock(Protocol):
    def now_s(self) -> float:
        """Return seconds since some fixed moment; never goes back."""
        ...


class MonotonicClock:
    def now_s(self) -> float:
        return time.monotonic()


def process_age_s() -> float:
    """Return how long this process has been there, less the fraction of a second before this module was loaded."""
    return time.monotonic() - _LOADED_S
