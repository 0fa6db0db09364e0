"""Compares how often requests miss their objectives for want of a pool with how often that was predicted. Pure.

What models and forecasts do not know shows there: bursts, what the router finds room for, how demand differs from its
forecast, replicas that came late. The ratio of the odds corrects what is predicted from then on.
"""

from collections.abc import Mapping
from math import exp

from pdserve.autoscaler.observation import Observation
from pdserve.autoscaler.urgent import CAUSES
from pdserve.demand import Demand
from pdserve.roles import Role

_FADES_S = 900.0  # misses of so long ago weigh a third
_PRIOR = 10.0  # misses, both seen and predicted, that are taken for granted
_LEAST, _MOST = 0.25, 20.0  # times that the odds are corrected by: what went well says little of smaller pools
_FEW = 8.0  # misses, which say little


class Misses:
    """Misses of both pools; older ones weigh less."""

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
        for pool, causes in CAUSES.items():
            lost = sum(seen.refused.get(cause, 0) for cause in causes)
            late = max(0, demand.num_judged - within[pool] - refused)
            self._seen[pool] = self._seen[pool] * kept + min(judged, late + lost)
            self._predicted[pool] = self._predicted[pool] * kept + judged * (1 - self._expected.get(pool, 1.0))

    def are_too_many(self, pool: Role, attainment: float) -> bool:
        """Return whether a pool has missed more of late than half of what an objective allows both."""
        return self._seen[pool] > max(_FEW, (1 - attainment) / 2 * self._judged)

    @property
    def odds(self) -> Mapping[Role, float]:
        """Times as great as predicted those of a miss have been in each pool."""
        return {pool: self._ratio(pool) for pool in CAUSES}

    def _ratio(self, pool: Role) -> float:
        every = self._judged + 2 * _PRIOR
        seen, predicted = self._seen[pool] + _PRIOR, self._predicted[pool] + _PRIOR
        ratio = seen * (every - predicted) / max(1e-9, predicted * (every - seen))
        return min(_MOST, max(_LEAST, ratio))
