"""How much predictions have to be widened so that few come out worse. Pure."""

from bisect import bisect_left, insort
from collections import deque

_WINDOW = 100  # predictions that are remembered
_QUANTILE = 0.9
_MOST = 3.0  # with a larger margin nothing would be admitted, and nothing learnt


class Margin:
    """A factor for predictions of one kind: a quantile of observed over predicted, of the last ones.

    It starts as if all of them had been right, and what was wrong while the model knew little is soon forgotten.
    """

    def __init__(self) -> None:
        self.factor = 1.0
        self.num_observed = 0
        self._latest = deque([1.0] * _WINDOW)
        self._sorted = list(self._latest)

    def observe(self, predicted_s: float, observed_s: float) -> None:
        """Take in how a prediction came out."""
        if predicted_s <= 0 or observed_s <= 0:
            return
        self.num_observed += 1
        ratio = observed_s / predicted_s
        del self._sorted[bisect_left(self._sorted, self._latest.popleft())]
        self._latest.append(ratio)
        insort(self._sorted, ratio)
        self.factor = min(_MOST, self._sorted[round(_QUANTILE * _WINDOW) - 1])
