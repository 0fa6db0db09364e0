"""Searches the cluster that serves most within the objectives, for a number of GPUs: split, tensor parallelism, chunk,
and how much of its KV pages it needs for that.

Each candidate is tried at the best rate found so far first, and searched further only if it keeps that up (after
DistServe, Zhong et al., OSDI 2024). A simulation lasts until that is plain, so that candidates far from the best cost
little. Colocated clusters are among the candidates and win where they are better.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from pdserve.capacity.long_run import Point, Question, measure
from pdserve.capacity.search import Highest, Search, probably_keeps
from pdserve.capacity.shape import Shape
from pdserve.perfmodel.profile import Profile

MAX_REQUESTS = 6000  # at each rate: clusters that are alike within the noise of that many are as good as each other

_CHUNKS = (256, 512, 1024)
_PREFILL_CHUNKS = (1024, 2048)
_LEAST_KV_SHARE = 1 / 32
_BETTER = 1.02  # times the best rate: what another cluster has to keep to take its place


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
