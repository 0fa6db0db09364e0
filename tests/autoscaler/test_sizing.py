"""Predicted attainment of a pool rises with its replicas, falls with demand, and agrees with exact results."""

from math import exp, factorial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.autoscaler.decisions import Binds
from pdserve.autoscaler.observation import Capacity
from pdserve.autoscaler.planning import settled
from pdserve.autoscaler.pools import Bounds
from pdserve.autoscaler.prefill_queue import PrefillPool, erlang_c
from pdserve.autoscaler.schema import Budget, Objectives
from pdserve.autoscaler.sizing import DecodePool, Sizer
from pdserve.autoscaler.traffic import Lengths, Traffic
from pdserve.base.roles import Role
from pdserve.perfmodel.curve import Curve, DecodePiece, StepCosts
from pdserve.protocol.paging import PageShape

FLAT = Curve(0.02, 0.0, 0.0)  # steps take as long whatever they hold
COSTS = StepCosts(Curve(0.0, 1e-4, 0.0), (DecodePiece(None, FLAT),))


def traffic(rate: float, prompt: float = 1000.0, answer: float = 101.0) -> Traffic:
    return Traffic(rate, rate, ((prompt, 1.0),), ((answer, 1.0),))


def test_waits_of_one_server_are_those_of_the_textbook() -> None:
    assert erlang_c(1, 0.7) == pytest.approx(0.7)
    offered = 2.4
    unweighted = offered**3 / factorial(3) / (1 - offered / 3)
    assert erlang_c(3, 0.8) == pytest.approx(
        unweighted / (sum(offered**k / factorial(k) for k in range(3)) + unweighted)
    )


def test_lost_prompts_of_one_server_are_those_of_the_exact_formula() -> None:
    # M/M/1 whose customers leave when they would wait for longer than a limit. The lengths are finely cut.
    cut = tuple((10 * (k + 0.5), exp(-k / 100) * (1 - exp(-1 / 100))) for k in range(1500))
    limit_s, rate = 3.0, 9.0  # prompts take 0.1 s on average, at most 1.5 s
    pool = PrefillPool(Traffic(rate, rate, cut, ((2.0, 1.0),)), Curve(0.0, 1e-4, 0.0), 1000, limit_s + 0.1)
    late = 0.9 * exp(-limit_s * (10 - rate))
    assert 1 - pool.attainment(1) == pytest.approx(0.1 * late / (1 - 0.9 * late), rel=0.5)


@pytest.mark.parametrize("rate", [1.0, 8.0, 9.99, 10.0, 10.01, 15.0, 100.0])
def test_a_prefill_pool_computes_what_it_can_and_loses_the_rest(rate: float) -> None:
    attained = PrefillPool(traffic(rate), COSTS.prefill, 1000, 0.5).attainment(1)  # ten prompts a second
    assert 0.0 <= attained <= min(1.0, 10 / rate) + 1e-6
    assert attained > 0.7 * min(1.0, 10 / rate)


def test_more_prefill_workers_never_serve_less() -> None:
    pool = PrefillPool(traffic(30.0), Curve(0.02, 1e-4, 1e-9), 2048, 0.5)
    attained = [pool.attainment(count) for count in range(1, 12)]
    assert attained == sorted(attained)
    assert attained[-1] > 0.99


def test_prompts_that_no_worker_computes_in_time_count_for_no_size() -> None:
    mixed = Traffic(1.0, 1.0, ((1000.0, 0.9), (100_000.0, 0.1)), ((2.0, 1.0),))
    pool = PrefillPool(mixed, COSTS.prefill, 2048, 1.0)
    assert pool.best == pytest.approx(0.9)
    assert pool.attainment(8) > 0.999


def test_short_prompts_that_wait_share_a_step() -> None:
    curve = Curve(0.1, 1e-5, 0.0)  # 100 ms a step, and hardly more for its tokens
    shared = PrefillPool(traffic(30.0, prompt=100.0), curve, 2048, 1.0)
    alone = PrefillPool(traffic(30.0, prompt=100.0), curve, 100, 1.0)
    assert shared.attainment(1) > 0.95
    assert alone.attainment(1) < 0.5


def test_sequences_of_a_constant_step_are_lost_as_erlang_says() -> None:
    offered, room = 8.0, 10  # sequences
    pool = DecodePool(traffic(offered / 2.0), COSTS, Capacity(10**9, room, 2048), 0.03)  # 100 later tokens in 2 s
    terms = [offered**k / factorial(k) for k in range(room + 1)]
    assert pool.attainment(1) == pytest.approx(1 - terms[-1] / sum(terms), rel=1e-6)


