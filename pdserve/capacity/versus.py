"""The autoscaler's core under virtual time, and beside it other ways to size the same pools for the same requests.

`StaticPools` runs the trace, and finds the static pools with the fewest devices that attain as much. It first bisects
the least size of each pool, with the other pool at its largest. Then it tries all splits of each total, from the sum of
both upwards. A run ends early once it has missed too much.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from pdserve.autoscaler.decisions import Decision
from pdserve.autoscaler.observation import Observation
from pdserve.autoscaler.policy import Autoscaler
from pdserve.autoscaler.pools import Bounds
from pdserve.autoscaler.schema import Policy
from pdserve.capacity.rules import HPA_PERIOD_S, PLANNER_PERIOD_S, PlannerRules, QueueAndKvUsage, Rules
from pdserve.capacity.scaling import Scaled, Scaling, Scene
from pdserve.errors import ConfigError
from pdserve.measure.warm_up import warm_up
from pdserve.roles import POOLS, Role

RIVALS = "static", "hpa", "planner"
_LOOK_S = 20.0  # between looks at whether a run can still attain enough

Tried = Callable[[str], None]


def checked(rivals: Sequence[str]) -> Sequence[str]:
    """Return these names; ConfigError where one is not of RIVALS."""
    for name in rivals:
        if name not in RIVALS:
            raise ConfigError(f"--versus: {name!r} is none of {', '.join(RIVALS)}")
    return rivals


def simulate_all(scene: Scene, policy: Policy, rivals: Sequence[str], on_tried: Tried) -> list[Scaled]:
    """Return the run of the autoscaler's core first, then those of its rivals, which are of RIVALS."""
    on_tried("policy")
    runs = [Scaling(scene, Autoscaler(policy, warm_up(policy)), policy.interval.react_s).run("policy")]
    for rival in rivals:
        on_tried(rival)
        runs += _rival(rival, scene, policy, runs[0].attainment(scene.objective), on_tried)
    return runs


def _rival(rival: str, scene: Scene, policy: Policy, attained: float, on_tried: Tried) -> list[Scaled]:
    pools = {role: policy.pools.of(role) for role in POOLS}
    limits = {
        role: Bounds(pool.min_replicas, pool.max_replicas, pool.devices_per_replica) for role, pool in pools.items()
    }
    max_devices = policy.budget.max_devices
    match rival:
        case "static":
            found = StaticPools(scene, attained, on_tried).smallest(
                limits[Role.PREFILL], limits[Role.DECODE], max_devices
            )
            return [] if found is None else [found]
        case "hpa":
            scaler = QueueAndKvUsage(limits, max_devices)
            return [Scaling(scene, scaler, HPA_PERIOD_S).run("HPA, queue and KV usage")]
        case _:
            rules = PlannerRules(limits, max_devices, scene.objective)
            return [Scaling(scene, rules, PLANNER_PERIOD_S).run("planner rules")]


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

    def smallest(self, prefill: Bounds, decode: Bounds, max_devices: int) -> Scaled | None:
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

    def _least(self, limits: Bounds, pools: Callable[[int], tuple[int, int]]) -> int | None:
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
