"""What is predicted is corrected by what was missed, and a pool that missed much does not shrink."""

from dataclasses import replace

import pytest
from scaled_world import World, policy

from pdserve.autoscaler.decisions import Drain, Flip
from pdserve.autoscaler.misses import Misses, for_losses
from pdserve.autoscaler.observation import Observation
from pdserve.base.roles import Role
from pdserve.protocol.refusal import Cause
from pdserve.protocol.reports import Demand


def seen(refused: dict[str, int], seconds: float = 60.0) -> Observation:
    return Observation(0.0, 0.0, (), Demand(), seconds, refused=refused)


def judged(count: int, ttft: int = 0, tpot: int = 0) -> Demand:
    """Return so many requests, of which some missed an objective."""
    return Demand(num_judged=count, num_within_ttft=count - ttft, num_within_tpot=count - tpot)


def after(demand: Demand, refused: dict[str, int], served: float = 0.9) -> Misses:
    misses = Misses()
    misses.expect(dict.fromkeys((Role.PREFILL, Role.DECODE), served))
    for _ in range(10):
        misses.count(demand, seen(refused))
    return misses


def test_without_evidence_nothing_is_corrected() -> None:
    assert set(Misses().odds.values()) == {1.0}
    assert set(after(Demand(), {}).odds.values()) == {1.0}


def test_each_pool_has_the_misses_that_it_caused() -> None:
    refused = {Cause.QUEUE.value: 20, Cause.IDLE_CLUSTER.value: 10}
    odds = after(judged(200, ttft=30 + 10, tpot=30), refused).odds
    assert odds[Role.PREFILL] == pytest.approx(30 / 170 * 180 / 20, rel=0.1)  # 20 refused and 10 late, not 20
    assert odds[Role.DECODE] == 0.25  # none of 20


def test_a_prediction_that_came_true_stays() -> None:
    assert after(judged(200, ttft=20, tpot=20), {}).odds[Role.PREFILL] == pytest.approx(1.0, rel=0.05)


def test_what_was_missed_long_ago_is_forgotten() -> None:
    misses = after(judged(200, ttft=100), {})
    assert misses.are_too_many(Role.PREFILL, 0.95)
    assert not misses.are_too_many(Role.DECODE, 0.95)
    misses.count(Demand(), seen({}, seconds=7200.0))
    assert not misses.are_too_many(Role.PREFILL, 0.95)
    assert misses.odds[Role.PREFILL] == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize(
    ("num_lost", "num_requests", "wanted"),
    [
        (0, 1000, 0),
        (7, 14, 0),  # too few to tell
        (50, 1000, 0),  # as many as the objective allows
        (58, 1000, 0),  # more, but chance may explain it
        (200, 1000, 5),  # 4 serve what 82 % are, at least
        (1000, 1000, 8),  # twice as many at once, at most
    ],
)
def test_what_was_lost_asks_for_as_many_as_would_have_served_it(num_lost: int, num_requests: int, wanted: int) -> None:
    assert for_losses(num_lost, num_requests, 4.0, attainment=0.95) == wanted


def test_where_one_pool_missed_much_of_late_neither_shrinks() -> None:
    drained: list[set[str]] = []
    for missed in (0, 30):
        world = World(policy(role_switch={"enabled": False}), rate=8.0).start(2, 2).go_on(200)
        world.rate = 0.5
        found = world.observation(5.0)
        assert found.demand is not None
        demand = replace(found.demand, num_judged=40, num_within_ttft=40 - missed, num_within_tpot=40)
        world.scaler.decide(replace(found, at_s=world.at_s + 1.0, demand=demand))
        before = world.sizes
        world.go_on(200)
        assert before[0] > 1
        drained.append({a.name.partition("-")[0] for _, a in world.orders if isinstance(a, Drain)})
    assert drained == [{"prefill", "decode"}, set()]


def test_a_pool_that_missed_much_gives_up_a_replica_that_the_other_pool_needs() -> None:
    world = World(policy(budget={"max_devices": 4}), rate=14.0, answer=11).start(3, 1).go_on(50)
    found = world.observation(5.0)
    assert found.demand is not None
    demand = replace(found.demand, num_judged=70, num_within_ttft=30, num_within_tpot=70)
    world.scaler.decide(replace(found, at_s=world.at_s + 1.0, demand=demand))
    assert world.sizes == (3, 1)
    world.rate, world.prompt, world.answer = 2.0, 100, 601  # 24 answers at once, and a replica holds 20
    world.go_on(200)
    assert any(isinstance(action, Flip) and action.role is Role.DECODE for _, action in world.orders)
    assert world.size(Role.DECODE) == 2
