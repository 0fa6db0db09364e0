"""Searches the cluster of so many GPUs that serves most within the objectives: its split, tensor parallelism and chunk,
and how many of its KV pages it needs.

Each candidate is tried at the best rate found so far first, and searched further only if it keeps that up (after
DistServe, Zhong et al., OSDI 2024). A simulation ends as soon as this is known, so that candidates far from the best
cost little. Colocated clusters are among the candidates and win where they are better.

The highest rate that a cluster sustains is one at which it keeps up, and serves the wanted share in time.
Rates are tried in steps upward, then by halving the gap in their logarithms; each only until it is known
whether it is kept (`measure`). Near the answer, the most requests allowed may be too few to know it. There the
estimate decides, and the result has the rates between which the answer lies for sure.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import sqrt

from pdserve.capacity.long_run import MOST_GROWTH, Point, Question, measure
from pdserve.capacity.worker import Shape
from pdserve.measure.html_report import Line, Plot, plot
from pdserve.perfmodel.profile import Profile

PRECISION = 0.04  # of the rate
_SETTLED_WITHIN = 1.25  # most ratio of the rates that are surely missed and surely kept
_FIRST_RATES = (1.0, 0.25, 0.05, 0.01)  # requests per second and GPU, until one is kept
_STEP, _SMALL_STEP = 2.0, 1.25  # factors upward: from a first guess, and from a rate that another cluster keeps
_STEPS = (1.05, 1.15, 1.5)  # factors from the answer to the rates that are tried below and above it


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
        if point.keeps_up is False or point.attainment_interval[1] < self._wanted:
            self._missed.append(rate_per_gpu)
        elif point.keeps_up and point.attainment_interval[0] >= self._wanted:
            self._kept.append(rate_per_gpu * (1 - max(0.0, point.most_growth)))
        return point


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


_CHUNKS = (256, 512, 1024)
_PREFILL_CHUNKS = (1024, 2048)
_LEAST_KV_SHARE = 1 / 32
_BETTER = 1.02  # a cluster replaces the best one if it sustains so many times its rate


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer, and the best of those that were tried."""

    best: Point
    known: Highest  # how well its rate is known
    colocated: Point | None  # the best colocated one, where one keeps the attainment at all
    binds: str  # what keeps the rate from being higher
    num_tried: int
    kv_share: float  # of the KV pages that fit: with half as many, the rate is not kept


