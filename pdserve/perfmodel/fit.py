"""Fits a curve to steps as they are observed, forgetting old ones. Pure.

Least squares over relative errors, in the form of normal equations, under the condition that no coefficient is
negative.
"""

from itertools import combinations
from math import exp, log

import numpy as np
import numpy.typing as npt

from pdserve.perfmodel.curve import Curve

ENOUGH_STEPS = 32  # observed, after which a curve is trusted
_FORGETTING = 0.99  # weight of a step, for each one after it
_SOLVE_EVERY = 64  # steps, once enough were seen: solving takes longer than all else that a step brings
_OUTLIER = 5.0  # a step counts as at most this multiple of its prediction
_PULL = 1e-4  # ridge weight towards the present curve, for coefficients that recent steps do not separate

Point = tuple[float, float]  # each, context
_Array = npt.NDArray[np.float64]
_Row = tuple[float, float, float, float]  # 1, each, context and seconds of a step, by its weight


def _row(point: Point, seconds: float, scale_s: float) -> _Row:
    """Return a step's row of the equations; errors are taken relative to `scale_s`."""
    return 1.0 / scale_s, point[0] / scale_s, point[1] / scale_s, seconds / scale_s


class Fit:
    """A curve that follows the mean of what is observed."""

    def __init__(self, start: Curve, points: tuple[Point, ...]) -> None:
        """Begin with a prior curve that weighs as much as one step at each of the points, and less with every step.

        Only the prior's shape counts: it may be of another device, which is slower or faster by any factor.
        """
        self.curve = start
        self.relative_error = 0.0  # running mean of |predicted - observed| / observed
        self.num_observed = 0
        self._products = np.zeros((4, 4))  # of the columns of all rows, older ones faded
        self._unsolved: list[_Row] = []  # since the curve was last moved
        self._start, self._points = start, points
        self._log_slower = 0.0  # mean log(observed / start)

    def observe(self, each: float, context: float, seconds: float) -> None:
        if seconds <= 0:
            return
        predicted_s = self.curve.seconds(each, context)
        self.num_observed += 1
        error = min(1.0, abs(predicted_s - seconds) / seconds)
        self.relative_error += (error - self.relative_error) / min(self.num_observed, ENOUGH_STEPS)
        if self.num_observed <= ENOUGH_STEPS or predicted_s <= 0:
            scale_s = seconds
            start_s = self._start.seconds(each, context)
            if start_s > 0:
                self._log_slower += (log(seconds / start_s) - self._log_slower) / self.num_observed
        else:
            seconds = min(seconds, _OUTLIER * predicted_s)
            scale_s = predicted_s  # so that the curve predicts the mean: relative to `seconds`, long steps weigh less
        self._unsolved.append(_row((each, context), seconds, scale_s))
        if self.num_observed <= ENOUGH_STEPS or len(self._unsolved) >= _SOLVE_EVERY:
            self._solve()

    def _solve(self) -> None:
        """Move the curve to the best one without negative coefficients."""
        rows = np.array(self._unsolved)
        kept = _FORGETTING ** np.arange(len(rows) - 1, -1, -1)
        self._products = _FORGETTING ** len(rows) * self._products + (rows * kept[:, None]).T @ rows
        self._unsolved = []
        known = self._products
        if self.num_observed <= ENOUGH_STEPS:
            known = known + self._products_of_start()
        scale = np.sqrt(np.diagonal(known)[:3])
        scale[scale == 0] = 1.0
        now = np.array([self.curve.step_s, self.curve.each_s, self.curve.context_s]) * scale
        products = known[:3, :3] / np.outer(scale, scale) + _PULL * np.eye(3)
        found = nonnegative_minimum(products, known[:3, 3] / scale + _PULL * now)
        if found.any():
            self.curve = Curve(*(found / scale).tolist())

    def _products_of_start(self) -> _Array:
        """Return the prior's products, scaled to the speed of the observed steps; each of them lowers their weight."""
        slower = exp(self._log_slower)
        seconds = [slower * self._start.seconds(*point) for point in self._points]
        rows = np.array([_row(point, s, s) for point, s in zip(self._points, seconds, strict=True)])
        return np.asarray(rows.T @ rows / self.num_observed**2)


def nonnegative_minimum(products: _Array, sums: _Array) -> _Array:
    """Return the x >= 0 that minimizes x P x / 2 - s x, for few unknowns. P: [n, n], positive definite; s: [n].

    The minimum without the condition, over the right choice of coefficients that are not 0, is the one with it.
    """
    best, most = np.zeros(len(sums)), 0.0
    for size in range(len(sums), 0, -1):
        for chosen in combinations(range(len(sums)), size):
            x = np.linalg.solve(products[np.ix_(chosen, chosen)], sums[list(chosen)])
            gain = float(sums[list(chosen)] @ x)  # twice what the objective lies below that of x = 0
            if (x >= 0).all() and gain > most:
                best, most = np.zeros(len(sums)), gain
                best[list(chosen)] = x
                if size == len(sums):
                    return best
    return best
