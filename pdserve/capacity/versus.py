"""The autoscaler's core under virtual time, and beside it other ways to size the same pools for the same requests."""

from collections.abc import Callable, Sequence

from pdserve.autoscaler.policy import Autoscaler
from pdserve.autoscaler.schema import Policy
from pdserve.capacity import planner_rules, thresholds
from pdserve.capacity.fleet import POOLS
from pdserve.capacity.ordering import Limits
from pdserve.capacity.scaling import Scaled, Scaling, Scene
from pdserve.capacity.static_pools import StaticPools
from pdserve.errors import ConfigError
from pdserve.measure.warm_up import warm_up
from pdserve.roles import Role

RIVALS = "static", "hpa", "planner"

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
    limits = {role: Limits(policy.pools.of(role).min_replicas, policy.pools.of(role).max_replicas) for role in POOLS}
    max_devices = policy.budget.max_devices
    match rival:
        case "static":
            found = StaticPools(scene, attained, on_tried).smallest(
                limits[Role.PREFILL], limits[Role.DECODE], max_devices
            )
            return [] if found is None else [found]
        case "hpa":
            scaler = thresholds.QueueAndKvUsage(limits, max_devices)
            return [Scaling(scene, scaler, thresholds.PERIOD_S).run("HPA, queue and KV usage")]
        case _:
            rules = planner_rules.PlannerRules(limits, max_devices, scene.objective)
            return [Scaling(scene, rules, planner_rules.PERIOD_S).run("planner rules")]