def candidates(profile: Profile, num_gpus: int) -> Iterator[Shape]:
    """Yield all clusters of so many GPUs, colocated ones first."""
    degrees = [configuration.tp for configuration in profile.configurations]
    for tp in degrees:
        if num_gpus % tp == 0:
            for chunk in _CHUNKS:
                yield Shape(0, num_gpus // tp, decode_tp=tp, decode_chunk=chunk)
    for prefill_tp in degrees:
        for decode_tp in degrees:
            for prefill in range(1, num_gpus // prefill_tp + 1):
                rest = num_gpus - prefill * prefill_tp
                if rest > 0 and rest % decode_tp == 0:
                    for chunk in _PREFILL_CHUNKS:
                        yield Shape(prefill, rest // decode_tp, prefill_tp, decode_tp, prefill_chunk=chunk)


def plan(
    question: Question, num_gpus: int, wanted: float, on_tried: Callable[[Shape, Point | None], None]
) -> Plan | None:
    """Return the cluster that sustains the highest rate; None if none is known to keep the attainment."""
    best: Point | None = None
    winner: Search | None = None
    colocated: Point | None = None
    num_tried = 0
    for shape, policy in tries(question.profile, num_gpus):
        search = Search(question, shape, policy, wanted)
        point = search.highest(best.rate_per_gpu * _BETTER if best is not None else 0.0).point
        num_tried += 1
        on_tried(shape, point)
        if point is None:
            continue
        best, winner = point, search
        if not shape.prefill:
            colocated = point
    if best is None or winner is None:
        return None
    share, binds = _kv_share(question, best, wanted), _binds(question, best)
    return Plan(best, winner.narrow(), colocated, binds, num_tried, share)


def tries(profile: Profile, num_gpus: int) -> Iterator[tuple[Shape, str]]:
    """Yield what to try: each cluster under the goodput policy, colocated ones also as others run them, in turns."""
    for shape in candidates(profile, num_gpus):
        yield shape, "goodput"
        if not shape.prefill:
            yield shape, "round_robin"


def _kv_share(question: Question, best: Point, wanted: float) -> float:
    """Halve the KV pages for as long as the rate is kept."""
    share = 1.0
    while share > _LEAST_KV_SHARE:
        smaller = replace(best.shape, kv_share=share / 2)
        if not probably_keeps(measure(question, smaller, best.policy, best.rate_per_gpu, wanted), wanted):
            break
        share /= 2
    return share


def _binds(question: Question, best: Point) -> str:
    """Say what is missed first at a rate a little higher."""
    beyond = measure(question, best.shape, best.policy, best.rate_per_gpu * 1.25)
    busy = ", ".join(f"{pool} {share:.0%} busy" for pool, share in beyond.utilization.items())
    missed = max(beyond.missed, key=lambda name: beyond.missed[name], default="nothing")
    busiest = max(beyond.utilization, key=lambda pool: beyond.utilization[pool])
    if beyond.keeps_up is False:
        return f"more than it can compute ({busy} at {beyond.rate_per_gpu:.2f} requests/s a GPU)"
    text = {"ttft": "time to first token", "tpot": "time per token", "refused": f"{busiest}: more is refused"}
    return f"{text.get(missed, missed)} ({busy} at {beyond.rate_per_gpu:.2f} requests/s a GPU)"


def figures(point: Point) -> dict[str, object]:
    """Return a point as tables have it; its name says the cluster, the policy and the rate."""
    fields = {"name": point.name, **asdict(point)}
    del fields["shape"], fields["policy"]  # the name says them
    if point.attainment_interval == (0.0, 1.0):  # no request is known to count
        fields |= dict.fromkeys(("attainment", "goodput_per_gpu", "refused", "missed"))
    return fields


def rate_note(found: Highest) -> str:
    """Return between which rates the highest one lies."""
    if not found.at_least and found.below is None:
        return "highest rate: not settled at any rate; --num-prompts allows more"
    low = f"{found.at_least:.2f}" if found.at_least else "0"
    high = "an unknown rate" if found.below is None else f"{found.below:.2f}"
    return f"highest rate: for sure between {low} and {high} requests/s a GPU"


def results(points: Sequence[Point], title: str, found: Sequence[Highest] = ()) -> dict[str, object]:
    """Return points, and how well highest rates are known, in the same order."""
    known = [{"at_least": each.at_least, "below": each.below, "is_settled": each.is_settled} for each in found]
    return {"title": title, "points": list(points), "known": known}


def plan_report(plan: Plan, num_gpus: int) -> tuple[list[Point], str, tuple[str, ...]]:
    """Return a plan's cluster, beside it the best colocated one, a title, and what is to be said of it."""
    points = [plan.best] + ([plan.colocated] if plan.colocated and plan.colocated is not plan.best else [])
    title = f"{plan.best.shape}: {plan.best.rate_per_gpu * num_gpus:.1f} requests/s on {num_gpus} GPUs"
    notes = (
        rate_note(plan.known),
        f"{plan.num_tried} clusters tried. What binds: {plan.binds}.",
        f"It takes {plan.kv_share:.0%} of the KV pages that fit.",
    )
    return points, title, notes


def chart(points: Sequence[Point], wanted: float) -> Plot:
    """Return attainment over the rate, a line for each cluster and policy."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for point in sorted(points, key=lambda point: point.rate_per_gpu):
        lines.setdefault(f"{point.shape}, {point.policy}", []).append((point.rate_per_gpu, 100 * point.attainment))
    highest = max(point.rate_per_gpu for point in points)
    drawn = [*map(Line, lines, lines.values()), Line("wanted", [(0.0, 100 * wanted), (highest, 100 * wanted)])]
    labels = "requests per second and GPU", "% of requests within both objectives"
    return plot("Attainment", labels, drawn, y_end=100.0, has_marks=True)
