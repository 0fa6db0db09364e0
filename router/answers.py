"""How long answers get, and how long those that a decode worker writes or will write keep it busy. Pure.

Invariant: an answer counts until it has ended. One that has not ended when it was due goes on for as long as answers
have been overdue on average, whenever it is looked at: so many more are overdue, so many more will be there.
"""

from bisect import bisect_left, bisect_right, insort
from itertools import accumulate
from math import exp, inf

_MEMORY = 50  # answers in running means
_START_TOKENS = 128.0  # of an answer, before one was seen
_START_DECODING_S = 2.0


class AnswerLengths:
    """Learns how long answers get, and guesses how long the next one will be.

    Two guesses compete: the mean of the answers so far, and the mean share of what requests allowed. Where clients ask
    for what they need, the second is right; where they ask for more than they need, the first. Whichever was nearer
    lately is believed.
    """

    def __init__(self) -> None:
        self.mean_tokens = _START_TOKENS
        self.decoding_s = _START_DECODING_S  # mean time from first to last token
        self._share = 1.0
        self._errors = [0.0, 0.0]  # means of |guess - tokens|: by the mean, by the share
        self._overdue_tokens, self._num_reached = _START_TOKENS, 0

    def observe(self, num_tokens: int, max_tokens: int, decoding_s: float) -> None:
        """Take in an answer, and what its request allowed."""
        excess = num_tokens - self.expected(max_tokens)
        if excess >= 0:
            self._num_reached += 1
            self._overdue_tokens += (excess - self._overdue_tokens) / min(_MEMORY, self._num_reached)
        for number, guess in enumerate(self._guesses(max_tokens)):
            self._errors[number] += (abs(guess - num_tokens) - self._errors[number]) / _MEMORY
        self.mean_tokens += (num_tokens - self.mean_tokens) / _MEMORY
        self.decoding_s += (decoding_s - self.decoding_s) / _MEMORY
        self._share += (num_tokens / max(1, max_tokens) - self._share) / _MEMORY

    def expected(self, max_tokens: int) -> float:
        """Return how many tokens an answer will probably have."""
        by_mean, by_share = self._guesses(max_tokens)
        return by_share if self._errors[1] < self._errors[0] else by_mean

    def left(self, num_tokens: int, max_tokens: int) -> float:
        """Return how many tokens an answer that has so many will probably still gain."""
        return min(max_tokens - num_tokens, max(self.expected(max_tokens) - num_tokens, self.overdue_tokens))

    @property
    def overdue_tokens(self) -> float:
        """Mean number of tokens still to come of an answer that has as many as were expected: the mean residual life.

        At least the token that is being computed.
        """
        return max(1.0, self._overdue_tokens)

    def _guesses(self, max_tokens: int) -> tuple[float, float]:
        return min(self.mean_tokens, max_tokens), self._share * max_tokens


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

    def num_left(self, step: float, now: float, overdue_steps: float) -> float:
        """Return how many will probably go on after a step."""
        return len(self._ends) - bisect_right(self._ends, step) + self._num_overdue(step, now, overdue_steps)

    def mean_left(self, begin: float, num_steps: float, now: float, overdue_steps: float) -> float:
        """Return how many there will be during so many steps from `begin` on, on average."""
        overdue = self._num_overdue(begin, now, overdue_steps)
        ratio = num_steps / overdue_steps
        return self._mean_due(begin, num_steps) + overdue * (1 - exp(-ratio)) / ratio

    def _num_overdue(self, step: float, now: float, overdue_steps: float) -> float:
        """Return how many of those due by a step will go on after it: for so many steps on average from then on.

        What is overdue now is there, and may end at any step.
        """
        ends = self._ends
        due = bisect_right(ends, step)
        if not due:
            return 0.0
        late = bisect_right(ends, now, 0, due)
        return late * exp((now - step) / overdue_steps) + sum([exp((e - step) / overdue_steps) for e in ends[late:due]])

    def _mean_due(self, begin: float, num_steps: float) -> float:
        """Return the mean of those that are due later than `begin`, each until it is."""
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
