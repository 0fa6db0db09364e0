"""Performance of workers of one kind, learnt from their step reports. Pure.

The router predicts with them; the planner and the autoscaler size pools with them.
"""

from collections.abc import Sequence
from itertools import combinations
from math import ceil, exp, inf, log

import numpy as np
import numpy.typing as npt

from pdserve.perfmodel.curve import ENOUGH_STEPS, Curve, DecodePiece, Step, StepCosts, TimedStep

# So many of the latest observations count: of steps, of answers' lengths, of how predictions came out.
MEMORY = 100
# Weight of the latest that a pair of workers has shown: the bandwidth of a hand-off, what a fetch brought, what a move
# took. Transfers share links, so the last one tells most: with 0.1 two pools of 8 workers attain 2 points less, with
# 0.01 6 points.
LATEST = 0.3
LATELY_S = 10.0  # what was seen in this time counts as what is so now
_KEPT = 1 - 1 / MEMORY  # weight of a step, for each one after it
_OUTLIER = 5.0  # a step counts as at most this multiple of its prediction
_PULL = 1e-4  # ridge weight towards the present curve, for coefficients that recent steps do not separate

Point = tuple[float, float]  # each, context
_Array = npt.NDArray[np.float64]
_Row = tuple[float, float, float, float]  # 1, each, context and seconds of a step, by its weight


def _row(point: Point, seconds: float, scale_s: float) -> _Row:
    """Return a step's row of the equations; errors are taken relative to `scale_s`."""
    return 1.0 / scale_s, point[0] / scale_s, point[1] / scale_s, seconds / scale_s


class Fit:
    """A curve that follows the mean of the steps observed, and forgets old ones.

    Least squares over relative errors, as normal equations, under the condition that no coefficient is negative.
    """

    def __init__(self, start: Curve, points: tuple[Point, ...]) -> None:
        """Begin with a prior curve that weighs as much as one step at each of the points, and less with every step.

        Only the prior's shape counts: it may be of another device, which is slower or faster by any factor. It keeps
        the weight that it has after MEMORY steps: it decides where steps that are all alike say nothing.
        """
        self.curve = start
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
        start_s = self._start.seconds(each, context)
        if start_s > 0:
            self._log_slower += (log(seconds / start_s) - self._log_slower) / min(MEMORY, self.num_observed)
        if self.num_observed <= ENOUGH_STEPS or predicted_s <= 0:
            scale_s = seconds
        else:
            seconds = min(seconds, _OUTLIER * predicted_s)
            scale_s = predicted_s  # so that the curve predicts the mean: relative to `seconds`, long steps weigh less
        self._unsolved.append(_row((each, context), seconds, scale_s))
        if self.num_observed <= ENOUGH_STEPS or len(self._unsolved) >= ENOUGH_STEPS:
            self._solve()

    def _solve(self) -> None:
        """Move the curve to the best one without negative coefficients."""
        rows = np.array(self._unsolved)
        kept = _KEPT ** np.arange(len(rows) - 1, -1, -1)
        self._products = _KEPT ** len(rows) * self._products + (rows * kept[:, None]).T @ rows
        self._unsolved = []
        known = self._products + self._products_of_start()
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
        return np.asarray(rows.T @ rows / min(MEMORY, self.num_observed) ** 2)


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


_MAX_PAIRS = 1 << 16  # known from workers' probes alone
_LARGE_BYTES = 1 << 16  # smaller hand-offs show latency alone
_START_TOKENS = (64, 4096)  # of a prompt, or of a sequence's KV: points at which the prior curve counts

# For a pool that nothing is known of: a mid-size model on one accelerator. Only the first seconds depend on it.
_UNKNOWN = StepCosts(Curve(0.01, 5e-5, 1e-9), ())
_UNKNOWN_DECODE = Curve(0.01, 1e-4, 1e-7)


