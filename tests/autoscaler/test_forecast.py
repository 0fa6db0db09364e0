"""Forecasts follow what they see, and as much comes out below their upper quantile as they say."""

import math
from collections.abc import Callable
from random import Random

import pytest

from pdserve.autoscaler.forecast import new_forecaster
from pdserve.autoscaler.schema import ForecasterKind

KINDS: tuple[ForecasterKind, ...] = ("last", "kalman", "holt-winters")
SEASON, NONE_YET = 24, 1000  # intervals of a season; with so many, level and trend are all that is known


def constant(rng: Random, _: int) -> float:
    return rng.gauss(100, 10)


def ramp(rng: Random, place: int) -> float:
    return 50 + place + rng.gauss(0, 5)


def season(rng: Random, place: int) -> float:
    return 100 + 60 * math.sin(2 * math.pi * place / SEASON) + rng.gauss(0, 5)


def judged(
    kind: ForecasterKind, rates: Callable[[Random, int], float], ahead: int, period: int = NONE_YET
) -> tuple[float, float, float]:
    """Return the share below the upper quantile, the mean error, and how far the quantile is above, on average."""
    rng = Random(7)
    values = [rates(rng, place) for place in range(240)]
    forecaster = new_forecaster(kind, 0.9, period)
    below, errors, above = [], [], []
    for place, value in enumerate(values[: len(values) - ahead]):
        forecaster.observe(value)
        if place >= 72:
            found, true = forecaster.forecast(ahead), values[place + ahead]
            below.append(true <= found.upper)
            errors.append(abs(true - found.mean))
            above.append(found.upper - found.mean)
    return sum(below) / len(below), sum(errors) / len(errors), sum(above) / len(above)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rates", [constant, ramp])
def test_nine_in_ten_come_out_below_the_upper_quantile(
    kind: ForecasterKind, rates: Callable[[Random, int], float]
) -> None:
    below, _, above = judged(kind, rates, 3)
    assert below > 0.85
    assert above < 35


@pytest.mark.parametrize(("kind", "error"), [("last", 8.0), ("kalman", 5.5), ("holt-winters", 6.0)])
def test_a_trend_is_followed(kind: ForecasterKind, error: float) -> None:
    assert judged(kind, ramp, 3)[1] < error


def test_a_season_is_known_beforehand() -> None:
    half = SEASON // 2
    _, known, _ = judged("holt-winters", season, half, SEASON)
    _, unknown, _ = judged("holt-winters", season, half)
    assert known < 8
    assert unknown > 5 * known


@pytest.mark.parametrize("kind", KINDS)
def test_a_jump_is_soon_believed_and_its_error_forgotten(kind: ForecasterKind) -> None:
    forecaster = new_forecaster(kind, 0.9, NONE_YET)
    for rate in [40.0] * 20 + [5.0] * 20:
        forecaster.observe(rate)
    found = forecaster.forecast(2)
    assert found.mean == pytest.approx(5, abs=1)
    assert found.upper < 20


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_forecast_below_zero(kind: ForecasterKind) -> None:
    forecaster = new_forecaster(kind, 0.9, NONE_YET)
    for rate in (100.0, 80.0, 60.0, 40.0, 20.0, 0.0):
        forecaster.observe(rate)
    found = forecaster.forecast(10)
    assert 0 <= found.mean <= found.upper


@pytest.mark.parametrize("kind", KINDS)
def test_before_anything_was_seen_nothing_is_forecast(kind: ForecasterKind) -> None:
    assert new_forecaster(kind, 0.9, NONE_YET).forecast(1).mean == 0
