"""Performance of workers of one kind, learnt from their step reports. Pure.

Used by the router for each prediction, and by whoever plans capacity.
"""

from math import ceil

from pdserve.perfmodel.batches import BatchFits
from pdserve.perfmodel.crowding import Crowding
from pdserve.perfmodel.curve import Curve, Step, StepCosts, attention_work
from pdserve.perfmodel.fit import Fit

ENOUGH_STEPS = 32  # observed before predictions are worth refusing requests for
_ENOUGH_GOOD_STEPS = 8  # the same, where predictions have been right from the start
_GOOD_ERROR = 0.2
STALE_S = 10.0  # without a step, a model may be wrong about the present: nothing is refused on its word

MAX_BEGUN = 1 << 16  # pairs that only a worker's word is known of

_PROMPTS = (64, 512, 4096)

# For a pool that nothing is known of: a mid-size model on one accelerator. Only the first seconds depend on it.
UNKNOWN = StepCosts(Curve(0.01, 5e-5, 1e-9), ())
_UNKNOWN_DECODE = Curve(0.01, 1e-4, 1e-7)


class LearntCosts:
    """Step times of workers that are alike."""

    def __init__(self, start: StepCosts | None = None) -> None:
        first = (start or UNKNOWN).prefill
        self._prefill = Fit(first, tuple((float(n), float(attention_work(n, 0))) for n in _PROMPTS))
        self._decode = BatchFits(start, _UNKNOWN_DECODE)
        self._prefill_crowding, self._decode_crowding = Crowding(), Crowding()
        self._num_mixed = 0
        self._observed_s = float("-inf")

    @property
    def prefill(self) -> Curve:
        return self._prefill.curve

    @property
    def decode(self) -> Curve:
        """Return what holds for the size of batch seen last."""
        return self._decode.latest.curve

    @property
    def decode_batches(self) -> list[tuple[int, Fit]]:
        """Return what was learnt of each size of batch: the largest one it holds for, and the fit."""
        return self._decode.seen()

    @property
    def num_prefill_steps(self) -> int:
        return self._prefill.num_observed

    @property
    def num_decode_steps(self) -> int:
        return self._decode.num_observed

    @property
    def prefill_error(self) -> float:
        return self._prefill.relative_error

    @property
    def decode_error(self) -> float:
        return self._decode.latest.relative_error

    def observe(self, step: Step, elapsed_s: float, now_s: float, crowd: float | None = None) -> None:
        """Take in one step, during which so many neighbours computed; None: nobody knows.

        Of a step that does both, the prefill's part is what decoding does not explain.
        """
        self._observed_s = now_s
        if not step.prefill_tokens:
            if crowd is not None:
                predicted_s = self.decode_s(step.sequences, step.kv_tokens)
                elapsed_s = _alone_s(self._decode_crowding, predicted_s, elapsed_s, crowd)
            self._decode.observe(step.sequences, step.kv_tokens, elapsed_s)
            return
        if step.sequences:
            self._num_mixed += 1
            decode = self._decode.curve(step.sequences)
            shared_s = decode.marginal_s(step.sequences, step.kv_tokens) + max(0.0, decode.step_s - self.prefill.step_s)
            if shared_s > 0.5 * elapsed_s:
                return  # too little of it is the prefill's
            elapsed_s -= shared_s
        if crowd is not None:
            predicted_s = self._prefill.curve.seconds(step.prefill_tokens, step.prefill_work)
            elapsed_s = _alone_s(self._prefill_crowding, predicted_s, elapsed_s, crowd)
        self._prefill.observe(step.prefill_tokens, step.prefill_work, elapsed_s)

    def knows_prefill(self, now_s: float) -> bool:
        """Return whether requests may be refused on these predictions."""
        return now_s - self._observed_s < STALE_S and _is_enough(self.prefill_error, self.num_prefill_steps)

    def knows_decode(self, now_s: float) -> bool:
        """Return the same of decode steps. Those that also prefill tell of them too."""
        num_steps = self._decode.num_observed + self._num_mixed
        return now_s - self._observed_s < STALE_S and _is_enough(self.decode_error, num_steps)

    def prefill_slowdown(self, crowd: float) -> float:
        """Return the factor by which prompts take longer while neighbours compute."""
        return self._prefill_crowding.expected(crowd)

    def decode_slowdown(self, crowd: float) -> float:
        """Return the same for decode steps."""
        return self._decode_crowding.expected(crowd)

    def prefill_s(self, num_tokens: float, work: float, budget: int) -> float:
        """Return how long prompts take together, `budget` tokens to a step."""
        if num_tokens <= 0:
            return 0.0
        curve = self._prefill.curve
        return curve.step_s * ceil(num_tokens / budget) + curve.marginal_s(num_tokens, work)

    def decode_s(self, sequences: float, kv_tokens: float) -> float:
        """Return how long a decode step takes, or steps take on average whose batches have that mean."""
        whole = int(sequences)
        below = self._decode.curve(whole)
        if sequences == whole or whole & (whole + 1):  # one more is of the same order of magnitude: one line for both
            return below.seconds(sequences, kv_tokens)
        part, kv_each = sequences - whole, kv_tokens / max(1.0, sequences)
        below_s = below.seconds(whole, whole * kv_each)
        above_s = self._decode.curve(whole + 1).seconds(whole + 1, (whole + 1) * kv_each)
        return below_s + part * (above_s - below_s)


def _alone_s(crowding: Crowding, predicted_s: float, elapsed_s: float, crowd: float) -> float:
    """Return what a step would have taken alone; the slowdown learns from what it took beyond the prediction."""
    if predicted_s > 0 and elapsed_s > 0:
        crowding.observe(crowd, elapsed_s / predicted_s)
    return elapsed_s / crowding.during(crowd)


def _is_enough(error: float, num_steps: int) -> bool:
    is_good = num_steps >= _ENOUGH_GOOD_STEPS and error < _GOOD_ERROR
    return num_steps >= ENOUGH_STEPS or is_good


class LearntLinks:
    """Bandwidth between pairs of workers, from the hand-offs they report."""

    def __init__(self, start_bytes_per_s: float = 5e9, latency_s: float = 0.001) -> None:
        self._start = start_bytes_per_s
        self.latency_s = latency_s
        self._measured: dict[tuple[str, str], float] = {}  # by names of prefill and decode worker

    def begin(self, pair: tuple[str, str], bytes_per_s: float) -> None:
        """Start from what the pair itself measured. What hand-offs have shown already counts for more."""
        if len(self._measured) < MAX_BEGUN:
            self._measured.setdefault(pair, bytes_per_s)

    def observe(self, pair: tuple[str, str], num_bytes: int, seconds: float) -> None:
        """Take in one hand-off. Small ones tell of latency alone."""
        if num_bytes < 1 << 16 or seconds <= 0:
            return
        rate = num_bytes / seconds
        before = self._measured.get(pair)
        self._measured[pair] = rate if before is None else before + 0.1 * (rate - before)

    def bytes_per_s(self, pair: tuple[str, str]) -> float:
        return self._measured.get(pair, self._start)

    def forget(self, worker: str) -> None:
        """Drop what concerns a worker that has left."""
        self._measured = {pair: rate for pair, rate in self._measured.items() if worker not in pair}
