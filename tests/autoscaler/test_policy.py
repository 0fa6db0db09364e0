"""The autoscaler follows demand, one order at a time, within its limits, and says why."""

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from scaled_world import ANSWER, PROMPT, World, policy

from pdserve.autoscaler.decisions import Add, Binds, Drain, Flip
from pdserve.autoscaler.observation import Observation, Replica, State
from pdserve.autoscaler.policy import Autoscaler
from pdserve.autoscaler.supply import Result
from pdserve.base.roles import Role
from pdserve.perfmodel.curve import Curve, StepCosts


def test_each_pool_follows_its_own_demand() -> None:
    world = World(policy(role_switch={"enabled": False})).start(1, 1)
    world.rate = 6.0
    world.go_on(200)
    before = world.sizes
    world.prompt = 4000  # four times the work for prefill, the same for decode
    world.go_on(200)
    assert world.sizes[0] > before[0] + 1
    assert world.sizes[1] == before[1]
    world.prompt, world.answer = 1000, 1601
    world.go_on(400)
    assert world.sizes[1] > before[1] + 2
    assert world.sizes[0] <= before[0] + 1


def test_a_pool_shrinks_again_one_by_one_and_only_after_its_window() -> None:
    world = World(policy()).start(1, 1)
    world.rate = 40.0
    world.go_on(200)
    large = world.sizes
    assert min(large) >= 4
    world.rate, quiet_s = 2.0, world.at_s
    world.go_on(400)
    assert world.sizes == (1, 1)
    drains = [at_s for at_s, action in world.orders if isinstance(action, Drain) and at_s > quiet_s]
    assert min(drains) >= quiet_s + 60
    assert all(not isinstance(action, Add) for at_s, action in world.orders if at_s > quiet_s + 60)


def test_constant_demand_with_noise_moves_nothing() -> None:
    world = World(policy(), noise=Random(3)).start(1, 1)
    world.rate = 25.0
    world.go_on(600)
    settled = len(world.orders)
    world.go_on(1800)
    assert len(world.orders) - settled <= 2


def test_a_dead_replica_below_the_least_size_is_replaced_at_once() -> None:
    world = World(policy(prefill={"min_replicas": 3})).start(3, 1).go_on(60)
    del world.replicas["prefill-1"]
    decision = world.look(1)[0]
    assert decision.action == Add("prefill-1", Role.PREFILL)
    assert decision.binds is Binds.MIN


def test_an_empty_answer_ends_nothing() -> None:
    world = World(policy()).start(3, 3).go_on(60)
    world.replicas.clear()
    for fresh in (True, False):
        actions = [decision.action for decision in world.look(5, fresh=fresh)]
        assert all(action is None or isinstance(action, Add) for action in actions)


def test_stale_figures_hold_then_fall_back_and_never_shrink() -> None:
    world = World(policy(prefill={"fallback": {"failure_threshold": 3, "replicas": 4}})).start(2, 6)
    world.go_on(30)
    for count in range(1, 20):
        world.advance(5)
        prefill, decode = world.look(5, fresh=False)
        assert decode.action is None
        assert decode.binds is Binds.STALE
        if count < 3:
            assert prefill.action is None
        for action in filter(None, (prefill.action, decode.action)):
            assert isinstance(action, Add)
            world.carry_out(action)
    assert world.sizes == (4, 6)


def test_a_spent_budget_is_split_by_a_change_of_roles() -> None:
    world = World(policy(budget={"max_devices": 6}), answer=1601).start(1, 1)
    world.rate = 2.0
    world.go_on(300)
    before = world.sizes
    assert before[1] > before[0]
    world.answer, world.prompt, world.rate = 21, 4000, 10.0
    world.go_on(300)
    assert any(isinstance(action, Flip) for _, action in world.orders)
    assert world.size(Role.PREFILL) > before[0]
    assert sum(world.sizes) <= 6


def test_a_spent_budget_stays_split_while_nothing_changes() -> None:
    world = World(policy(budget={"max_devices": 6}), rate=40.0, noise=Random(5)).start(1, 1).go_on(300)
    assert sum(world.sizes) == 6
    settled = len(world.orders)
    world.go_on(900)
    assert len(world.orders) - settled <= 2


def test_no_pool_shrinks_before_its_demand_was_forecast() -> None:
    pool = {"behavior": {"scale_down": {"stabilization_window_seconds": 0.0}}}
    world = World(policy(prefill=pool, decode=pool), rate=4.0).start(4, 4).go_on(15)
    assert world.orders == []
    world.go_on(10)
    assert any(isinstance(action, Drain) for _, action in world.orders)


