"""Compares how often requests miss their objectives for want of a pool with how often that was predicted. Pure.

What models and forecasts do not know shows there: bursts, what the router finds room for, how demand differs from its
forecast, replicas that came late. The ratio of the odds corrects what is predicted from then on.
"""

from collections.abc import Mapping
from math import ceil, exp, sqrt

from pdserve.autoscaler.observation import Observation
from pdserve.autoscaler.traffic import SURE
from pdserve.base.roles import Role
from pdserve.protocol.refusal import Cause
from pdserve.protocol.reports import Demand

_FEW = 8  # misses, which say little
CAUSES: Mapping[Role, frozenset[str]] = {
    Role.PREFILL: frozenset({Cause.QUEUE, Cause.PREFILL, Cause.NO_PREFILL, Cause.RESERVED}),
    Role.DECODE: frozenset({Cause.BATCH, Cause.PROMPTS, Cause.PAGES, Cause.ROWS, Cause.NO_DECODE}),
}


def for_losses(num_lost: float, num_requests: float, num_serving: float, attainment: float) -> int:
    """Return how many replicas would have lost no request, if that many served what was not lost.

    What scatter alone explains, and what the objective allows, counts for nothing.
    """
    if num_lost < _FEW or num_requests <= 0:
        return 0
    share = min(1.0, num_lost / num_requests)
    sure = share - SURE * sqrt(share * (1 - share) / num_requests)
    if sure <= 1 - attainment:
        return 0
    return ceil(num_serving / max(0.5, 1 - sure))  # twice as many at once, at most


_FADES_S = 900.0  # misses of so long ago weigh a third
_PRIOR = 10.0  # misses, both seen and predicted, that are taken for granted
_LEAST, _MOST = 0.25, 20.0  # times that the odds are corrected by: what went well says little of smaller pools


def num_refused(seen: Observation, pool: Role) -> int:
    """Return how many requests were refused since the last observation for want of a pool."""
    return sum(seen.refused.get(cause, 0) for cause in CAUSES[pool])


class Misses:
    """Requests that miss their objectives for want of a pool, beside what was predicted; older ones weigh less."""

    def __init__(self) -> None:
        self._judged = 0.0  # requests with objectives that have ended
        self._seen, self._predicted = dict.fromkeys(CAUSES, 0.0), dict.fromkeys(CAUSES, 0.0)
        self._expected: Mapping[Role, float] = {}

    def expect(self, served: Mapping[Role, float]) -> None:
        """Take note of the share that each pool, as it is, is predicted to serve in time from here on."""
        self._expected = served

    def count(self, demand: Demand, seen: Observation) -> None:
        """Take in what came, and what became of it."""
        kept = exp(-seen.seconds / _FADES_S)
        refused = sum(seen.refused.values())
        judged = max(demand.num_judged, refused) if self._expected else 0
        within = {Role.PREFILL: demand.num_within_ttft, Role.DECODE: demand.num_within_tpot}
        self._judged = self._judged * kept + judged
        for pool in CAUSES:
            late = max(0, demand.num_judged - within[pool] - refused)
            self._seen[pool] = self._seen[pool] * kept + min(judged, late + num_refused(seen, pool))
            self._predicted[pool] = self._predicted[pool] * kept + judged * (1 - self._expected.get(pool, 1.0))

    def are_too_many(self, pool: Role, attainment: float) -> bool:
        """Return whether a pool has missed more of late than half of what an objective allows both."""
        return self._seen[pool] > max(_FEW, (1 - attainment) / 2 * self._judged)

    @property
    def odds(self) -> Mapping[Role, float]:
        """By which factor misses of each pool have exceeded the predicted odds."""
        return {pool: self._ratio(pool) for pool in CAUSES}

    def _ratio(self, pool: Role) -> float:
        every = self._judged + 2 * _PRIOR
        seen, predicted = self._seen[pool] + _PRIOR, self._predicted[pool] + _PRIOR
        ratio = seen * (every - predicted) / max(1e-9, predicted * (every - seen))
        return min(_MOST, max(_LEAST, ratio))
