"""Pools that are scaled under virtual time: what start-up, drains and roles cost."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from pdserve.autoscaler.decisions import Action, Add, Binds, Decision, Drain, Flip
from pdserve.autoscaler.observation import Observation, State
from pdserve.base.roles import POOLS, Role
from pdserve.capacity.scaling import Scaling, Scene, Slowdown
from pdserve.capacity.worker import Shape
from pdserve.measure.outcomes import Objective
from pdserve.measure.workload import random_lengths
from pdserve.perfmodel.profile import read_profile, shipped_profile

PROFILE = read_profile(shipped_profile())
OBJECTIVE = Objective(1.0, 0.1)
QUIET, BUSY = random_lengths(150, 500, 100, 7).at_rate(3), random_lengths(700, 500, 100, 8).at_rate(30)
STARTUP_S = dict.fromkeys(POOLS, 10.0)


def scene(prefill: int, decode: int, **changes: object) -> Scene:
    shape = Shape(prefill, decode, local_prefill=False)
    return replace(Scene(PROFILE, QUIET, OBJECTIVE, shape, STARTUP_S), **changes)  # type: ignore[arg-type]


class Orders:
    """Gives orders at their times, and keeps what it observed."""

    def __init__(self, *orders: tuple[float, Action]) -> None:
        self._orders = list(orders)
        self.seen: list[Observation] = []

    def decide(self, observation: Observation) -> Sequence[Decision]:
        self.seen.append(observation)
        due = [action for at_s, action in self._orders if at_s <= observation.at_s]
        self._orders = self._orders[len(due) :]
        return [Decision(Role.DECODE, action, 1, 1, Binds.NOTHING, "", "") for action in due]

    def states(self, name: str) -> list[tuple[float, State]]:
        return [(o.at_s, r.state) for o in self.seen for r in o.replicas if r.name == name]


def test_a_replica_is_paid_for_from_its_order_and_serves_after_its_start_up() -> None:
    orders = Orders((20.0, Add("late", Role.DECODE)), (20.0, Add("late", Role.DECODE)))
    scaled = Scaling(scene(1, 1), orders.decide).run("orders")
    states = orders.states("late")
    assert states[0] == (25.0, State.STARTING)
    assert next(at_s for at_s, state in states if state is State.READY) == 30.0
    assert scaled.replica_hours[Role.DECODE] * 3600 == pytest.approx(2 * scaled.span_s - 20.0)
    assert scaled.replica_hours[Role.PREFILL] * 3600 == pytest.approx(scaled.span_s)


def test_a_replica_that_starts_is_given_up_at_once_and_one_that_serves_is_paid_until_it_has_left() -> None:
    orders = Orders((20.0, Add("late", Role.DECODE)), (25.0, Drain("late")), (30.0, Drain("d1")))
    scaled = Scaling(scene(1, 2), orders.decide).run("orders")
    assert [at_s for at_s, _ in orders.states("late")] == [25.0]
    assert orders.states("d1")[-1][0] <= 35.0
    paid_s = scaled.replica_hours[Role.DECODE] * 3600
    assert scaled.span_s + 35.0 <= paid_s <= scaled.span_s + 40.0
    assert all(outcome.num_tokens == outcome.output_tokens for outcome in scaled.outcomes)


def test_a_flip_is_observed_and_one_that_empties_a_pool_is_an_error() -> None:
    orders = Orders((20.0, Flip("d1", Role.PREFILL)), (30.0, Flip("d0", Role.PREFILL)))
    scaled = Scaling(scene(1, 2), orders.decide).run("orders")
    last = {replica.name: replica.role for replica in orders.seen[-1].replicas}
    assert last == {"p0": Role.PREFILL, "d0": Role.DECODE, "d1": Role.PREFILL}
    assert [bool(noted.error) for noted in scaled.orders] == [False, True]


def test_observations_count_each_request_once() -> None:
    orders = Orders()
    scaled = Scaling(scene(1, 1, workload=BUSY), orders.decide).run("none")
    demands = [each.demand for each in orders.seen if each.demand is not None]
    came = sum(outcome.sent_s <= orders.seen[-1].at_s for outcome in scaled.outcomes)
    assert sum(demand.num_requests for demand in demands) == came
    assert sum(sum(each.refused.values()) for each in orders.seen) == pytest.approx(
        sum(outcome.is_refused and outcome.ended_s <= orders.seen[-1].at_s for outcome in scaled.outcomes)
    )
    assert scaled.refused > 0.2


def test_the_costs_that_are_observed_follow_a_slow_stretch() -> None:
    orders = Orders()
    Scaling(scene(1, 1, slow=(Slowdown(1.5, 20.0, 45.0),)), orders.decide).run("slow")
    usual, slow = (next(o for o in orders.seen if o.at_s == at_s).costs[Role.PREFILL] for at_s in (20.0, 45.0))
    assert 1.2 < slow.prefill.seconds(500, 500**2) / usual.prefill.seconds(500, 500**2) < 1.6
