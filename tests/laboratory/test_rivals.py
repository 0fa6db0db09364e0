"""Other ways to size pools, under virtual time: the rules of others, and static pools."""

from dataclasses import replace

import pytest

from lab.rules import PLANNER_PERIOD_S, PlannerRules, QueueAndKvUsage
from lab.versus import StaticPools
from pdserve.autoscaler.pools import Bounds
from pdserve.base.roles import POOLS
from pdserve.capacity.scaling import Scaling, Scene
from pdserve.capacity.worker import Shape
from pdserve.measure.outcomes import Objective
from pdserve.measure.workload import random_lengths
from pdserve.perfmodel.profile import read_profile, shipped_profile

PROFILE = read_profile(shipped_profile())
OBJECTIVE = Objective(1.0, 0.1)
BUSY = random_lengths(700, 500, 100, 8).at_rate(30)
LIMITS = dict.fromkeys(POOLS, Bounds(1, 6))
SCENE = Scene(PROFILE, BUSY, OBJECTIVE, Shape(1, 1, local_prefill=False), dict.fromkeys(POOLS, 3.0))


@pytest.mark.long
@pytest.mark.parametrize(
    "scaler", [QueueAndKvUsage(LIMITS, 8), PlannerRules(LIMITS, 8, OBJECTIVE)], ids=["hpa", "planner"]
)
def test_the_rules_of_others_grow_under_load_and_stay_within_the_budget(scaler: QueueAndKvUsage | PlannerRules) -> None:
    scaled = Scaling(SCENE, scaler.decide, PLANNER_PERIOD_S).run("rules")
    alone = Scaling(SCENE).run("static")
    assert scaled.attainment(OBJECTIVE) > alone.attainment(OBJECTIVE) + 0.1
    assert max(sum(sizes.count(role) for role in POOLS) for sizes in scaled.sizes) <= 8


@pytest.mark.long
def test_the_smallest_static_pools_attain_enough_and_no_smaller_ones_do() -> None:
    search = StaticPools(replace(SCENE, workload=BUSY.first(300)), 0.95, lambda _: None)
    found = search.smallest(Bounds(1, 3), Bounds(1, 3), 6)
    assert found is not None
    assert found.attainment(OBJECTIVE) >= 0.95
    prefill, decode = (found.sizes[0].count(role) for role in POOLS)
    for smaller in ((prefill - 1, decode), (prefill, decode - 1)):
        if 0 not in smaller:
            assert search.run(*smaller) is None
