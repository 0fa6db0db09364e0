"""Virtual time: what happens when."""

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush

Action = Callable[..., object]


class Timeline:
    """Actions in order of time; those of one moment in the order they were asked for."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._soon: deque[tuple[Action, tuple[object, ...]]] = deque()
        self._later: list[tuple[float, int, Action, tuple[object, ...]]] = []
        self._count = 0

    def soon(self, action: Action, *args: object) -> None:
        """Do something at this moment, once what is being done is over."""
        self._soon.append((action, args))

    def at(self, at_s: float, action: Action, *args: object) -> None:
        self._count += 1
        heappush(self._later, (at_s, self._count, action, args))

    def run(self) -> None:
        """Let everything happen until nothing is left to do."""
        soon, later = self._soon, self._later
        while True:
            while soon:
                action, args = soon.popleft()
                action(*args)
            if not later:
                return
            self.now_s, _, action, args = heappop(later)
            action(*args)
