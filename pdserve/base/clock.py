"""Time: a clock that only goes forward, for decisions; and identities of process starts, by the wall clock.

Only durations cross a wire; readings of a clock mean nothing to another process.
"""

import secrets
import time
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from math import inf
from typing import Protocol

from pdserve.base.ids import Incarnation

Action = Callable[..., object]

_RANDOM_BITS = 22  # of an incarnation; the 42 bits above them last until 2109
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


def new_incarnation() -> Incarnation:
    """Mint a process start's identity, greater than all earlier ones: milliseconds since 1970, then random bits.

    Incarnations of one name are only compared with each other: nobody reads a time out of them. `docs/handoff.md` says
    what a wrong clock can do.
    """
    return Incarnation(time.time_ns() // 1_000_000 << _RANDOM_BITS | secrets.randbits(_RANDOM_BITS))


class VirtualClock:
    """A clock for simulators and tests: carries out actions in order of time, or as given if at one moment."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s
        self._soon: deque[tuple[Action, tuple[object, ...]]] = deque()
        self._later: list[tuple[float, int, Action, tuple[object, ...]]] = []
        self._count = 0
        self._is_stopped = False

    def now_s(self) -> float:
        return self._now_s

    def soon(self, action: Action, *args: object) -> None:
        """Do something at this moment, once what is being done is over."""
        self._soon.append((action, args))

    def at(self, at_s: float, action: Action, *args: object) -> None:
        """Do something at a time that has not passed."""
        self._count += 1
        heappush(self._later, (at_s, self._count, action, args))

    def advance(self, seconds: float) -> None:
        """Let so much time pass, with all that happens in it."""
        if seconds < 0:
            raise ValueError(f"seconds: {seconds} would turn the clock back")
        self.run(self._now_s + seconds)

    def run(self, until_s: float = inf) -> None:
        """Let everything happen that is due by then; without a time, until nothing is left to do."""
        soon, later, self._is_stopped = self._soon, self._later, False
        while not self._is_stopped:
            while soon:
                action, args = soon.popleft()
                action(*args)
            if not later or later[0][0] > until_s:
                self._now_s = until_s if until_s < inf else self._now_s
                return
            self._now_s, _, action, args = heappop(later)
            action(*args)

    def stop(self) -> None:
        """Let `run` return once the present action is over; the next `run` goes on from there."""
        self._is_stopped = True