def test_without_role_switch_nobody_changes_roles() -> None:
    world = World(policy(budget={"max_devices": 6}, role_switch={"enabled": False}), answer=1601).start(1, 1)
    world.rate = 2.0
    world.go_on(300)
    world.answer, world.prompt, world.rate = 21, 4000, 10.0
    world.go_on(300)
    assert not any(isinstance(action, Flip) for _, action in world.orders)
    assert world.size(Role.PREFILL) > 1


def test_an_order_that_is_never_seen_is_given_again_by_the_same_name_and_not_doubled() -> None:
    world = World(policy(), rate=30.0).start(1, 1)
    asked = []
    for _ in range(100):
        world.advance(5)
        for decision in world.look(5):
            if decision.pool is Role.PREFILL and decision.action is not None:
                asked.append((world.at_s, decision.action))
                world.scaler.ordered(decision.action, world.at_s)
    assert {action for _, action in asked} == {Add("prefill-1", Role.PREFILL)}
    assert len(asked) >= 3
    gaps = [later - earlier for (earlier, _), (later, _) in pairwise(asked)]
    assert min(gaps) > 60
    results = [o.result for o in world.scaler.take_outcomes() if o.action == asked[0][1]]
    assert set(results) == {Result.LATE}


def test_what_may_have_been_started_counts_against_the_budget() -> None:
    world = World(policy(budget={"max_devices": 5}), rate=10.0, prompt=2000, drain_s=1000.0).start(1, 1)
    for name in ("decode-7", "decode-8", "decode-9"):
        world.replicas[name] = Replica(name, Role.DECODE, State.DRAINING, 0.0)
    world.go_on(15)
    assert world.orders == []
    assert all(decision.desired > 1 for decision in world.decisions)
    del world.replicas["decode-7"]
    world.advance(1)
    orders = [decision.action for decision in world.look(1) if decision.action is not None]
    assert len(orders) == 1  # there is room for one of both pools
    world.scaler.failed(orders[0], "no answer", world.at_s)
    for _ in range(3):
        world.advance(1)
        assert [decision.action for decision in world.look(1)] == [None, None]
    world.advance(5)
    assert [decision.action for decision in world.look(5) if decision.action is not None] == orders


def test_a_failed_order_waits_longer_each_time_and_says_why() -> None:
    world = World(policy(), rate=30.0).start(1, 8)
    failed_s = []
    for _ in range(40):
        world.advance(5)
        prefill = world.look(5)[0]
        if prefill.action is not None:
            failed_s.append(world.at_s)
            world.scaler.failed(prefill.action, "no node", world.at_s)
        elif failed_s:
            assert "no node" in prefill.text
    gaps = [later - earlier for earlier, later in pairwise(failed_s)]
    assert gaps == sorted(gaps)
    assert gaps[-1] >= 4 * gaps[0]


def test_an_order_that_failed_does_not_count_as_a_change() -> None:
    rules = {"scale_up": {"tolerance": 0.0, "policies": [{"type": "Pods", "value": 1, "period_seconds": 600.0}]}}
    world = World(policy(prefill={"behavior": rules}), rate=30.0).start(1, 8)
    asked = []
    for _ in range(12):
        world.advance(5)
        action = world.look(5)[0].action
        if action is not None:
            asked.append(action)
            world.scaler.failed(action, "no node", world.at_s)
    assert len(asked) > 1


def test_a_replica_changes_its_role_only_if_enough_others_serve() -> None:
    slow = {"behavior": {"scale_down": {"stabilization_window_seconds": 3000.0}}}
    world = World(policy(budget={"max_devices": 4}, decode=slow), rate=20.0, answer=11).start(1, 1)
    for name in ("decode-1", "decode-2"):
        world.replicas[name] = Replica(name, Role.DECODE, State.STARTING, 0.0)
    world.startup_s = 300.0
    world.go_on(295)
    assert world.decisions[0].desired > 1
    assert world.orders == []
    world.go_on(60)
    assert {action.name for _, action in world.orders if isinstance(action, Flip)} <= {"decode-1", "decode-2"}
    assert world.size(Role.PREFILL) > 1


def test_a_pool_whose_only_worker_does_not_come_back_is_given_one_of_the_other_pool() -> None:
    world = World(policy(budget={"max_devices": 3}), rate=12.0, answer=11).start(2, 1).go_on(100)
    assert world.orders == []
    world.replicas["decode-0"] = Replica("decode-0", Role.DECODE, State.STARTING, world.at_s)
    world.startup_s = 300.0
    world.go_on(30)
    assert world.orders == []
    world.go_on(5)
    ((_, flip),) = world.orders
    assert isinstance(flip, Flip)
    assert flip.role is Role.DECODE
    assert world.decisions[1].binds is Binds.LATE
    world.go_on(300)
    assert world.sizes == (2, 1)
    assert len(world.replicas) <= 3


