"""Fits a curve to steps as they are observed, forgetting old ones. Pure.

Recursive least squares in the form of its normal equations, over relative errors (each step weighs the same,
however long it takes), solved under the condition that no coefficient is negative: with three of them, by trying each
set of those that are not zero.
"""

from itertools import combinations
from math import exp, log

from pdserve.perfmodel.curve import Curve

_SUBSETS = tuple(subset for size in (3, 2, 1) for subset in combinations(range(3), size))
_ANCHOR = 1e-4  # pull towards the present curve, where the steps seen lately do not tell coefficients apart
_START_WEIGHT = 4.0  # of the start at each of its points, in steps
_START_FORGETTING = 0.75
_ERROR_WEIGHT = 0.05  # of the latest step in the running mean of relative errors
_KNOWN = 32  # steps seen, after which the curve says what is normal
_OUTLIER_WEIGHT = 0.05  # a step counts as so long at most that it moves what is learnt by about this share

Point = tuple[float, float]  # each, context
_DIAGONAL = (0, 3, 5)  # of a symmetric matrix kept as its upper half: 00 01 02 11 12 22


class _Equations:
    """Normal equations of steps, over relative errors."""

    def __init__(self) -> None:
        self.products = [0.0] * 6  # the upper half of a symmetric matrix
        self.sums = [0.0] * 3

    def decay(self, keep: float) -> None:
        self.products = [keep * value for value in self.products]
        self.sums = [keep * value for value in self.sums]

    def add(self, point: Point, seconds: float, scale_s: float, weight: float = 1.0, keep: float = 1.0) -> None:
        """Add a step to a share of what is there; errors are taken relative to `scale_s`."""
        x, y, z = 1.0 / scale_s, point[0] / scale_s, point[1] / scale_s
        left_x, left_y, left_z = weight * x, weight * y, weight * z
        xx, xy, xz, yy, yz, zz = self.products
        self.products = [
            keep * xx + left_x * x,
            keep * xy + left_x * y,
            keep * xz + left_x * z,
            keep * yy + left_y * y,
            keep * yz + left_y * z,
            keep * zz + left_z * z,
        ]
        of_x, of_y, of_z = self.sums
        self.sums = [
            keep * of_x + left_x * seconds / scale_s,
            keep * of_y + left_y * seconds / scale_s,
            keep * of_z + left_z * seconds / scale_s,
        ]

    def plus(self, other: "_Equations") -> "_Equations":
        both = _Equations()
        both.products = [a + b for a, b in zip(self.products, other.products, strict=True)]
        both.sums = [a + b for a, b in zip(self.sums, other.sums, strict=True)]
        return both

    def slower(self, factor: float) -> "_Equations":
        """Return these of steps that take `factor` times as long."""
        other = _Equations()
        other.products = [value / factor**2 for value in self.products]
        other.sums = [value / factor for value in self.sums]
        return other


class Fit:
    """A curve that follows what is observed."""

    def __init__(
        self, start: Curve, points: tuple[Point, ...], forgetting: float = 0.99, *, adds_up: bool = False
    ) -> None:
        """Begin with a curve, believed as much as a few steps at each of the points, and soon not at all.

        What is believed of it is its shape: that of another device may be right in that, and slower by any factor.

        With `adds_up`, it predicts the mean, hiccups included: what many steps take together. Else it predicts what
        is usual: a step weighs the less, the longer it took.
        """
        self.curve = start
        self.relative_error = 0.0  # running mean of |predicted - observed| / observed
        self.num_observed = 0
        self._forgetting = forgetting
        self._adds_up = adds_up
        self._outlier = _OUTLIER_WEIGHT / (1 - forgetting)
        self._seen, self._start = _Equations(), _Equations()
        self._start_curve, self._log_slower = start, 0.0  # by how much the steps seen are slower than the start
        self._num_unsolved = 0
        for each, context in points:
            seconds = start.seconds(each, context)
            self._start.add((each, context), seconds, seconds, weight=_START_WEIGHT)

    def observe(self, each: float, context: float, seconds: float) -> None:
        """Take in one step."""
        if seconds <= 0:
            return
        predicted_s = self.curve.seconds(each, context)
        error = min(1.0, abs(predicted_s - seconds) / seconds)
        weight = _ERROR_WEIGHT if self.num_observed else 1.0
        self.relative_error += weight * (error - self.relative_error)
        is_known = self.num_observed >= _KNOWN and predicted_s > 0
        if is_known:
            seconds = min(seconds, self._outlier * predicted_s)
        if self.num_observed < _KNOWN:
            self._weigh_start(each, context, seconds)
        scale_s = predicted_s if is_known and self._adds_up else seconds
        self._seen.add((each, context), seconds, scale_s, keep=self._forgetting)
        self.num_observed += 1
        self._num_unsolved += 1
        if self._num_unsolved >= (1 if self.num_observed < 64 else 16):
            self._solve()

    def _weigh_start(self, each: float, context: float, seconds: float) -> None:
        """Take the start to be as slow as the steps seen are on average, and believe it a little less."""
        start_s = self._start_curve.seconds(each, context)
        if start_s > 0:
            self._log_slower += (log(seconds / start_s) - self._log_slower) / (self.num_observed + 1)
        self._start.decay(_START_FORGETTING)

    def _solve(self) -> None:
        """Move the curve to the best one without negative coefficients."""
        self._num_unsolved = 0
        known = self._seen.plus(self._start.slower(exp(self._log_slower)))
        scale = [known.products[i] ** 0.5 or 1.0 for i in _DIAGONAL]
        now = (self.curve.step_s, self.curve.each_s, self.curve.context_s)
        xx, xy, xz, yy, yz, zz = known.products
        rows = ((xx, xy, xz), (xy, yy, yz), (xz, yz, zz))
        products = [[rows[i][j] / (scale[i] * scale[j]) for j in range(3)] for i in range(3)]
        sums = [known.sums[i] / scale[i] + _ANCHOR * now[i] * scale[i] for i in range(3)]
        for i in range(3):
            products[i][i] += _ANCHOR
        best, best_loss = None, 0.0  # all zero has no loss below that
        for subset in _SUBSETS:
            solved = _solve_subset(products, sums, subset)
            if solved is None or min(solved) < 0:
                continue
            loss = -sum(sums[i] * solved[i] for i in subset)
            if loss < best_loss:
                best, best_loss = solved, loss
            if len(subset) == 3:
                break  # no condition binds: no other set does better
        if best is not None:
            self.curve = Curve(best[0] / scale[0], best[1] / scale[1], best[2] / scale[2])


def _solve_subset(products: list[list[float]], sums: list[float], subset: tuple[int, ...]) -> list[float] | None:
    """Solve for these coefficients with the others zero, by elimination; None where they cannot be told apart."""
    rows = [[*(products[i][j] for j in subset), sums[i]] for i in subset]
    size = len(subset)
    for k in range(size):
        if abs(rows[k][k]) < 1e-12:
            return None
        for i in range(size):
            if i != k:
                factor = rows[i][k] / rows[k][k]
                rows[i] = [value - factor * pivot for value, pivot in zip(rows[i], rows[k], strict=True)]
    solved = [0.0] * 3
    for k, i in enumerate(subset):
        solved[i] = rows[k][size] / rows[k][k]
    return solved