class BatchFits:
    """What decode steps cost, with one fit for each doubling of the batch: 1, 2 and 3, 4 to 7, ...

    A small batch waits for the weights to be read, a large one for arithmetic: no line fits both. And a quiet minute of
    small batches must not erase what large ones cost.
    """

    def __init__(self, start: StepCosts) -> None:
        self._start = start
        self._fits: dict[int, Fit] = {}
        self._nearest: dict[int, Fit] = {}  # of sizes of which no step was seen, as far as they were asked for
        self.latest = self._begin(1)
        self.num_observed = 0

    def curve(self, sequences: int) -> Curve:
        band = sequences.bit_length()
        fit = self._fits.get(band)
        return self._first_curve(band) if fit is None else fit.curve

    def observe(self, sequences: int, kv_tokens: float, seconds: float) -> None:
        band = sequences.bit_length()
        fit = self._fits.get(band)
        if fit is None:
            fit = self._fits[band] = self._begin(band)
            self._nearest.clear()
        fit.observe(sequences, kv_tokens, seconds)
        self.num_observed += 1
        self.latest = fit

    def seen(self) -> list[tuple[int, Fit]]:
        """Return each size of which steps were seen, as its largest batch, with its fit."""
        return [((1 << band) - 1, self._fits[band]) for band in sorted(self._fits)]

    def _begin(self, band: int) -> Fit:
        smallest = 1 << max(0, band - 1)
        points: tuple[Point, ...] = tuple(
            (float(size), float(size * kv)) for size in (smallest, 2 * smallest - 1) for kv in _START_TOKENS
        )
        return Fit(self._first_curve(band), points)

    def _first_curve(self, band: int) -> Curve:
        """Return the curve for a band without steps: that of the nearest band with enough steps, or else the prior."""
        if self._fits:
            nearest = self._nearest.get(band)
            if nearest is None:
                nearest = self._fits[min(self._fits, key=lambda seen: (abs(seen - band), seen))]
                self._nearest[band] = nearest
            if nearest.num_observed >= ENOUGH_STEPS or not self._start.decode:
                return nearest.curve
        return self._start.decode_curve(1 << max(0, band - 1)) if self._start.decode else _UNKNOWN_DECODE


class LearntCosts:
    """Step times of workers that are alike."""

    def __init__(self, start: StepCosts | None = None) -> None:
        start = start or _UNKNOWN
        self.prefill_fit = Fit(start.prefill, tuple((float(n), float(n * n)) for n in _START_TOKENS))
        self.decode_fits = BatchFits(start)
        self.tokens_a_step = 1.0  # that a sequence gains
        self._rows_a_step = 1.0  # that are computed for it
        self._num_mixed = 0
        self._observed_s = -inf

    @property
    def prefill(self) -> Curve:
        return self.prefill_fit.curve

    @property
    def decode(self) -> Curve:
        """Return what holds for the size of batch seen last."""
        return self.decode_fits.latest.curve

    def step_costs(self, largest_batch: int) -> StepCosts:
        """Return all that is known, for batches up to a size and beyond."""
        ends = [(1 << band) - 1 for band in range(1, largest_batch.bit_length() + 1)]
        pieces = [DecodePiece(end, self.decode_fits.curve(end)) for end in ends]
        return StepCosts(self.prefill, (*pieces[:-1], DecodePiece(None, pieces[-1].curve)))

    def observe(self, step: Step, elapsed_s: float, now_s: float) -> None:
        """Take in one step. Of a step that does both, the prefill's part is what decoding does not explain."""
        self._observed_s = now_s
        if (decoding := step.sequences - step.guesses) > 0:
            self.tokens_a_step += (1 + step.kept_guesses / decoding - self.tokens_a_step) / MEMORY
            self._rows_a_step += (step.sequences / decoding - self._rows_a_step) / MEMORY
        if not step.prefill_tokens:
            self.decode_fits.observe(step.sequences, step.kv_tokens, elapsed_s)
            return
        if step.sequences:
            self._num_mixed += 1
            decode = self.decode_fits.curve(step.sequences)
            shared_s = decode.marginal_s(step.sequences, step.kv_tokens) + max(0.0, decode.step_s - self.prefill.step_s)
            if shared_s > elapsed_s / 2:
                return  # too little of it is the prefill's
            elapsed_s -= shared_s
        self.prefill_fit.observe(step.prefill_tokens, step.prefill_work, elapsed_s)

    def knows_prefill(self, now_s: float) -> bool:
        """Return whether requests may be refused on these predictions."""
        return now_s - self._observed_s < LATELY_S and self.prefill_fit.num_observed >= ENOUGH_STEPS

    def knows_decode(self, now_s: float) -> bool:
        """Return the same of decode steps. Those that also prefill count too."""
        num_observed = self.decode_fits.num_observed + self._num_mixed
        return now_s - self._observed_s < LATELY_S and num_observed >= ENOUGH_STEPS

    def seconds(self, step: Step) -> float:
        """Return how long a step takes that does one of both."""
        if step.prefill_tokens:
            return self.prefill.seconds(step.prefill_tokens, step.prefill_work)
        return self.decode_s(step.sequences, step.kv_tokens)

    def prefill_s(self, num_tokens: float, work: float, budget: int) -> float:
        """Return how long prompts take together, `budget` tokens to a step."""
        if num_tokens <= 0:
            return 0.0
        curve = self.prefill_fit.curve
        return curve.step_s * ceil(num_tokens / budget) + curve.marginal_s(num_tokens, work)

    def token_s(self, sequences: float, kv_tokens: float) -> float:
        """Return how long a token of a sequence takes where so many decode: a step may bring each of them several."""
        if self._rows_a_step == 1.0:
            return self.decode_s(sequences, kv_tokens)
        return self.decode_s(sequences * self._rows_a_step, kv_tokens * self._rows_a_step) / self.tokens_a_step

    def decode_s(self, sequences: float, kv_tokens: float) -> float:
        """Return how long a decode step takes, or steps take on average whose batches have that mean."""
        whole = int(sequences)
        below = self.decode_fits.curve(whole)
        if sequences == whole or whole & (whole + 1):  # one more is of the same order of magnitude: one line for both
            return below.seconds(sequences, kv_tokens)
        part, kv_each = sequences - whole, kv_tokens / max(1.0, sequences)
        below_s = below.seconds(whole, whole * kv_each)
        above_s = self.decode_fits.curve(whole + 1).seconds(whole + 1, (whole + 1) * kv_each)
        return below_s + part * (above_s - below_s)