def test_a_sequence_takes_room_from_its_placement_on_and_steps_only_after_its_first_token() -> None:
    room, capacity = 10, Capacity(10**9, 10, 2048)
    waits = DecodePool(traffic(2.0), COSTS, capacity, 0.03, delay_s=2.0)  # 2 s to decode, as many before
    terms = [8.0**k / factorial(k) for k in range(room + 1)]
    assert waits.attainment(1) == pytest.approx(1 - terms[-1] / sum(terms), rel=1e-6)
    costs = StepCosts(COSTS.prefill, (DecodePiece(None, Curve(0.0, 0.005, 0.0)),))  # six at most within 30 ms
    assert DecodePool(traffic(2.0), costs, capacity, 0.03).most == 6
    assert DecodePool(traffic(2.0), costs, capacity, 0.03, delay_s=3.0).most == 10


def test_pages_that_are_half_full_count() -> None:
    fine, coarse = (DecodePool(traffic(1.0), COSTS, Capacity(20_000, 64, 2048, page_tokens=n), 0.03) for n in (1, 512))
    assert (fine.binds, coarse.binds) == (Binds.PAGES, Binds.PAGES)
    assert coarse.most < fine.most


@pytest.mark.parametrize(
    ("capacity", "curve", "binds"),
    [
        (Capacity(10**9, 64, 2048), FLAT, Binds.BATCH),
        (Capacity(20_000, 64, 2048), FLAT, Binds.PAGES),
        (Capacity(10**9, 64, 2048), Curve(0.02, 1e-3, 0.0), Binds.STEP_TIME),
    ],
)
def test_a_decode_pool_names_what_it_lacks_first(capacity: Capacity, curve: Curve, binds: Binds) -> None:
    pool = DecodePool(traffic(1.0), StepCosts(COSTS.prefill, (DecodePiece(None, curve),)), capacity, 0.03)
    assert pool.binds is binds


def test_more_decode_workers_never_serve_less() -> None:
    costs = StepCosts(
        COSTS.prefill, (DecodePiece(95, Curve(0.02, 4e-5, 6e-7)), DecodePiece(None, Curve(0.007, 2e-4, 6e-7)))
    )
    pool = DecodePool(traffic(60.0), costs, Capacity(66_000, 256, 2048), 0.05)
    attained = [pool.attainment(count) for count in range(1, 12)]
    assert attained == sorted(attained)
    assert attained[0] < 0.6
    assert attained[-1] > 0.99


def test_answers_too_short_for_their_first_wait_are_not_held_against_the_pool() -> None:
    two = Traffic(1.0, 1.0, ((100.0, 1.0),), ((2.0, 0.5), (200.0, 0.5)))
    pool = DecodePool(two, COSTS, Capacity(10**9, 64, 2048), 0.025)  # 20 ms and half a step: 30 for a second token
    assert pool.best == pytest.approx(0.5)
    assert pool.attainment(4) > 0.999


LENGTHS = st.lists(
    st.tuples(st.floats(1, 1e6), st.floats(0.01, 1)), min_size=1, max_size=5, unique_by=lambda pair: pair[0]
)
COEFFICIENTS = st.sampled_from([0.0, 1e-9, 1e-4, 0.05, 3.0])
CURVES = st.builds(Curve, COEFFICIENTS, COEFFICIENTS, COEFFICIENTS)


def shares(lengths: list[tuple[float, float]]) -> Lengths:
    total = sum(weight for _, weight in lengths)
    return tuple((tokens, weight / total) for tokens, weight in sorted(lengths))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    rates=st.tuples(st.floats(0, 1e4), st.floats(0, 1e4)),
    lengths=st.tuples(LENGTHS, LENGTHS),
    curves=st.tuples(CURVES, CURVES),
    capacity=st.builds(Capacity, st.integers(1, 10**7), st.integers(1, 64), st.integers(1, 10**5)),
    size=st.integers(0, 9),
)
def test_whatever_comes_a_pool_attains_a_share(
    rates: tuple[float, float],
    lengths: tuple[list[tuple[float, float]], list[tuple[float, float]]],
    curves: tuple[Curve, Curve],
    capacity: Capacity,
    size: int,
) -> None:
    given = Traffic(*rates, shares(lengths[0]), shares(lengths[1]))
    costs = StepCosts(curves[0], (DecodePiece(None, curves[1]),))
    prefill = PrefillPool(given, costs.prefill, capacity.step_tokens, 0.5)
    decode = DecodePool(given, costs, capacity, 0.05)
    for pool in (prefill, decode):
        assert 0 <= pool.attainment(size) <= pool.attainment(size + 1) + 0.01
        assert pool.attainment(size) <= 1 + 1e-9
        assert 0 <= pool.best <= 1 + 1e-9


