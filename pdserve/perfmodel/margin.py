"""How much predictions have to be widened so that few come out worse, and whether they are off to one side. Pure."""

from bisect import bisect_left, insort
from collections import deque
from math import exp

_WINDOW = 100  # predictions that are remembered
_STEP = 1.03  # of the factor, at most, for each prediction
_LOW, _HIGH = 0.8, 3.0
_MOST_BIASED = 2.0


class Margin:
    """A factor for predictions of one kind: a quantile of observed over predicted, of the last ones.

    It starts as if all of them had been right, and what was wrong while the model knew little is soon forgotten.
    """

    def __init__(self, exceeded_share: float = 0.1) -> None:
        self.factor = 1.0
        self.num_observed = 0
        self.relative_error = 0.0  # running mean of |predicted - observed| / observed
        self._latest = deque([1.0] * _WINDOW)
        self._sorted = list(self._latest)
        self._place = round((1 - exceeded_share) * _WINDOW) - 1  # of the quantile

    def observe(self, predicted_s: float, observed_s: float) -> None:
        """Take in how a prediction came out."""
        if predicted_s <= 0 or observed_s <= 0:
            return
        self.num_observed += 1
        error = min(1.0, abs(predicted_s - observed_s) / observed_s)
        self.relative_error += max(0.02, 1 / self.num_observed) * (error - self.relative_error)
        ratio = observed_s / predicted_s
        del self._sorted[bisect_left(self._sorted, self._latest.popleft())]
        self._latest.append(ratio)
        insort(self._sorted, ratio)
        quantile = min(_HIGH, max(_LOW, self._sorted[self._place]))
        self.factor = min(self.factor * _STEP, max(self.factor / _STEP, quantile))


class Bias:
    """A factor that makes predictions of one kind too high as often as too low: a running median (Robbins-Monro).

    It is told of predictions without it. Those of now come out much later: a factor that was corrected by how it did
    would go too far, and back, before it hears of it.
    """

    def __init__(self, step: float = 0.01) -> None:
        """`step`: by how much of itself one prediction changes the factor. What is learnt of few should be little."""
        self.factor = 1.0
        self._step = step

    def observe(self, predicted_s: float, observed_s: float) -> None:
        """Take in how a prediction came out."""
        if predicted_s > 0 and observed_s > 0:
            step = self._step if observed_s > predicted_s * self.factor else -self._step
            self.factor = min(_MOST_BIASED, max(1 / _MOST_BIASED, self.factor * exp(step)))