def costs_of_trial(steps: Sequence[TimedStep]) -> StepCosts | None:
    """Return the costs that a few steps of an engine on trial show; None without steps."""
    learnt, largest = LearntCosts(), 1
    for each in steps:
        learnt.observe(each.step, each.elapsed_s, 0.0)
        largest = max(largest, each.step.sequences)
    return learnt.step_costs(largest) if steps else None


class LearntLinks:
    """Bandwidth between pairs of workers, from the hand-offs they report."""

    def __init__(self, start_bytes_per_s: float = 5e9, latency_s: float = 0.001) -> None:
        self._start = start_bytes_per_s
        self.latency_s = latency_s
        self._measured: dict[tuple[str, str], float] = {}  # by names of prefill and decode worker

    def begin(self, pair: tuple[str, str], bytes_per_s: float) -> None:
        """Start from what the pair itself measured. What hand-offs have shown already counts for more."""
        if len(self._measured) < _MAX_PAIRS:
            self._measured.setdefault(pair, bytes_per_s)

    def observe(self, pair: tuple[str, str], num_bytes: int, seconds: float) -> None:
        if num_bytes < _LARGE_BYTES or seconds <= 0:
            return
        rate = num_bytes / seconds
        before = self._measured.get(pair)
        self._measured[pair] = rate if before is None else before + LATEST * (rate - before)

    def bytes_per_s(self, pair: tuple[str, str]) -> float:
        """Return the bandwidth from one worker to another: where only the way back is known, that of the way back."""
        rate = self._measured.get(pair)
        return self._measured.get((pair[1], pair[0]), self._start) if rate is None else rate

    def transfer_s(self, pair: tuple[str, str], num_bytes: float) -> float:
        """Return how long so many bytes take on an idle link."""
        return self.latency_s + num_bytes / self.bytes_per_s(pair)

    def forget(self, worker: str) -> None:
        """Drop what concerns a worker that has left."""
        self._measured = {pair: rate for pair, rate in self._measured.items() if worker not in pair}
