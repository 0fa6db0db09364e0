"""What decode steps cost, learnt apart for batches of each order of magnitude. Pure.

A small batch waits for the weights to be read, a large one for arithmetic: no line is right for both. And what large
batches cost must not be forgotten over a quiet minute of small ones, since it is needed when the next crowd comes.
"""

from pdserve.perfmodel.curve import Curve, StepCosts
from pdserve.perfmodel.fit import Fit, Point

_FORGETTING = 0.997  # decode steps are short and many
_ENOUGH_STEPS = 32  # of a neighbour, to be believed rather than the start
_KV_TOKENS = (64, 4096)  # of a sequence: where a start is believed


class BatchFits:
    """One fit for each doubling of the batch: 1, 2 and 3, 4 to 7, ..."""

    def __init__(self, start: StepCosts | None, unknown: Curve) -> None:
        """Begin with measured costs, or with a guess."""
        self._start, self._unknown = start, unknown
        self._fits: dict[int, Fit] = {}
        self._neighbours: dict[int, Fit] = {}  # of sizes of which no step was seen, as far as they were asked for
        self.latest = self._begin(1)
        self.num_observed = 0

    def curve(self, sequences: int) -> Curve:
        """Return what holds for a batch."""
        band = sequences.bit_length()
        fit = self._fits.get(band)
        return self._first_curve(band) if fit is None else fit.curve

    def observe(self, sequences: int, kv_tokens: float, seconds: float) -> None:
        """Take in one step."""
        band = sequences.bit_length()
        fit = self._fits.get(band)
        if fit is None:
            fit = self._fits[band] = self._begin(band)
            self._neighbours.clear()
        fit.observe(sequences, kv_tokens, seconds)
        self.num_observed += 1
        self.latest = fit

    def seen(self) -> list[tuple[int, Fit]]:
        """Return each size of which steps were seen, as its largest batch, with its fit."""
        return [((1 << band) - 1, self._fits[band]) for band in sorted(self._fits)]

    def _begin(self, band: int) -> Fit:
        smallest = 1 << max(0, band - 1)
        points: tuple[Point, ...] = tuple(
            (float(size), float(size * kv)) for size in (smallest, 2 * smallest - 1) for kv in _KV_TOKENS
        )
        return Fit(self._first_curve(band), points, _FORGETTING, adds_up=True)

    def _first_curve(self, band: int) -> Curve:
        """Return what is believed of a size of which no step was seen: what its neighbour has learnt, or the start."""
        if self._fits:
            neighbour = self._neighbours.get(band)
            if neighbour is None:
                neighbour = self._neighbours[band] = self._fits[self._nearest(band)]
            if neighbour.num_observed >= _ENOUGH_STEPS or self._start is None:
                return neighbour.curve
        if self._start is None or not self._start.decode:
            return self._unknown
        return self._start.decode_curve(1 << max(0, band - 1))

    def _nearest(self, band: int) -> int:
        return min(self._fits, key=lambda seen: (abs(seen - band), seen))
