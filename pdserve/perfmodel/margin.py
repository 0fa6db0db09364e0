"""How far predictions are widened, by how they have come out lately. Pure."""

from bisect import bisect_left, insort
from collections import deque

from pdserve.perfmodel.model import MEMORY

_QUANTILE = 0.9
_MOST = 3.0  # after a machine stood still: with a wider margin little is admitted, and the margin learns slowly


class Margin:
    """A factor for predictions of one kind: a quantile of observed over predicted, of the last ones.

    It starts as if all of them had been right, and what was wrong while the model knew little is soon forgotten.
    """

    def __init__(self) -> None:
        self.factor = 1.0
        self.num_observed = 0
        self._latest = deque([1.0] * MEMORY)
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
        self.factor = min(_MOST, self._sorted[round(_QUANTILE * MEMORY) - 1])


class MarginBySize:
    """A margin for each doubling of the batch that an answer joins: 0, 1, 2 and 3, 4 to 7, ...

    Prompts that end together make large batches hard to predict. What they show must not widen the predictions of
    small batches: a slow cluster would refuse a second sequence for minutes after a burst.
    """

    def __init__(self) -> None:
        self._margins: dict[int, Margin] = {}

    def factor(self, num_beside: int) -> float:
        """Return the margin of an answer that joins so many sequences: 1 where none has yet."""
        margin = self._margins.get(num_beside.bit_length())
        return 1.0 if margin is None else margin.factor

    def observe(self, num_beside: int, predicted_s: float, observed_s: float) -> None:
        """Take in how a prediction for an answer that joined so many sequences came out."""
        self._margins.setdefault(num_beside.bit_length(), Margin()).observe(predicted_s, observed_s)
