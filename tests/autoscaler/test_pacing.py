"""A pool changes no faster, no sooner and no more often than its policy allows."""

from typing import Any

import pytest

from pdserve.autoscaler.pacing import Pacing, Wanted
from pdserve.autoscaler.pools import Behavior


def pacing(begun_s: float = -1000.0, **rules: Any) -> Pacing:  # noqa: ANN401 - whatever a behavior has
    return Pacing(Behavior.model_validate(rules), begun_s)


def exactly(size: int) -> Wanted:
    return Wanted(size, size, size)


def test_a_pool_shrinks_to_the_greatest_size_of_the_window() -> None:
    pool = pacing(scale_down={"stabilization_window_seconds": 60.0})
    for at_s, size in ((0.0, 6), (50.0, 2), (55.0, 3)):
        pool.want(exactly(size), at_s)
    assert pool.shrunk(8, 56.0)[0] == 6
    assert pool.shrunk(8, 61.0)[0] == 3
    assert "6 were wanted" in pool.shrunk(6, 56.0)[1]


def test_a_pool_grows_to_the_least_size_of_the_window() -> None:
    pool = pacing(scale_up={"stabilization_window_seconds": 60.0})
    for at_s, size in ((0.0, 2), (50.0, 5), (55.0, 4)):
        pool.want(exactly(size), at_s)
    assert pool.grown(1, 56.0)[0] == 2
    assert pool.grown(1, 61.0)[0] == 4


def test_a_pool_does_not_shrink_before_its_demand_was_watched_for_a_window() -> None:
    pool = pacing(begun_s=0.0)
    pool.want(exactly(1), 299.0)
    assert pool.shrunk(4, 299.0)[0] == 4
    assert pool.shrunk(4, 300.0)[0] == 1


@pytest.mark.parametrize(("select", "allowed"), [("Max", 6), ("Min", 3), ("Disabled", 2)])
def test_growth_in_a_period_is_as_its_policies_allow(select: str, allowed: int) -> None:
    policies = [
        {"type": "Pods", "value": 4, "period_seconds": 15.0},
        {"type": "Percent", "value": 50, "period_seconds": 15.0},
    ]
    pool = pacing(scale_up={"select_policy": select, "policies": policies})
    pool.want(exactly(20), 0.0)
    assert pool.grown(2, 0.0)[0] == allowed


@pytest.mark.parametrize(("select", "allowed"), [("Max", 4), ("Min", 7), ("Disabled", 8)])
def test_shrinking_in_a_period_is_as_its_policies_allow(select: str, allowed: int) -> None:
    policies = [
        {"type": "Pods", "value": 1, "period_seconds": 60.0},
        {"type": "Percent", "value": 50, "period_seconds": 60.0},
    ]
    pool = pacing(scale_down={"select_policy": select, "policies": policies})
    pool.want(exactly(1), 0.0)
    assert pool.shrunk(8, 0.0)[0] == allowed


def test_what_was_added_in_a_period_counts_against_it() -> None:
    pool = pacing(scale_up={"policies": [{"type": "Pods", "value": 2, "period_seconds": 60.0}]})
    pool.want(exactly(20), 0.0)
    for size in (2, 3):
        assert pool.grown(size, 0.0)[0] == 4
        pool.changed(+1, size + 1, 0.0, 0.0)
    assert pool.grown(4, 30.0)[0] == 4
    assert "scaleUp allows 4" in pool.grown(4, 30.0)[1]
    assert pool.grown(4, 60.0)[0] == 6


def test_an_order_that_came_to_nothing_counts_for_nothing() -> None:
    pool = pacing(scale_up={"policies": [{"type": "Pods", "value": 2, "period_seconds": 60.0}]})
    pool.want(exactly(20), 0.0)
    pool.changed(+1, 3, 90.0, 0.0)
    pool.unchanged(+1)
    assert pool.grown(2, 1.0)[0] == 4
    pool.want(exactly(1), 301.0)
    assert pool.shrunk(3, 301.0)[0] == 1


def test_a_change_is_undone_only_after_a_while() -> None:
    pool = pacing(scale_down={"stabilization_window_seconds": 0.0})
    pool.changed(+1, 4, 90.0, 0.0)
    pool.want(exactly(1), 10.0)
    assert pool.shrunk(4, 89.0)[0] == 4
    assert "no less than 4" in pool.shrunk(4, 89.0)[1]
    assert pool.shrunk(4, 90.0)[0] == 1
    pool.changed(-1, 3, 60.0, 100.0)
    pool.want(exactly(8), 110.0)
    assert pool.grown(3, 110.0) == (3, "a replica was taken away a moment ago, no more than 3 until it has dwelled")
    assert pool.grown(2, 110.0)[0] == 3  # one that died meanwhile comes back
    assert pool.grown(3, 160.0)[0] == 7  # as the rate allows


def test_a_drain_taken_back_at_once_doubles_the_wait_for_the_next_and_one_that_stands_halves_it() -> None:
    pool = pacing(scale_down={"stabilization_window_seconds": 60.0})
    pool.want(exactly(2), 0.0)
    pool.changed(-1, 2, 20.0, 0.0)
    pool.changed(+1, 3, 0.0, 30.0)
    pool.want(exactly(3), 40.0)
    pool.want(exactly(2), 50.0)
    assert pool.shrunk(3, 159.0)[0] == 3  # for twice the window after three were wanted
    assert pool.shrunk(3, 161.0)[0] == 2
    pool.changed(-1, 2, 20.0, 161.0)
    pool.changed(-1, 1, 20.0, 600.0)
    pool.want(exactly(1), 610.0)
    pool.want(exactly(0), 620.0)
    assert pool.shrunk(1, 671.0)[0] == 0
