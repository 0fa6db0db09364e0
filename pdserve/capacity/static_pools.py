"""Searches the smallest static pools that attain as much as scaled ones do: over all splits, by running the trace.

A pool that is enough beside the largest other pool is the least that the other one can do with. From the two least
pools on, sums are tried upwards, each in all splits. A run ends early once it has missed too much.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from pdserve.autoscaler.decisions import Decision
from pdserve.autoscaler.observation import Observation
from pdserve.capacity.ordering import Limits, Rules
from pdserve.capacity.scaling import Scaled, Scaling, Scene
from pdserve.roles import Role

_LOOK_S = 20.0  # between looks at whether a run can still attain enough

Tried = Callable[[str], None]


class _TooManyMissedError(Exception):
    """So many requests have missed their objectives that a run need not go on."""


@dataclass
class _Watch(Rules):
    """Ends a run that cannot attain enough; orders nothing."""

    most_missed: float
    missed: int = field(default=0)

    def decide(self, observation: Observation) -> Sequence[Decision]:
        demand = observation.demand
        if demand is not None:
            self.missed += demand.num_judged - demand.num_within_both
        if self.missed > self.most_missed:
            raise _TooManyMissedError
        return ()


class StaticPools:
    """All static pools of one scene; each is run once."""

    def __init__(self, scene: Scene, wanted: float, on_tried: Tried) -> None:
        self._scene = scene
        self._wanted = wanted
        self._on_tried = on_tried
        self._tried: dict[tuple[int, int], Scaled | None] = {}

    @property
    def num_tried(self) -> int:
        return len(self._tried)

    def smallest(self, prefill: Limits, decode: Limits, max_devices: int) -> Scaled | None:
        """Return the run of the pools with the fewest devices that attain enough; None where the largest do not."""
        least_prefill = self._least(prefill, lambda size: (size, decode.most))
        least_decode = self._least(decode, lambda size: (prefill.most, size))
        if least_prefill is None or least_decode is None:
            return None
        for num_replicas in range(least_prefill + least_decode, prefill.most + decode.most + 1):
            for size in range(least_prefill, min(prefill.most, num_replicas - least_decode) + 1):
                pools = size, num_replicas - size
                if pools[1] <= decode.most and self.num_devices(*pools) <= max_devices:
                    found = self.run(*pools)
                    if found is not None:
                        return found
        return None

    def run(self, prefill: int, decode: int) -> Scaled | None:
        """Return the run of these pools; None where they do not attain enough."""
        if (prefill, decode) not in self._tried:
            self._on_tried(f"static {prefill} + {decode}")
            self._tried[prefill, decode] = self._attempt(prefill, decode)
        return self._tried[prefill, decode]

    def num_devices(self, prefill: int, decode: int) -> int:
        shape = self._scene.shape
        return prefill * shape.tp_of(Role.PREFILL) + decode * shape.tp_of(Role.DECODE)

    def _attempt(self, prefill: int, decode: int) -> Scaled | None:
        scene = replace(self._scene, shape=replace(self._scene.shape, prefill=prefill, decode=decode))
        watch = _Watch((1 - self._wanted) * len(scene.workload.arrivals))
        try:
            found = Scaling(scene, watch, _LOOK_S).run(f"static {prefill} + {decode}")
        except _TooManyMissedError:
            return None
        return found if found.attainment(scene.objective) >= self._wanted else None

    def _least(self, limits: Limits, pools: Callable[[int], tuple[int, int]]) -> int | None:
        """Return the smallest size of a pool that is enough beside the other's largest."""
        low, high = limits.least, limits.most
        if self.run(*pools(high)) is None:
            return None
        while low < high:
            middle = (low + high) // 2
            if self.run(*pools(middle)) is None:
                low = middle + 1
            else:
                high = middle
        return low
