"""Counters become differences, a router that is silent makes all of it stale, and a state keeps its beginning."""

from pdserve.autoscaler.observation import Capacity, Listed, Observation, Observer, State
from pdserve.base.roles import Role
from pdserve.perfmodel.curve import Curve
from pdserve.proto.v1 import admin_pb2 as admin
from pdserve.proto.v1 import link_pb2 as link
from pdserve.protocol.admin import demand_to_proto
from pdserve.protocol.reports import Demand

PREFILL, DECODE = link.ROLE_PREFILL, link.ROLE_DECODE
HELD = (Listed("p", Role.PREFILL, State.READY), Listed("d", Role.DECODE, State.STARTING))


def router(name: str, num_requests: int, refused: int = 0, **fields: object) -> admin.ClusterStatus:
    demand = demand_to_proto(Demand(num_requests=num_requests, prompt_tokens=10 * num_requests))
    causes = {"queue": refused} if refused else {}
    return admin.ClusterStatus(router_id=name, demand=demand, refused_because=causes, **fields)  # type: ignore[arg-type]


def worker(name: str, role: "link.Role.ValueType", load: link.Heartbeat | None = None) -> admin.WorkerStatus:
    layout = link.KvLayout(page_size=16)
    sizes = {"num_pages": 100, "max_num_seqs": 8, "max_num_batched_tokens": 512}
    return admin.WorkerStatus(
        registration=link.Register(worker_id=name, role=role, ready=True, layout=layout, **sizes), load=load
    )


def seen(observer: Observer, at_s: float, *statuses: admin.ClusterStatus, silent: bool = False) -> Observation:
    return observer.observe(at_s, 1e9 + at_s, HELD, None if silent else statuses)


def test_demand_is_what_came_since_the_last_observation_at_all_routers() -> None:
    observer = Observer()
    first = seen(observer, 5.0, router("a", 100, 7), router("b", 50))
    assert (first.demand, first.seconds, first.refused) == (Demand(), 0.0, {})
    second = seen(observer, 7.0, router("a", 110, 9), router("b", 51))
    assert second.demand == Demand(num_requests=11, prompt_tokens=110)
    assert (second.seconds, second.refused) == (2.0, {"queue": 2})


def test_a_router_that_started_again_has_seen_all_it_counts_and_one_that_is_found_nothing() -> None:
    observer = Observer()
    seen(observer, 0.0, router("a", 100, 7))
    after = seen(observer, 1.0, router("a", 3, 1), router("b", 1000, 5))
    assert after.demand == Demand(num_requests=3, prompt_tokens=30)
    assert after.refused == {"queue": 1}


def test_a_silent_router_makes_the_observation_stale_and_what_it_counted_comes_later() -> None:
    observer = Observer()
    seen(observer, 0.0, router("a", 100))
    stale = seen(observer, 1.0, silent=True)
    assert stale.demand is None
    assert [(each.name, each.role, each.state) for each in stale.replicas] == [
        ("p", Role.PREFILL, State.READY),
        ("d", Role.DECODE, State.STARTING),
    ]
    fresh = seen(observer, 4.0, router("a", 140))
    assert fresh.demand == Demand(num_requests=40, prompt_tokens=400)
    assert fresh.seconds == 4.0


def test_a_replica_is_what_its_router_reports_and_its_state_keeps_its_beginning() -> None:
    observer = Observer()
    assert [each.since_s for each in seen(observer, 1.0, router("a", 0)).replicas] == [1.0, 1.0]
    load = link.Heartbeat(num_running=5, num_waiting=2, waiting_tokens=70, kv_tokens=900)
    flipped = router("a", 0, workers=[worker("p", DECODE, load), worker("d", DECODE), worker("stranger", DECODE)])
    prefill, decode = seen(observer, 2.0, flipped).replicas
    assert (prefill.role, prefill.state, prefill.since_s) == (Role.DECODE, State.READY, 1.0)
    assert (prefill.num_sequences, prefill.waiting_tokens, prefill.kv_tokens) == (5, 70, 900)
    assert (decode.state, decode.since_s) == (State.READY, 2.0)
    draining = router("a", 0, workers=[worker("d", DECODE, link.Heartbeat(draining=True))])
    assert [each.state for each in seen(observer, 3.0, draining).replicas] == [State.READY, State.DRAINING]


def test_a_sequence_that_waits_for_pages_while_its_prompt_is_computed_counts_once() -> None:
    for prefill in (link.Heartbeat(num_waiting=1, waiting_tokens=70), link.Heartbeat(num_running=1, kv_tokens=70)):
        decode = link.Heartbeat(num_running=3, num_waiting=1)
        both = [worker("p", PREFILL, prefill), worker("d", DECODE, decode)]
        replicas = seen(Observer(), 0.0, router("a", 0, workers=both)).replicas
        assert [each.num_sequences for each in replicas] == [1, 3]


def test_costs_and_capacities_are_those_of_each_role() -> None:
    costs = [
        admin.LearntCosts(role=PREFILL, prefill_step_s=1.0, decode_step_s=9.0, num_prefill_steps=50),
        admin.LearntCosts(role=DECODE, prefill_step_s=8.0, decode_step_s=2.0, num_decode_steps=50),
    ]
    found = seen(Observer(), 0.0, router("a", 0, costs=costs, workers=[worker("d", DECODE)]))
    for role in (Role.PREFILL, Role.DECODE):  # neither has done what the other does
        assert found.costs[role].prefill.step_s == 1.0
        assert found.costs[role].decode_curve(1) == Curve(2.0, 0.0, 0.0)
    assert found.capacities == {Role.DECODE: Capacity(1600, 8, 512, page_tokens=16)}
    costs[1].num_prefill_steps = 50
    assert seen(Observer(), 0.0, router("a", 0, costs=costs)).costs[Role.DECODE].prefill.step_s == 8.0
    assert seen(Observer(), 0.0, router("a", 0)).costs == {}


def test_what_workers_of_a_role_hold_is_known_after_the_last_of_them_is_lost() -> None:
    observer = Observer()
    there = seen(observer, 0.0, router("a", 0, workers=[worker("p", PREFILL), worker("d", DECODE)]))
    assert there.capacities.keys() == {Role.PREFILL, Role.DECODE}
    assert seen(observer, 1.0, router("a", 0, workers=[worker("d", DECODE)])).capacities == there.capacities
