"""How long the answers that a decode worker writes, or will write, probably keep it busy. Pure."""

from bisect import bisect_left, bisect_right, insort
from itertools import accumulate
from math import inf


class Answers:
    """Sequences, by the decode step of their worker at which each will probably have ended."""

    def __init__(self) -> None:
        self._ends: list[float] = []  # in order
        self._sums: list[float] | None = None  # of the ends before each; made when asked for

    def __len__(self) -> int:
        return len(self._ends)

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


class Batch:
    """The answers of one decode worker, and the steps by which they are counted."""

    def __init__(self, now_s: float) -> None:
        self.coming = Answers()  # their ends are counted from the step at which they join
        self.running = Answers()
        self._num_steps = 0
        self._stepped_s = now_s  # when the latest step ended
        self._step_s = inf  # how long it took

    def step(self, num_steps: int, step_s: float, now_s: float) -> None:
        """Note the end of so many steps."""
        self._num_steps += num_steps
        self._stepped_s, self._step_s = now_s, step_s or inf

    def join(self, answer_steps: float, count: int, now_s: float) -> float:
        """Let sequences begin to decode; return the step at which they will probably have ended."""
        if not len(self.running):
            self._stepped_s = now_s
        end = self.num_steps(now_s) + answer_steps
        self.running.add(end, count)
        return end

    def num_steps(self, now_s: float) -> float:
        """Return how many steps have probably been done by now, if it has anything to decode."""
        return self._num_steps + (now_s - self._stepped_s) / self._step_s
