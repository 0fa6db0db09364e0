"""How long the answers that a decode worker writes, or will write, probably keep it busy. Pure."""

from bisect import bisect_left, bisect_right, insort
from itertools import accumulate


class Answers:
    """Sequences, by the decode step of their worker at which each will probably have ended."""

    def __init__(self) -> None:
        self._ends: list[float] = []  # in order
        self._sums: list[float] | None = None  # of the ends before each; made when asked for

    def add(self, end: float, count: int) -> None:
        for _ in range(count):
            insort(self._ends, end)
        self._sums = None

    def remove(self, end: float, count: int) -> None:
        first = bisect_left(self._ends, end)
        del self._ends[first : first + count]
        self._sums = None

    def num_left(self, step: float) -> int:
        """Return how many will go on after a step."""
        return len(self._ends) - bisect_right(self._ends, step)

    def mean_left(self, begin: float, num_steps: float) -> float:
        """Return how many there will be during so many steps from `begin` on, on average."""
        ends, sums = self._ends, self._sums
        if not ends:
            return 0.0
        if sums is None:
            sums = self._sums = list(accumulate(ends, initial=0.0))
        first = bisect_right(ends, begin)
        last = bisect_right(ends, begin + num_steps, first)
        steps_of_ending = sums[last] - sums[first] - (last - first) * begin
        return len(ends) - last + steps_of_ending / num_steps
