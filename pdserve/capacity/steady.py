"""What a simulated run says of the steady state: where it begins, whether the queue grows, how sure the attainment is.

A run is a stationary stream of arrivals into an empty cluster, stopped at any arrival. Requests whose end is not known
yet are left out together with all that came after them, so that slow requests are not missed more often than fast ones.

- Warm-up: the marginal standard error rule on the number of requests in the cluster (MSER; White, Simulation 69, 1997),
  no less than a tenth of the run, and twice as long as it takes until 27 of the first 30 requests have ended.
- Attainment: means of 20 batches of consecutive requests and Student's t (Schmeiser, Operations Research 30, 1982),
  never narrower than Wilson's interval (JASA 22, 1927) for as many independent requests, which holds near 0 and 1 too.
- Growth: the mean change of the number of requests in the cluster, over the arrivals, in 20 batches. Of a cluster that
  cannot keep up, changes are those of a random walk with a drift, and nearly independent; of one that can, they cancel
  each other, so that the interval is too wide. It is too narrow for as long as a trace becomes heavier: growth counts
  only where it is large or the run is over.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, sqrt
from statistics import fmean, stdev

NUM_BATCHES = 20
CONFIDENT, CERTAIN = 2.093, 2.861  # of Student's t with 19 degrees of freedom: 95 % and 99 % of both sides
NOT_ABOVE = 1.729  # 95 % of one side
_FIRST_REQUESTS, _MOST_OF_THEM = 30, 27  # whose time in the cluster stands for that of all
_NUM_SAMPLES = 100  # of the number in the cluster, to find the warm-up's end
_LEAST_WARM_UP = 0.1  # of the arrivals
_MOST_WARM_UP = 0.5


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean of batches, and how far it may be off."""

    mean: float
    error: float  # standard error of the mean; infinite: nothing is known
    count: int = 0  # of independent yes or no answers, where the mean is a share of those

    def interval(self, quantile: float) -> tuple[float, float]:
        """Return the confidence interval for a quantile of Student's t."""
        low, high = self.mean - quantile * self.error, self.mean + quantile * self.error
        if not self.count:
            return low, high
        spread = quantile * quantile / self.count
        middle = (self.mean + spread / 2) / (1 + spread)
        half = sqrt(spread * (self.mean * (1 - self.mean) + spread / 4)) / (1 + spread)
        return max(0.0, min(low, middle - half)), min(1.0, max(high, middle + half))


UNKNOWN_SHARE = Estimate(0.0, inf, count=1)


@dataclass(frozen=True, slots=True)
class Steady:
    """The steady state as far as it is known."""

    count: int  # arrivals
    first: int  # arrivals before this one are warm-up
    last: int  # arrivals from this one on have no known end
    attainment: Estimate
    growth: Estimate  # requests that stay in the cluster for good, as a share of the arrivals


def steady(
    arrived_s: Sequence[float], ended_s: Sequence[float], verdicts: Sequence[bool | None], now_s: float
) -> Steady | None:
    """Judge a run by its requests in the order of arrival; None while the cluster has not warmed up.

    `ended_s` is infinite for requests that go on, `verdicts` None for those that may still meet or miss their
    objectives.
    """
    ends = sorted(end_s for end_s in ended_s if end_s <= now_s)
    first = _warm_up(arrived_s, ended_s, ends)
    if first is None:
        return None
    last = next((place for place, met in enumerate(verdicts) if met is None), len(verdicts))
    return Steady(len(arrived_s), first, last, _share(verdicts[first:last]), _growth(arrived_s, ends, first))


def _warm_up(arrived_s: Sequence[float], ended_s: Sequence[float], ends: Sequence[float]) -> int | None:
    count = len(arrived_s)
    if count < 2 * _FIRST_REQUESTS:
        return None
    filled_s = arrived_s[0] + 2 * (sorted(ended_s[:_FIRST_REQUESTS])[_MOST_OF_THEM - 1] - arrived_s[0])
    filled = bisect_right(arrived_s, filled_s)
    if filled > _MOST_WARM_UP * count:
        return None
    step = max(1, count // _NUM_SAMPLES)
    loads = [_load(arrived_s, ends, place) for place in range(0, count, step)]
    return max(filled, int(_LEAST_WARM_UP * count), step * least_error_cut(loads))


def least_error_cut(values: Sequence[float]) -> int:
    """Return how many leading values to leave out, at most half, for the least standard error of the rest's mean."""
    total = squares = 0.0
    best, cut = inf, 0
    for place in range(len(values) - 1, -1, -1):
        total += values[place]
        squares += values[place] * values[place]
        count = len(values) - place
        error = (squares - total * total / count) / (count * count)
        if place <= _MOST_WARM_UP * len(values) and error <= best + 1e-12:
            best, cut = error, place
    return cut


def _load(arrived_s: Sequence[float], ends: Sequence[float], place: int) -> int:
    """Return how many requests an arrival finds in the cluster."""
    return place - bisect_right(ends, arrived_s[place])


def _growth(arrived_s: Sequence[float], ends: Sequence[float], first: int) -> Estimate:
    size, last = (len(arrived_s) - 1 - first) // NUM_BATCHES, len(arrived_s) - 1
    if not size:
        return Estimate(0.0, inf)
    loads = [_load(arrived_s, ends, last - batch * size) for batch in range(NUM_BATCHES, -1, -1)]
    changes = [(after - before) / size for before, after in pairwise(loads)]
    return Estimate(fmean(changes), stdev(changes) / sqrt(NUM_BATCHES))


def _share(verdicts: Sequence[bool | None]) -> Estimate:
    size = len(verdicts) // NUM_BATCHES
    if not size:
        return UNKNOWN_SHARE
    counted = verdicts[len(verdicts) - size * NUM_BATCHES :]
    means = [sum(map(bool, counted[place : place + size])) / size for place in range(0, len(counted), size)]
    return Estimate(fmean(means), stdev(means) / sqrt(NUM_BATCHES), count=len(counted))
