"""How far predictions were from what clients saw."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from pdserve.bench.summary import Sample, percentile


@dataclass(frozen=True, slots=True)
class Errors:
    """Of the predictions of one quantity."""

    num_predicted: int
    median_error: float  # median of |predicted - seen| / seen
    p90_error: float
    median_ratio: float  # median of predicted / seen: where it is not 1, predictions are biased


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Of one run; None where nothing was predicted."""

    name: str
    num_requests: int
    ttft: Errors | None
    tpot: Errors | None


def accuracy(name: str, samples: Sequence[Sample]) -> Accuracy:
    """Compare what the router predicted for each request that ended well with what its client saw."""
    good = [sample for sample in samples if sample.status == "OK"]
    ttfts = [(sample.predicted_ttft_s, sample.ttft_s) for sample in good]
    tpots = [(s.predicted_tpot_s, s.tpot_s) for s in good]
    return Accuracy(name, len(samples), errors_of(ttfts), errors_of(tpots))


def errors_of(pairs: Sequence[tuple[float | None, float | None]]) -> Errors | None:
    """Compare what was predicted with what was seen; None where nothing was predicted."""
    ratios = [predicted_s / seen_s for predicted_s, seen_s in pairs if predicted_s is not None and seen_s]
    if not ratios:
        return None
    errors = sorted(abs(ratio - 1) for ratio in ratios)
    return Errors(len(ratios), median(errors), percentile(errors, 0.9), median(ratios))
