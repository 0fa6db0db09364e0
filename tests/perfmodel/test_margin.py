"""A margin widens predictions as much as they have missed by lately."""

import random
from collections.abc import Callable

import pytest

from pdserve.perfmodel.margin import Margin


@pytest.mark.parametrize("spread", [lambda rng: rng.uniform(0.8, 1.6), lambda rng: rng.expovariate(1.0)])
def test_a_margin_is_exceeded_as_seldom_as_wanted(spread: Callable[[random.Random], float]) -> None:
    rng, margin = random.Random(0), Margin()
    for _ in range(3000):
        margin.observe(1.0, spread(rng))
    exceeded = 0
    for _ in range(3000):
        seen = spread(rng)
        exceeded += seen > margin.factor
        margin.observe(1.0, seen)
    assert 0.05 < exceeded / 3000 < 0.15


def test_what_was_wrong_while_little_was_known_is_soon_forgotten() -> None:
    margin = Margin()
    for _ in range(200):
        margin.observe(1.0, 4.0)
    assert margin.factor == 3.0
    for _ in range(150):
        margin.observe(1.0, 1.0)
    assert margin.factor == 1.0
