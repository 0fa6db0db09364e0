"""How much predictions have to be widened so that few come out worse. Pure.

A running quantile of observed over predicted (Robbins-Monro): it steps up when a prediction was exceeded, and down by
so much less when it was not that it rests where the wanted share is exceeded.
"""

from math import exp

_STEP = 0.03
_LOW, _HIGH = 0.8, 3.0
_BIAS_STEP = 0.01  # errors of requests that come together are alike: what is learnt of few is little
_MOST_BIASED = 2.0


class Margin:
    """A factor for predictions of one kind."""

    def __init__(self, exceeded_share: float = 0.05) -> None:
        self.factor = 1.0
        self.num_observed = 0
        self.relative_error = 0.0  # running mean of |predicted - observed| / observed
        self._exceeded_share = exceeded_share

    def observe(self, predicted_s: float, observed_s: float) -> None:
        """Take in how a prediction came out."""
        if predicted_s <= 0 or observed_s <= 0:
            return
        self.num_observed += 1
        error = min(1.0, abs(predicted_s - observed_s) / observed_s)
        self.relative_error += max(0.02, 1 / self.num_observed) * (error - self.relative_error)
        exceeded = observed_s > predicted_s * self.factor
        self.factor = min(_HIGH, max(_LOW, self.factor * exp(_STEP * (exceeded - self._exceeded_share))))


class Bias:
    """A factor that makes predictions of one kind too high as often as too low: a running median, as above.

    It is told of predictions without it. Those of now come out much later: a factor that was corrected by how it did
    would go too far, and back, before it hears of it.
    """

    def __init__(self) -> None:
        self.factor = 1.0

    def observe(self, predicted_s: float, observed_s: float) -> None:
        """Take in how a prediction came out."""
        if predicted_s > 0 and observed_s > 0:
            step = _BIAS_STEP if observed_s > predicted_s * self.factor else -_BIAS_STEP
            self.factor = min(_MOST_BIASED, max(1 / _MOST_BIASED, self.factor * exp(step)))
