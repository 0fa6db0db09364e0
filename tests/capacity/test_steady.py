"""What a run says of the steady state, held against queues whose steady state is known."""

import random
from collections.abc import Callable
from itertools import accumulate
from math import exp, factorial

import pytest

from pdserve.capacity.long_run import CERTAIN, Found, Steady, judge, least_error_cut, steady

LIMIT_S = 5.0  # of a time in the queue; each service takes one second


def attainment_of(rate: float, limit_s: float) -> float:
    """Return the share that spends at most `limit_s` in a queue with Poisson arrivals and services of one second.

    Erlang, 1909; for example Tijms, A First Course in Stochastic Models, 2003, section 9.2.
    """
    wait_s = limit_s - 1
    terms = ((rate * (k - wait_s)) ** k / factorial(k) * exp(-rate * (k - wait_s)) for k in range(int(wait_s) + 1))
    return (1 - rate) * sum(terms)


def queue(rate: float, count: int, seed: int, service_s: Callable[[int], float] = lambda _: 1.0) -> Steady:
    """Serve Poisson arrivals one after the other, a second each, and judge the run at its last arrival."""
    rng = random.Random(seed)
    arrived_s = list(accumulate(rng.expovariate(rate) for _ in range(count)))
    ended_s, end_s = [], 0.0
    for number, at_s in enumerate(arrived_s):
        end_s = max(end_s, at_s) + service_s(number)
        ended_s.append(end_s)
    now_s = arrived_s[-1]
    verdicts = [
        end_s - at_s <= LIMIT_S if end_s <= now_s else None for at_s, end_s in zip(arrived_s, ended_s, strict=True)
    ]
    return steady(arrived_s, [end_s if end_s <= now_s else float("inf") for end_s in ended_s], verdicts, now_s)


@pytest.mark.parametrize("rate", [0.5, 0.7, 0.8])
def test_the_attainment_of_a_queue_is_within_the_interval_told(rate: float) -> None:
    known = attainment_of(rate, LIMIT_S)
    states = [queue(rate, 8000, seed) for seed in range(40)]
    found = [state.attainment for state in states]
    inside = sum(low <= known <= high for low, high in (each.interval(CERTAIN) for each in found))
    assert all(state.first <= 4000 for state in states)
    assert inside >= 37  # 99 % of them, were batches independent
    assert all(high - low < 0.2 for low, high in (each.interval(CERTAIN) for each in found))


@pytest.mark.parametrize("rate", [0.5, 0.7, 0.85])
def test_a_queue_that_keeps_up_is_never_said_to_grow(rate: float) -> None:
    found = [judge(queue(rate, 6000, seed), None).keeps_up for seed in range(40)]
    assert False not in found
    assert found.count(True) >= 36


@pytest.mark.parametrize("rate", [1.1, 1.3, 3.0])
def test_a_queue_that_does_not_keep_up_is_said_to_grow_by_what_is_too_much(rate: float) -> None:
    for seed in range(20):
        state = queue(rate, 8000, seed)
        assert state.first <= 4000
        assert judge(state, None).keeps_up is False
        low, high = state.growth.interval(CERTAIN)
        assert low <= 1 - 1 / rate <= high


def test_a_heavier_part_of_a_trace_ends_no_run_as_growing() -> None:
    def heavier(number: int) -> float:
        return 2.6 if 600 < number % 4000 < 1150 else 0.9

    looks = [judge(queue(0.6, count, seed, heavier), None) for seed in range(6) for count in (600, 1176, 1646, 2304)]
    growing = [found for found in looks if found.keeps_up is False]
    assert growing
    assert not any(found.is_settled for found in growing)


def test_nothing_is_told_of_a_cluster_that_still_fills() -> None:
    arrived_s = [0.1 * i for i in range(300)]
    ended_s = [at_s + 20.0 if at_s < 9 else float("inf") for at_s in arrived_s]
    for verdicts in ([None] * 300, [True] * 300):
        state = steady(arrived_s, ended_s, verdicts, 29.9)
        assert state.first == 300
        assert state.attainment.interval(CERTAIN) == (0.0, 1.0)
        assert judge(state, 0.9) == Found(None, None, is_narrow=False, is_plain=False)


def test_few_requests_that_all_met_their_objectives_do_not_settle_a_high_attainment() -> None:
    arrived_s = [float(i) for i in range(300)]
    state = steady(arrived_s, [at_s + 0.1 for at_s in arrived_s], [True] * 300, 299.5)
    assert judge(state, 0.9).meets is True
    assert judge(state, 0.99).meets is None


def test_requests_after_one_that_is_not_over_do_not_count_yet() -> None:
    arrived_s = [float(i) for i in range(300)]
    verdicts = [True] * 200 + [None] + [False] * 99
    state = steady(arrived_s, [at_s + 0.1 for at_s in arrived_s], verdicts, 299.5)
    assert state.last == 200
    assert state.attainment.mean == 1.0


def test_the_warm_up_ends_where_the_series_levels_off() -> None:
    rising, level = [float(i) for i in range(20)], [20.0 + (i % 3) for i in range(80)]
    assert 18 <= least_error_cut(rising + level) <= 22
    assert least_error_cut(level) <= 2
    assert least_error_cut(rising) == 10  # at most half
