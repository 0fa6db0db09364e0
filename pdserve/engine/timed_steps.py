"""What steps of one model cost, learnt from steps in service. Pure."""

from pdserve.perfmodel.curve import Step
from pdserve.perfmodel.model import LearntCosts

_OUTLIER = 3.0  # a step counts as at most this multiple of its prediction


class TimedSteps:
    """Learns from steps. The first of a size is left out: programs are recorded, and memory is taken."""

    def __init__(self) -> None:
        self.costs = LearntCosts()
        self._seen: set[int] = set()  # sizes of steps, by powers of two

    def learn(self, step: Step, elapsed_s: float) -> None:
        """Take in a step in service."""
        size = step.sequences.bit_length()
        if step.prefill_tokens or size in self._seen:
            self.costs.observe(step, min(elapsed_s, _OUTLIER * self.costs.seconds(step)), 0.0)
        self._seen.add(size)
