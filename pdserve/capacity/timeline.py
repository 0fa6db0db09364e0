"""Virtual time: what happens when."""

import gc
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from heapq import heappop, heappush

Action = Callable[..., object]


class Timeline:
    """Actions in order of time; those of one moment in the order they were asked for."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._soon: deque[tuple[Action, tuple[object, ...]]] = deque()
        self._later: list[tuple[float, int, Action, tuple[object, ...]]] = []
        self._count = 0
        self._is_stopped = False

    def soon(self, action: Action, *args: object) -> None:
        """Do something at this moment, once what is being done is over."""
        self._soon.append((action, args))

    def at(self, at_s: float, action: Action, *args: object) -> None:
        self._count += 1
        heappush(self._later, (at_s, self._count, action, args))

    def stop(self) -> None:
        """Let `run` return once the present action is over; the next `run` goes on from there."""
        self._is_stopped = True

    def run(self) -> None:
        """Let everything happen until nothing is left to do, or until somebody stops it."""
        soon, later, self._is_stopped = self._soon, self._later, False
        while not self._is_stopped:
            while soon:
                action, args = soon.popleft()
                action(*args)
            if not later:
                return
            self.now_s, _, action, args = heappop(later)
            action(*args)


@contextmanager
def garbage_left() -> Iterator[None]:
    """Look for cycles of objects at the end only: there are few before, and looking takes up to a third of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.collect(0)
            gc.enable()