def test_a_pool_whose_replicas_all_start_late_is_given_none_where_the_other_has_but_its_least() -> None:
    world = World(policy(budget={"max_devices": 8})).start(1, 1).go_on(100)
    world.replicas["decode-0"] = Replica("decode-0", Role.DECODE, State.STARTING, world.at_s)
    world.startup_s = 300.0
    world.go_on(200)
    assert world.orders == []


def test_a_drain_of_the_wrong_replica_is_not_ordered_twice() -> None:
    world = World(policy(role_switch={"enabled": False, "min_dwell_s": 20.0}), rate=2.0).start(1, 2)
    drains = []
    for _ in range(60):
        world.advance(5)
        for decision in world.look(5):
            if isinstance(decision.action, Drain):
                drains.append(decision.action)
                world.scaler.ordered(decision.action, world.at_s)
                wrong = "decode-0" if decision.action.name == "decode-1" else "decode-1"
                world.replicas.pop(wrong)
    assert len(drains) == 1
    assert world.size(Role.DECODE) == 1
    assert Result.LATE in {outcome.result for outcome in world.scaler.take_outcomes()}


def test_workers_of_which_nothing_is_known_are_left_as_they_are() -> None:
    seen = World(policy(), rate=30.0).start(2, 2)
    scaler = seen.scaler
    for at_s in range(5, 100, 5):
        found = replace(seen.observation(5), at_s=float(at_s), costs={Role.DECODE: StepCosts(Curve(0, 0, 0), ())})
        for decision in scaler.decide(found):
            assert decision.action is None
            assert "prefill and decode" in decision.seen


def test_advice_is_given_and_not_taken_for_done() -> None:
    world = World(policy(mode="advisory"), rate=30.0).start(1, 1).go_on(200)
    assert world.orders == []
    assert world.decisions[0].advisory
    assert world.decisions[0].desired > 1
    assert "advisory" in world.decisions[0].text


def test_a_restarted_autoscaler_goes_on_from_what_it_sees() -> None:
    world = World(policy(), rate=30.0).start(1, 1)
    while not any(isinstance(action, Add) for _, action in world.orders):
        world.go_on(5)
    world.scaler = Autoscaler(world.policy)  # in the middle of starting a replica
    world.go_on(300)
    added = [action.name for _, action in world.orders if isinstance(action, Add)]
    assert len(added) == len(set(added))
    assert not any(isinstance(action, Drain) for at_s, action in world.orders if at_s < 60)


def test_start_up_is_learnt() -> None:
    world = World(policy(), startup_s=80.0, rate=30.0).start(1, 1).go_on(200)
    assert world.scaler.startup_s(Role.PREFILL) == pytest.approx(80, abs=6)


def test_a_signal_above_its_target_makes_its_pool_grow() -> None:
    signals = [{"metric": "running_sequences", "target": 4}]
    world = World(policy(decode={"signals": signals}), rate=1.0).start(1, 2).go_on(30)
    world.replicas["decode-0"] = replace(world.replicas["decode-0"], num_sequences=12)
    world.advance(5)
    decision = world.look(5)[1]
    assert decision.action == Add("decode-2", Role.DECODE)
    assert decision.binds is Binds.WAITING


@pytest.mark.parametrize(
    ("metric", "target", "wanted"),
    [
        ("queue_tokens", 150.0, 2),
        ("queue_tokens", 140.0, 3),
        ("kv_usage", 0.2, 2),
        ("running_sequences", 4.0, 2),
        ("held_requests", 2.0, 5),
    ],
)
def test_a_signal_asks_for_its_target_on_average(metric: str, target: float, wanted: int) -> None:
    signals = [{"metric": metric, "target": target}]
    world = World(policy(decode={"signals": signals}), rate=0.5).start(1, 1).go_on(30)
    busy = replace(world.replicas["decode-0"], num_sequences=8, waiting_tokens=300, kv_tokens=400_000)
    world.replicas["decode-0"] = busy
    world.advance(5)
    found = replace(world.observation(5.0), num_held=10)
    decision = world.scaler.decide(found)[1]
    assert (decision.action, decision.desired) == (Add("decode-1", Role.DECODE), wanted)


def test_refusals_make_the_pool_grow_whose_lack_they_name() -> None:
    world = World(policy(), rate=10.0).start(2, 3).go_on(200)
    sizes = world.sizes
    world.refused = {"batch": 25, "idle_cluster": 30}
    world.go_on(20)
    assert world.sizes[0] == sizes[0]
    assert world.sizes[1] > sizes[1]


