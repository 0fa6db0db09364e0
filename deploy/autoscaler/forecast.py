"""Forecasts a rate from what it was, with its mean and an upper quantile. Pure.

Forecasters with parameters run as a bank: one filter for each choice of them, all at once as arrays, and the one counts
whose one-step forecasts have been the most likely ones. A value takes well under a millisecond, so that a trace of an
hour is gone through quickly under virtual time. statsmodels would fit the same models anew each time, and bring pandas.

Errors are taken as normal, with the variance that one-step errors have had, and that of h steps as in Hyndman, Koehler,
Ord and Snyder, Forecasting with exponential smoothing, 2008, chapter 6, and Harvey, Forecasting, structural time series
models and the Kalman filter, 1989, chapter 4.
"""

from collections.abc import Sequence
from itertools import product
from math import sqrt
from statistics import NormalDist
from typing import Protocol

import numpy as np

from pdserve.autoscaler.schema import ForecasterKind
from pdserve.base.values import value

_Array = np.ndarray[tuple[int], np.dtype[np.float64]]

_KEPT = 0.95  # weight of an error, for each one after it
_OUTLIER = 3.0  # standard deviations that an error counts at most: a jump is not the noise of what follows it
_LEAST_SPREAD = 0.03  # of the level: errors below it are no measure of what an outlier is
_SPREAD = 0.15  # of the first value: what its error is taken to be while nothing else is known


@value
class Forecast:
    """What a rate will be."""

    mean: float
    upper: float  # quantile


class Forecaster(Protocol):
    """Takes a rate in each interval, and forecasts that of later ones."""

    def observe(self, rate: float) -> None:
        """Take in the rate of the next interval."""

    def forecast(self, steps: float) -> Forecast:
        """Return the rate so many intervals after the last one. None is negative."""


def new_forecaster(kind: ForecasterKind, quantile: float, season: int) -> Forecaster:
    """Return a forecaster; `season`: intervals after which demand recurs, which holt-winters needs."""
    z = NormalDist().inv_cdf(quantile)
    if kind == "last":
        return Last(z)
    return HoltWinters(z, season) if kind == "holt-winters" else Kalman(z)


def _bounded(mean: float, variance: float, z: float) -> Forecast:
    mean = max(0.0, mean)
    return Forecast(mean, mean + z * sqrt(max(0.0, variance)))


class Last:
    """The rate stays as it is: a random walk, whose variance grows with the horizon."""

    def __init__(self, z: float) -> None:
        self._z = z
        self._last: float | None = None
        self._variance = self._weight = 0.0

    def observe(self, rate: float) -> None:
        if self._last is not None:
            self._variance = self._variance * _KEPT + (rate - self._last) ** 2
            self._weight = self._weight * _KEPT + 1
        self._last = rate

    def forecast(self, steps: float) -> Forecast:
        last = self._last or 0.0
        variance = self._variance / self._weight if self._weight else (_SPREAD * last) ** 2
        return _bounded(last, variance * max(1.0, steps), self._z)


class _Likeliest:
    """Which filter of a bank has forecast best, and the variance of its errors."""

    def __init__(self, size: int) -> None:
        self._squares, self._logs, self._weight = np.zeros(size), np.zeros(size), 0.0
        self._num_observed = 0

    def observe(self, errors: _Array, variances: _Array, level: float) -> None:
        """Take in errors of one step, and their variances up to a factor that is the same for all steps."""
        least = (_LEAST_SPREAD * level) ** 2
        squares = errors**2 / variances
        if self._weight > 1:
            squares = np.minimum(squares, _OUTLIER**2 * np.maximum(self._squares / self._weight, least))
        self._squares = self._squares * _KEPT + squares
        self._num_observed += 1
        self._logs = self._logs * _KEPT + np.log(variances)
        self._weight = self._weight * _KEPT + 1

    def best(self, level: float) -> tuple[int, float]:
        """Return its place, and the factor; a guess from the level while few errors are known."""
        guess = (_SPREAD * level) ** 2
        prior = _KEPT**self._num_observed
        factors = (self._squares + prior * guess) / (self._weight + prior)
        place = int(np.argmin(self._weight * np.log(factors + 1e-12) + self._logs))
        return place, float(factors[place])


