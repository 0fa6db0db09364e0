"""Pools whose least size is 0 have no replicas while no request comes, and the first request brings them back."""

from pathlib import Path
from typing import Any

import pytest
from scaled_world import World, policy

from pdserve.autoscaler.actuator import PoolSizes, sizes_at_start
from pdserve.autoscaler.decisions import Add, Binds
from pdserve.autoscaler.explain import sentences
from pdserve.autoscaler.policy import Autoscaler
from pdserve.autoscaler.pools import Pool, bounds
from pdserve.base.errors import ConfigError
from pdserve.base.roles import POOLS

ZERO: dict[str, Any] = {"min_replicas": 0}
WINDOW_S = 60.0  # of scaleDown in these policies
FILE = """
apiVersion: pdserve/v1alpha1
kind: AutoscalingPolicy
objectives: {ttftMs: 1000, tpotMs: 100}
budget: {maxDevices: 2}
pools:
  prefill: {minReplicas: 0, maxReplicas: 2}
  decode: {minReplicas: 0, maxReplicas: 2}
"""


def emptied(**changes: Any) -> World:  # noqa: ANN401 - whatever a policy has
    """Return a world whose pools have lost their last replicas, after some requests."""
    world = World(policy(prefill=ZERO, decode=ZERO, **changes)).start(2, 2).go_on(120)
    world.rate, quiet_s = 0.0, world.at_s
    world.go_on(400)
    assert world.sizes == (0, 0)
    assert min(at_s for at_s, _ in world.orders if at_s > quiet_s) >= quiet_s + WINDOW_S
    return world


def test_pools_without_requests_are_ended_and_stay_so() -> None:
    world = emptied()
    num_orders = len(world.orders)
    world.go_on(7200)
    assert len(world.orders) == num_orders


def test_the_first_request_that_waits_brings_one_replica_of_each_back() -> None:
    world = emptied()
    world.num_held = 1
    world.go_on(5)
    assert [decision.action for decision in world.decisions] == [Add(f"{pool}-0", pool) for pool in POOLS]
    assert {decision.binds for decision in world.decisions} == {Binds.WAITING}
    world.go_on(40)
    assert world.sizes == (1, 1)
    world.num_held, world.rate = 0, 1.0
    world.go_on(300)
    assert min(world.sizes) >= 1
    world.rate = 0.0
    world.go_on(1200)
    assert world.sizes == (0, 0)


def test_a_request_that_was_refused_brings_them_back_too() -> None:
    world = emptied()
    world.rate = 0.2  # where routers do not hold it
    world.go_on(5)
    world.rate = 0.0
    world.go_on(40)
    assert world.sizes == (1, 1)


def test_a_request_now_and_then_keeps_the_pools() -> None:
    world = World(policy(prefill=ZERO, decode=ZERO)).start(1, 1)
    for _ in range(40):
        world.rate = 0.2
        world.go_on(5)
        world.rate = 0.0
        world.go_on(WINDOW_S - 15)
        assert min(world.sizes) >= 1


def test_an_autoscaler_that_starts_beside_empty_pools_knows_nothing_and_brings_them_back() -> None:
    world = World(policy(prefill=ZERO, decode=ZERO), rate=0.0, num_held=3, knows_costs=False)
    world.go_on(40)
    assert world.sizes == (1, 1)
    assert Autoscaler(world.policy).decide(World(world.policy, rate=0.0).observation(5))[0].action is None


def test_a_pool_that_may_not_be_empty_keeps_its_least_size() -> None:
    world = World(policy(prefill=ZERO)).start(3, 3).go_on(120)
    world.rate = 0.0
    world.go_on(600)
    assert world.sizes == (0, 1)
    world.num_held = 1
    world.go_on(40)
    assert world.sizes == (1, 1)


def test_failing_figures_leave_an_empty_pool_as_it_is_until_its_fallback_counts() -> None:
    fallback = {"failure_threshold": 3, "replicas": 2}
    world = World(policy(prefill={**ZERO, "fallback": fallback}, decode=ZERO), rate=0.0)
    for count in range(1, 6):
        world.advance(5)
        prefill, decode = world.look(5, fresh=False)
        assert (prefill.desired, decode.desired) == (2 if count >= 3 else 0, 0)


def test_a_schedule_may_empty_a_pool_at_night() -> None:
    night = {"start": "20:00", "end": "06:00", "min_replicas": 0}
    pool = Pool.model_validate({"min_replicas": 2, "max_replicas": 4, "schedules": [night]})
    assert [bounds(pool, hour * 3600.0).least for hour in (12, 21, 5, 7)] == [2, 0, 0, 2]


def test_a_cluster_begins_with_one_replica_of_each_all_the_same(tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(FILE)
    assert sizes_at_start(file) == PoolSizes(prefill=1, decode=1, max_workers=2, may_be_empty=True)
    file.write_text(FILE.replace("maxDevices: 2", "maxDevices: 1"))
    with pytest.raises(ConfigError, match="maxDevices: 1 is below 2, what both pools need at least"):
        sizes_at_start(file)


def test_the_explanation_says_what_the_first_request_waits_for_and_what_is_saved() -> None:
    said = "\n".join(sentences(policy(prefill={**ZERO, "cost_per_replica_hour": 3.5})))
    prefill, decode = said.partition("The decode pool:")[::2]
    assert "It has 0 to 8 replicas of 1 device." in prefill
    assert (
        "It has none once no request has come or run for 1m. The first request then waits until one serves, which "
        "takes 30s until start-ups are measured. An hour without any saves 3.5."
    ) in prefill
    assert "It has none" not in decode
