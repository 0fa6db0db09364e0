"""A machine whose workers slow each other down, under virtual time."""

from collections.abc import Callable
from dataclasses import dataclass

from pdserve.virtual_time import VirtualClock

_DONE_S = 1e-9


@dataclass(slots=True)
class _Job:
    """A step that runs."""

    left_s: float  # if it ran alone
    slowdown: float  # by each other one
    began_s: float
    end: Callable[[float], object]


class Machine:
    """Steps that run at the same time, each at a pace that depends on how many others do."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._jobs: list[_Job] = []
        self._advanced_s = 0.0
        self._turn = 0  # to tell an end that was moved

    def begin(self, alone_s: float, slowdown: float, end: Callable[[float], object]) -> None:
        """Run a step that takes `alone_s` alone; `end` is called at its end with the time it took."""
        self._advance()
        self._jobs.append(_Job(alone_s, slowdown, self._clock.now_s(), end))
        self._arrange()

    def _advance(self) -> None:
        now_s, others = self._clock.now_s(), len(self._jobs) - 1
        for job in self._jobs:
            job.left_s -= (now_s - self._advanced_s) / job.slowdown**others
        self._advanced_s = now_s

    def _arrange(self) -> None:
        self._turn += 1
        if self._jobs:
            next_s = min(job.left_s * job.slowdown ** (len(self._jobs) - 1) for job in self._jobs)
            self._clock.at(self._clock.now_s() + max(0.0, next_s), self._ring, self._turn)

    def _ring(self, turn: int) -> None:
        if turn != self._turn:
            return
        self._advance()
        ended = [job for job in self._jobs if job.left_s <= _DONE_S]
        self._jobs = [job for job in self._jobs if job.left_s > _DONE_S]
        self._arrange()
        for job in ended:
            job.end(self._clock.now_s() - job.began_s)
