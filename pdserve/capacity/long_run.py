"""What one cluster does under one load in the long run.

A simulation goes on until it is known whether the cluster keeps up with the load and meets the
objectives, and stops early where that is plain: it looks at the run after 300 requests and each time it is 1.4 times as
long (sequential batch means; Law and Carson, Operations Research 27, 1979). What is not known after the most requests
allowed is reported as not settled.

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
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, sqrt
from statistics import fmean, stdev

from pdserve.capacity.cluster import Run, SimCluster
from pdserve.capacity.worker import Shape
from pdserve.measure.outcomes import Objective, Outcome, Percentiles, percentiles
from pdserve.measure.workload import Workload
from pdserve.perfmodel.profile import Profile

NUM_BATCHES = 20
CONFIDENT, CERTAIN = 2.093, 2.861  # of Student's t with 19 degrees of freedom: 95 % and 99 % of both sides
NOT_ABOVE = 1.729  # 95 % of one side
_FIRST_REQUESTS, _MOST_OF_THEM = 30, 27  # the time until so many of them have ended is the time to fill the cluster
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
    """The steady state as far as it is known. While the cluster warms up, no request counts."""

    count: int  # arrivals
    first: int  # arrivals before this one are warm-up; all of them: it has not ended
    last: int  # arrivals from this one on have no known end
    attainment: Estimate
    growth: Estimate  # requests that stay in the cluster for good, as a share of the arrivals


def steady(
    arrived_s: Sequence[float], ended_s: Sequence[float], verdicts: Sequence[bool | None], now_s: float
) -> Steady:
    """Judge a run by its requests in the order of arrival.

    `ended_s` is infinite for requests that go on, `verdicts` None for those that may still meet or miss their
    objectives.
    """
    ends = sorted(end_s for end_s in ended_s if end_s <= now_s)
    first = _warm_up(arrived_s, ended_s, ends)
    last = next((place for place, met in enumerate(verdicts) if met is None), len(verdicts))
    return Steady(len(arrived_s), first, last, _share(verdicts[first:last]), _growth(arrived_s, ends, first))


def _warm_up(arrived_s: Sequence[float], ended_s: Sequence[float], ends: Sequence[float]) -> int:
    """Return how many arrivals are warm-up."""
    count = len(arrived_s)
    if count < 2 * _FIRST_REQUESTS:
        return count
    filled_s = arrived_s[0] + 2 * (sorted(ended_s[:_FIRST_REQUESTS])[_MOST_OF_THEM - 1] - arrived_s[0])
    filled = bisect_right(arrived_s, filled_s)
    if filled > _MOST_WARM_UP * count:
        return count
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
    if size < 1:
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


NARROW = 0.015  # half the 95 % interval of the attainment at which a run may end; worth some 4 % of the rate
MOST_GROWTH = 0.05  # share of the arrivals: if more might stay in the cluster, it is not known to keep up
MAX_REQUESTS = 10_000
_PLAIN_GROWTH, _PLAIN_ARRIVALS = 0.1, 1000  # at least, to end a run for its growth
_FIRST_LOOK = 300
_NEXT_LOOK = 1.4


@dataclass(frozen=True, slots=True)
class Point:
    """One cluster under one load. Every request that arrived after the warm-up counts in the attainment."""

    shape: Shape
    policy: str
    rate_per_gpu: float  # requests per second that arrived
    attainment: float
    attainment_interval: tuple[float, float]  # 95 %
    keeps_up: bool | None  # False: the number of requests in the cluster grows without end; None: not known
    growth: float  # share of the arrivals by which that number grows; noise where it keeps up
    most_growth: float  # upper bound of it, with 95 % confidence
    is_settled: bool  # whether all of this is known as well as was asked for
    goodput_per_gpu: float  # requests per second that met both objectives
    refused: float  # share
    missed: dict[str, float]  # share of all requests, by what was missed: ttft, tpot, refused
    ttft_s: Percentiles | None  # None: of no request
    tpot_s: Percentiles | None
    utilization: dict[str, float]  # of each pool: share of the time that it computed
    num_requests: int  # simulated
    num_warm_up: int  # of these, left out

    @property
    def name(self) -> str:
        return f"{self.shape}, {self.policy}, {self.rate_per_gpu:.2f}/s a GPU"


@dataclass(frozen=True, slots=True)
class Question:
    """What is simulated, and for how long at most."""

    profile: Profile
    workload: Workload
    objective: Objective
    max_requests: int = MAX_REQUESTS  # at each rate


@dataclass(frozen=True, slots=True)
class Found:
    """What is known of the steady state so far."""

    keeps_up: bool | None
    meets: bool | None  # whether the attainment is what is wanted
    is_narrow: bool  # whether the attainment is known well enough
    is_plain: bool  # whether the growth is too large to come from a heavier part of a trace

    @property
    def is_settled(self) -> bool:
        """Return whether more requests would change nothing."""
        return self.meets is False or self.is_plain or (self.keeps_up is True and self.is_narrow)


def measure(question: Question, shape: Shape, policy: str, rate_per_gpu: float, wanted: float | None = None) -> Point:
    """Simulate one cluster under one load, until its attainment is known, or whether it is at least the wanted one."""
    workload = question.workload
    cluster = SimCluster(question.profile, shape, policy, workload, question.objective)
    cluster.expect(workload.endless(rate_per_gpu * shape.num_gpus))
    num_requests = 0
    while True:
        num_requests = min(question.max_requests, max(_FIRST_LOOK, round(num_requests * _NEXT_LOOK)))
        run = cluster.advance(num_requests)
        state = _steady(run, question.objective)
        found = judge(state, wanted)
        if found.is_settled or num_requests == question.max_requests:
            return _point(run, question.objective, state, found, (shape, policy, rate_per_gpu))


def judge(state: Steady, wanted: float | None) -> Found:
    """Return what is known with enough certainty to stop, although a run is looked at many times."""
    keeps_up: bool | None = None
    least_growth = state.growth.interval(CERTAIN)[0]
    if least_growth > 0:
        keeps_up = False
    elif _most_growth(state) <= MOST_GROWTH:
        keeps_up = True
    low, high = state.attainment.interval(CONFIDENT)
    is_narrow, meets = high - low <= 2 * NARROW, None
    if wanted is not None:
        low, high = state.attainment.interval(CERTAIN)
        meets = False if high < wanted else True if low >= wanted else None
    is_plain = least_growth > _PLAIN_GROWTH and state.count - state.first >= _PLAIN_ARRIVALS
    return Found(keeps_up, meets, is_narrow or meets is True, is_plain)


def _most_growth(state: Steady) -> float:
    return state.growth.mean + NOT_ABOVE * state.growth.error


def _steady(run: Run, objective: Objective) -> Steady:
    outcomes = run.outcomes
    now_s = outcomes[-1].sent_s
    verdicts = [verdict(outcome, objective, now_s) for outcome in outcomes]
    return steady([each.sent_s for each in outcomes], [each.ended_s for each in outcomes], verdicts, now_s)


def _point(run: Run, objective: Objective, state: Steady, found: Found, asked: tuple[Shape, str, float]) -> Point:
    shape, policy, rate_per_gpu = asked
    now_s = run.outcomes[-1].sent_s
    counted = run.outcomes[state.first : state.last]
    misses = Counter(_miss(outcome, objective, now_s) for outcome in counted)
    served = [outcome for outcome in counted if outcome.is_good and outcome.ended_s <= now_s]
    attainment, num_counted = state.attainment.mean, max(1, len(counted))
    return Point(
        shape=shape,
        policy=policy,
        rate_per_gpu=rate_per_gpu,
        attainment=attainment,
        attainment_interval=state.attainment.interval(CONFIDENT),
        keeps_up=found.keeps_up,
        growth=state.growth.mean,
        most_growth=min(1.0, _most_growth(state)),
        is_settled=found.is_settled or found.keeps_up is False,
        goodput_per_gpu=attainment * rate_per_gpu,
        refused=misses["refused"] / num_counted,
        missed={name: number / num_counted for name, number in sorted(misses.items()) if name},
        ttft_s=percentiles(each.ttft_s for each in served),
        tpot_s=percentiles(each.tpot_s for each in served),
        utilization=_utilization(run),
        num_requests=len(run.outcomes),
        num_warm_up=state.first,
    )


def verdict(outcome: Outcome, objective: Objective, now_s: float) -> bool | None:
    """Return whether a request has met its objective, or None while it may still meet or miss it."""
    if outcome.ended_s <= now_s:
        return outcome.meets(objective)
    if (outcome.first_s if outcome.num_tokens else now_s) - outcome.sent_s > objective.ttft_s:
        return False
    num_gaps = outcome.output_tokens - 1
    is_slow = num_gaps > 0 and outcome.num_tokens > 0 and now_s - outcome.first_s > objective.tpot_s * num_gaps
    return False if is_slow else None


def _miss(outcome: Outcome, objective: Objective, now_s: float) -> str:
    """Return what a request has missed; empty: nothing."""
    if outcome.is_refused:
        return "refused"
    if verdict(outcome, objective, now_s):
        return ""
    first_s = outcome.first_s if outcome.num_tokens else now_s
    return "ttft" if first_s - outcome.sent_s > objective.ttft_s else "tpot"


def _utilization(run: Run) -> dict[str, float]:
    pools: dict[str, list[float]] = {}
    for name, share in run.busy.items():
        pools.setdefault("prefill" if name.startswith("p") else "decode", []).append(share)
    return {pool: sum(shares) / len(shares) for pool, shares in pools.items()}
