"""Searches the highest rate that a cluster sustains: it keeps up with it, and serves the wanted share in time.

Rates are tried in steps upward, then by halving the gap in their logarithms; each only until it is known
whether it is kept (`measure`). Near the answer, that may not be known within the most requests allowed. There the
estimate decides, and the result has the rates between which the answer lies for sure.
"""

from dataclasses import dataclass
from math import sqrt

from pdserve.capacity.long_run import MOST_GROWTH, Point, Question, measure
from pdserve.capacity.shape import Shape

PRECISION = 0.04  # of the rate
_SETTLED_WITHIN = 1.25  # between the rates that are kept and missed for sure
_FIRST_RATES = (1.0, 0.25, 0.05, 0.01)  # requests per second and GPU, until one is kept
_STEP, _SMALL_STEP = 2.0, 1.25  # upward, from a rate that says little and from one that others keep
_STEPS = (1.05, 1.15, 1.5)  # from the answer to rates that differ from it for sure


@dataclass(frozen=True, slots=True)
class Highest:
    """The highest rate, and what is known of it."""

    point: Point | None  # None: no rate is known to be kept
    at_least: float  # requests per second and GPU that are kept for sure; 0: none
    below: float | None  # that are not kept for sure; None: none was found

    @property
    def is_settled(self) -> bool:
        if self.point is None:
            return self.below is not None
        return self.below is not None and self.below <= _SETTLED_WITHIN * self.at_least


class Search:
    """Tries rates of one cluster."""

    def __init__(self, question: Question, shape: Shape, policy: str, wanted: float) -> None:
        self._question = question
        self._shape = shape
        self._policy = policy
        self._wanted = wanted
        self._best: Point | None = None
        self._kept: list[float] = []  # for sure
        self._missed: list[float] = []  # for sure

    def highest(self, at_least: float = 0.0) -> Highest:
        """Return the highest rate that is probably kept; no point if `at_least` is not."""
        rates = (at_least,) if at_least > 0 else _FIRST_RATES
        if not any(map(self._try, rates)) or self._best is None:
            return self.found
        step = _SMALL_STEP if at_least > 0 else _STEP
        high = step * self._best.rate_per_gpu
        while self._try(high):
            high *= step
        while high > (low := self._best.rate_per_gpu) * (1 + PRECISION):
            middle = sqrt(low * high)
            if not self._try(middle):
                high = middle
        return self.found

    def narrow(self) -> Highest:
        """Look for rates close to the answer that are kept and missed for sure."""
        if self._best is not None:
            answer = self._best.rate_per_gpu
            for step in _STEPS:
                if self.found.at_least < answer / step:
                    self._attempt(answer / step)
            for step in _STEPS:
                if (below := self.found.below) is None or below > answer * step * (1 + PRECISION):
                    self._attempt(answer * step)
        return self.found

    @property
    def found(self) -> Highest:
        if self._best is None:
            return Highest(None, max(self._kept, default=0.0), min(self._missed, default=None))
        answer = self._best.rate_per_gpu
        at_least = max((rate for rate in self._kept if rate <= answer), default=0.0)
        return Highest(self._best, at_least, min((rate for rate in self._missed if rate > answer), default=None))

    def _try(self, rate_per_gpu: float) -> bool:
        """Return whether a rate is probably kept, and take it for the best if so."""
        point = self._attempt(rate_per_gpu)
        is_kept = probably_keeps(point, self._wanted)
        if is_kept:
            self._best = point
        return is_kept

    def _attempt(self, rate_per_gpu: float) -> Point:
        point = measure(self._question, self._shape, self._policy, rate_per_gpu, self._wanted)
        if surely_misses(point, self._wanted):
            self._missed.append(rate_per_gpu)
        elif point.keeps_up and point.attainment_interval[0] >= self._wanted:
            self._kept.append(rate_per_gpu * (1 - max(0.0, point.most_growth)))
        return point


def surely_misses(point: Point, wanted: float) -> bool:
    return point.keeps_up is False or point.attainment_interval[1] < wanted


def probably_keeps(point: Point, wanted: float) -> bool:
    """Return whether a rate is kept, as far as is known."""
    if point.num_warm_up == point.num_requests:
        return False
    return point.keeps_up is not False and point.growth <= MOST_GROWTH and point.attainment >= wanted


def highest_rate(question: Question, shape: Shape, policy: str, wanted: float) -> Highest:
    """Return the highest rate per GPU that a cluster sustains, and how well it is known."""
    search = Search(question, shape, policy, wanted)
    search.highest()
    return search.narrow()
