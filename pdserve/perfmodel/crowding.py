"""How much steps slow down while other workers of the same machine compute. Pure.

A regression of log(observed / predicted) on the number of others that computed meanwhile, forgetting old steps. What
does not depend on that number is left to the curve that predicts.
"""

from math import exp, log

_FORGETTING = 0.995
_MOST = log(4.0)  # for one other worker
_DOUBT = 0.01  # variance added: where the number hardly changes, it tells nothing


class Crowding:
    """The slowdown by each other worker, learnt from steps."""

    def __init__(self) -> None:
        self.log_slowdown = 0.0  # for one other worker
        self._weight = self._x = self._y = self._xx = self._xy = 0.0  # fading sums

    def observe(self, crowd: float, ratio: float) -> None:
        """Take in a step that took `ratio` of what is predicted for a worker alone, while `crowd` others computed."""
        y = min(2.0, max(-2.0, log(ratio)))
        keep = _FORGETTING
        self._weight = keep * self._weight + 1
        self._x = keep * self._x + crowd
        self._y = keep * self._y + y
        self._xx = keep * self._xx + crowd * crowd
        self._xy = keep * self._xy + crowd * y
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        covariance = self._xy / self._weight - mean_x * mean_y
        variance = self._xx / self._weight - mean_x * mean_x
        self.log_slowdown = min(_MOST, max(0.0, covariance / (variance + _DOUBT)))

    def during(self, crowd: float) -> float:
        """Return the factor for a step during which so many others compute."""
        return exp(self.log_slowdown * crowd)

    def expected(self, crowd: float) -> float:
        """Return the mean factor of many steps, if others compute for a share of the time that adds up to `crowd`."""
        return 1 + crowd * (exp(self.log_slowdown) - 1) if crowd else 1.0