def sizer(rate: float) -> Sizer:
    """Return one for prompts of 0.1 s and answers of 2 s, of which ten run on a replica."""
    objectives = Objectives(ttft_ms=500, tpot_ms=40, attainment=0.95)
    both = (Role.PREFILL, Role.DECODE)
    return Sizer(traffic(rate), objectives, dict.fromkeys(both, COSTS), dict.fromkeys(both, Capacity(10**9, 10, 1000)))


def bounds(most: int = 20, least: int = 1, decode_devices: int = 1) -> dict[Role, Bounds]:
    return {Role.PREFILL: Bounds(least, most), Role.DECODE: Bounds(least, most, decode_devices)}


@pytest.mark.parametrize("rate", [0.5, 5.0, 20.0, 50.0])
def test_no_fewer_devices_would_meet_the_objective(rate: float) -> None:
    found = sizer(rate).fewest(bounds(decode_devices=2), Budget(max_devices=100))
    assert found.attainment >= 0.95
    prefill, decode = found.replicas[Role.PREFILL], found.replicas[Role.DECODE]
    for fewer in range(1, 21):
        for other in range(1, 21):
            if fewer + 2 * other < prefill + 2 * decode:
                assert sizer(rate).joint({Role.PREFILL: fewer, Role.DECODE: other}) < 0.95


def test_a_budget_that_is_too_small_is_split_so_that_the_most_are_served() -> None:
    found = sizer(50.0).fewest(bounds(), Budget(max_devices=10))
    assert found.attainment < 0.95
    assert set(found.binds.values()) == {Binds.BUDGET}
    splits = [{Role.PREFILL: size, Role.DECODE: 10 - size} for size in range(1, 10)]
    assert found.attainment == pytest.approx(max(sizer(50.0).joint(split) for split in splits))
    assert sum(found.replicas.values()) == 10


def test_a_split_is_kept_unless_another_serves_clearly_more() -> None:
    limits, demand = bounds(most=30), sizer(150.0)
    best = demand.fewest(limits, Budget(max_devices=30))
    kept = []
    for size in range(1, 30):
        present = {Role.PREFILL: size, Role.DECODE: 30 - size}
        found = settled(demand, best, present, limits)
        assert found.replicas in (present, best.replicas)
        assert (found.replicas == present) == (demand.joint(present) >= best.attainment - 0.01)
        kept += [size] * (found.replicas == present)
    assert 2 <= len(kept) <= 6
    smaller = {Role.PREFILL: kept[0], Role.DECODE: 29 - kept[0]}  # a device is free
    assert settled(demand, best, smaller, limits) is best


def test_a_pool_at_its_limit_makes_the_other_no_larger_than_it_needs_to_be() -> None:
    limits = {Role.PREFILL: Bounds(1, 20), Role.DECODE: Bounds(1, 4)}
    found = sizer(30.0).fewest(limits, Budget(max_devices=100))
    assert found.replicas[Role.DECODE] == 4
    assert found.binds[Role.DECODE] is Binds.MAX
    assert found.replicas[Role.PREFILL] <= 6


def test_the_least_of_a_budget_is_held_where_the_most_is_lost() -> None:
    found = sizer(1.0).fewest(bounds(), Budget(min_devices=7, max_devices=10))
    assert sum(found.replicas.values()) == 7


def test_a_pool_that_could_be_smaller_is_bound_by_its_least_size() -> None:
    found = sizer(1.0).fewest(bounds(least=3), Budget(max_devices=10))
    assert found.binds == {Role.PREFILL: Binds.MIN, Role.DECODE: Binds.MIN}


def test_windows_make_room_for_more_sequences_and_less_of_it_is_used() -> None:
    alike = Capacity(100_000, 256, 2048, 16, groups=(PageShape(16), PageShape(16)))
    sliding = Capacity(100_000, 256, 2048, 16, groups=(PageShape(16), PageShape(16, window=128)))
    assert alike.num_sequences(10_000) == pytest.approx(Capacity(100_000, 256, 2048, 16).num_sequences(10_000))
    assert sliding.num_sequences(10_000) == pytest.approx(2 * alike.num_sequences(10_000), rel=0.02)
    assert sliding.num_sequences(50) == pytest.approx(alike.num_sequences(50)), "their windows hold all tokens"
    assert alike.kv_usage(40_000, 4) == pytest.approx(0.4)
    assert sliding.kv_usage(40_000, 4) == pytest.approx(0.2, rel=0.02)
    assert sliding.kv_usage(0, 0) == 0.0
    most = [DecodePool(traffic(1.0, prompt=10_000.0), COSTS, capacity, 0.05).most for capacity in (alike, sliding)]
    assert most[1] > 1.8 * most[0]