def test_the_replica_with_the_least_to_finish_is_drained() -> None:
    world = World(policy(), rate=2.0).start(1, 1).go_on(100)
    for number, sequences in ((1, 5), (2, 2), (3, 9)):
        name = f"decode-{number}"
        world.replicas[name] = Replica(name, Role.DECODE, State.READY, world.at_s, sequences, 0, sequences * 1000)
    world.replicas["decode-0"] = replace(world.replicas["decode-0"], num_sequences=8, kv_tokens=8000)
    world.go_on(40)
    assert next(action for _, action in world.orders) == Drain("decode-2")


def test_a_mixed_replica_is_drained_only_where_both_pools_are_to_shrink() -> None:
    mixed = {f"mixed-{number}": Replica(f"mixed-{number}", Role.MIXED, State.READY, 0.0) for number in range(3)}
    for least, left in ((1, 1), (3, 3)):
        world = World(policy(decode={"min_replicas": least}), rate=0.0)
        world.replicas = dict(mixed)
        world.go_on(300)
        assert len(world.replicas) == left
        assert len(world.orders) == len(mixed) - left


def test_a_pool_above_its_schedule_shrinks_and_below_it_grows() -> None:
    night = {"start": "00:00", "end": "06:00", "min_replicas": 4, "max_replicas": 5}
    world = World(policy(prefill={"schedules": [night]}), rate=1.0).start(1, 1).go_on(60)
    assert world.size(Role.PREFILL) == 4


def test_nothing_is_ordered_without_figures_but_what_the_limits_ask() -> None:
    replicas = (Replica("decode-0", Role.DECODE, State.READY, 0.0),)
    prefill, decode = Autoscaler(policy()).decide(Observation(0.0, 0.0, replicas, None))
    assert prefill.action == Add("prefill-0", Role.PREFILL)
    assert decode.action is None


def test_an_autoscaler_that_learnt_from_a_trace_begins_with_its_forecast() -> None:
    pool = {"behavior": {"scale_down": {"stabilization_window_seconds": 0.0}}}
    known = policy(prefill=pool, decode=pool, interval={"forecast_s": 120.0, "react_s": 5.0})
    sizes = []
    for earlier in ([], [(60.0 * PROMPT, 60.0 * ANSWER)] * 5):
        world = World(known, rate=4.0).start(1, 1)
        world.scaler = Autoscaler(known, earlier)
        world.go_on(110)  # less than an interval
        sizes.append(world.sizes)
    assert max(sizes[0]) <= 2
    assert min(sizes[1]) >= 5


def test_an_idle_cluster_shrinks_before_any_request_has_come() -> None:
    world = World(policy(), rate=0.0).start(4, 5).go_on(50)
    assert world.orders == []  # the window is not over
    world.go_on(200)
    assert world.sizes == (1, 1)
    assert all(isinstance(action, Drain) for _, action in world.orders)


def test_a_request_that_goes_on_keeps_a_fresh_cluster_as_it_is() -> None:
    world = World(policy(), rate=0.0).start(2, 2)
    world.replicas["decode-1"] = replace(world.replicas["decode-1"], num_sequences=1, kv_tokens=500)
    world.go_on(300)
    assert world.orders == []


def test_growth_that_fails_delays_no_drain() -> None:
    world = World(policy(role_switch={"enabled": False}), rate=30.0).start(3, 8).go_on(60)
    world.replicas = {name: replica for name, replica in world.replicas.items() if replica.state is State.READY}
    for _ in range(30):  # the next addition may wait for minutes
        world.advance(5)
        for decision in world.look(5):
            if isinstance(decision.action, Add):
                world.scaler.failed(decision.action, "no node", world.at_s)
    world.rate = 0.5
    quiet_s = world.at_s
    while not any(isinstance(action, Drain) for at_s, action in world.orders if at_s > quiet_s):
        assert world.at_s < quiet_s + 130
        world.go_on(5)


def test_a_worker_that_changed_its_role_and_starts_again_with_its_first_one_is_made_up_for() -> None:
    world = World(policy(budget={"max_devices": 6}), answer=1601).start(1, 1)
    world.rate = 2.0
    world.go_on(300)
    world.answer, world.prompt, world.rate = 21, 4000, 10.0
    while not any(isinstance(action, Flip) for _, action in world.orders):
        world.go_on(5)
    world.go_on(400)
    settled = world.sizes
    flipped = next(action.name for _, action in world.orders if isinstance(action, Flip))
    world.replicas[flipped] = Replica(flipped, Role.DECODE, State.STARTING, world.at_s)
    world.go_on(300)
    assert world.sizes == settled
    assert len(world.replicas) <= 6


def test_a_start_up_that_the_policy_changes_is_followed_until_one_was_measured() -> None:
    world = World(policy(), rate=1.0).start(1, 1).go_on(30)
    slow = {"startup_s": 90.0}
    world.scaler.follow(policy(prefill=slow, decode=slow))
    assert world.scaler.startup_s(Role.PREFILL) == 90.0
