"""Other ways than the autoscaler's to size pools, under virtual time, for the same requests.

`StaticPools` runs the trace, and finds the static pools with the fewest devices that attain as much. It first bisects
the least size of each pool, with the other pool at its largest. Then it tries all splits of each total, from the sum of
both upwards. A run ends early once it has missed too much.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product

from lab.rules import HPA_PERIOD_S, PLANNER_PERIOD_S, PlannerRules, QueueAndKvUsage
from pdserve.autoscaler.decisions import Decision
from pdserve.autoscaler.observation import Observation
from pdserve.autoscaler.pools import Bounds
from pdserve.autoscaler.schema import Policy
from pdserve.base.roles import POOLS, Role
from pdserve.capacity.scaling import Decide, Scaled, Scaling, Scene

_LOOK_S = 20.0  # between looks at whether a run can still attain enough

Tried = Callable[[str], None]


def rivals(scene: Scene, policy: Policy, names: Sequence[str], wanted: float, on_tried: Tried) -> list[Scaled]:
    """Return the runs of what is named: static (pools that attain as much as `wanted`), hpa, planner."""
    runs, max_devices = list[Scaled](), policy.budget.max_devices
    pools = {role: policy.pools.of(role) for role in POOLS}
    limits = {
        role: Bounds(each.min_replicas, each.max_replicas, each.devices_per_replica) for role, each in pools.items()
    }
    for name in names:
        on_tried(name)
        match name:
            case "static":
                static = StaticPools(scene, wanted, on_tried)
                found = static.smallest(limits[Role.PREFILL], limits[Role.DECODE], max_devices)
                runs += [found] if found is not None else []
            case "hpa":
                decide = QueueAndKvUsage(limits, max_devices).decide
                runs.append(Scaling(scene, decide, HPA_PERIOD_S).run("HPA, queue and KV usage"))
            case _:
                rules = PlannerRules(limits, max_devices, scene.objective)
                runs.append(Scaling(scene, rules.decide, PLANNER_PERIOD_S).run("planner rules"))
    return runs


class _TooManyMissedError(Exception):
    """So many requests have missed their objectives that a run need not go on."""


def _watch(most_missed: float) -> Decide:
    """Return what ends a run that cannot attain enough, and orders nothing."""
    num_missed = 0

    def look(observation: Observation) -> Sequence[Decision]:
        nonlocal num_missed
        demand = observation.demand
        if demand is not None:
            num_missed += demand.num_judged - demand.num_within_both
        if num_missed > most_missed:
            raise _TooManyMissedError
        return ()

    return look


class StaticPools:
    """All static pools of one scene; each is run once."""

    def __init__(self, scene: Scene, wanted: float, on_tried: Tried) -> None:
        self._scene = scene
        self._wanted = wanted
        self._on_tried = on_tried
        self._tried: dict[tuple[int, int], Scaled | None] = {}

    def smallest(self, prefill: Bounds, decode: Bounds, max_devices: int) -> Scaled | None:
        """Return the run of the pools with the fewest devices that attain enough; None where the largest do not."""
        least_prefill = self._least(prefill, lambda size: (size, decode.most))
        least_decode = self._least(decode, lambda size: (prefill.most, size))
        if least_prefill is None or least_decode is None:
            return None
        sizes = product(range(least_prefill, prefill.most + 1), range(least_decode, decode.most + 1))
        for pools in sorted(sizes, key=sum):
            is_affordable = pools[0] * prefill.devices + pools[1] * decode.devices <= max_devices
            if is_affordable and (found := self.run(*pools)) is not None:
                return found
        return None

    def run(self, prefill: int, decode: int) -> Scaled | None:
        """Return the run of these pools; None where they do not attain enough."""
        if (prefill, decode) not in self._tried:
            self._on_tried(f"static {prefill} + {decode}")
            self._tried[prefill, decode] = self._attempt(prefill, decode)
        return self._tried[prefill, decode]

    def _attempt(self, prefill: int, decode: int) -> Scaled | None:
        scene = replace(self._scene, shape=replace(self._scene.shape, prefill=prefill, decode=decode))
        watch = _watch((1 - self._wanted) * len(scene.workload.arrivals))
        try:
            found = Scaling(scene, watch, _LOOK_S).run(f"static {prefill} + {decode}")
        except _TooManyMissedError:
            return None
        return found if found.attainment(scene.objective) >= self._wanted else None

    def _least(self, limits: Bounds, pools: Callable[[int], tuple[int, int]]) -> int | None:
        """Return the smallest size of a pool that is enough beside the other's largest."""
        if self.run(*pools(limits.most)) is None:
            return None
        sizes = range(limits.least, limits.most)
        return limits.least + bisect_left(sizes, True, key=lambda size: self.run(*pools(size)) is not None)