class Kalman:
    """A local linear trend: a level and a slope that wander, seen through noise.

    The bank's filters differ in how much they wander, as shares of the noise.
    """

    def __init__(self, z: float) -> None:
        self._z = z
        wander = np.array(list(product((0.0, 0.01, 0.1, 1.0, 10.0), (0.0, 1e-4, 1e-2))))
        self._of_level, self._of_slope = wander[:, 0], wander[:, 1]
        size = len(wander)
        self._level, self._slope = np.zeros(size), np.zeros(size)
        self._p_level, self._p_both, self._p_slope = np.full(size, 1e6), np.zeros(size), np.full(size, 0.01)
        self._likeliest = _Likeliest(size)
        self._num_observed = 0

    def observe(self, rate: float) -> None:
        level = self._level + self._slope
        p_level = self._p_level + 2 * self._p_both + self._p_slope + self._of_level
        p_both, p_slope = self._p_both + self._p_slope, self._p_slope + self._of_slope
        variance = p_level + 1
        error = rate - level
        if self._num_observed:
            self._likeliest.observe(error, variance, rate)
        self._num_observed += 1
        to_level, to_slope = p_level / variance, p_both / variance
        self._level, self._slope = level + to_level * error, self._slope + to_slope * error
        self._p_level, self._p_both = p_level * (1 - to_level), p_both * (1 - to_level)
        self._p_slope = p_slope - to_slope * p_both

    def forecast(self, steps: float) -> Forecast:
        place, noise = self._likeliest.best(float(self._level[0]))
        mean = self._level[place] + steps * self._slope[place]
        wander = steps * self._of_level[place] + steps**3 / 3 * self._of_slope[place]
        p = self._p_level[place] + 2 * steps * self._p_both[place] + steps**2 * self._p_slope[place]
        return _bounded(float(mean), noise * float(p + wander + 1), self._z)


class HoltWinters:
    """Level, trend and an additive season, smoothed. Until a first season is complete, level and trend alone."""

    def __init__(self, z: float, season: int) -> None:
        self._z, self._length = z, season
        smoothing = np.array(list(product((0.1, 0.3, 0.6, 0.9), (0.0, 0.05, 0.2), (0.05, 0.3))))
        self._alpha, self._beta, self._gamma = smoothing[:, 0], smoothing[:, 1], smoothing[:, 2]
        size = len(smoothing)
        self._level, self._slope = np.zeros(size), np.zeros(size)
        self._season = np.zeros((season, size))
        self._first: list[float] = []  # season
        self._likeliest = _Likeliest(size)
        self._num_observed = 0

    def observe(self, rate: float) -> None:
        if not self._num_observed:
            self._level += rate
        place = self._num_observed % self._length
        error = rate - (self._level + self._slope + self._season[place])
        if self._num_observed:
            self._likeliest.observe(error, np.ones(len(error)), rate)
        self._level = self._level + self._slope + self._alpha * error
        self._slope = self._slope + self._alpha * self._beta * error
        self._num_observed += 1
        if self._num_observed > self._length:
            self._season[place] += self._gamma * (1 - self._alpha) * error
        else:
            self._first.append(rate)
        if self._num_observed == self._length:
            self._begin_season(self._first)

    def _begin_season(self, first: Sequence[float]) -> None:
        """Take the first season for what recurs, about its mean."""
        mean = sum(first) / len(first)
        self._season[:] = (np.array(first) - mean)[:, None]
        self._level[:], self._slope[:] = mean, 0.0
        self._first = []
        self._likeliest = _Likeliest(len(self._level))

    def forecast(self, steps: float) -> Forecast:
        place, noise = self._likeliest.best(float(self._level[0]))
        ahead = max(1, round(steps))
        season = self._season[(self._num_observed + ahead - 1) % self._length][place]
        mean = self._level[place] + steps * self._slope[place] + season
        alpha, beta, gamma = (float(each[place]) for each in (self._alpha, self._beta, self._gamma))
        growth = 1.0
        for step in range(1, ahead):
            part = alpha * (1 + beta * step)
            if step % self._length == 0:
                part += gamma * (1 - alpha)
            growth += part**2
        return _bounded(float(mean), noise * growth, self._z)
