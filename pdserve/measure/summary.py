"""What the outcomes of a run add up to. Every request that was sent counts, the failed ones too."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from pdserve.measure.outcomes import OK, PARTS, Objective, Outcome, part_times


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of one quantity, in its own unit."""

    p50: float
    p90: float
    p99: float
    max: float


def percentiles(values: Iterable[float | None]) -> Percentiles | None:
    """Return the usual percentiles of the values that are not None, interpolated linearly; None of no values."""
    known = np.fromiter((value for value in values if value is not None), dtype=np.float64)
    return Percentiles(*np.percentile(known, (50, 90, 99, 100)).tolist()) if len(known) else None


@dataclass(frozen=True, slots=True)
class Errors:
    """How far predictions of one quantity were off, |predicted - seen| / seen."""

    num_predicted: int
    p50: float
    p90: float
    ratio_p50: float  # median of predicted / seen: where it is not 1, predictions are biased


@dataclass(frozen=True, slots=True)
class Summary:
    """One run. None: nothing was measured."""

    name: str
    num_requests: int
    duration_s: float
    requests_per_s: float  # that ended well
    goodput_per_s: float  # that ended well and met the objective
    attainment: float  # share of all requests that did
    admitted_attainment: float  # share of those that were not refused
    refused: float  # share of all requests
    failures: dict[str, int]  # by status; an answer that is not what it should be is "WRONG"
    input_tokens_per_s: float
    output_tokens_per_s: float
    ttft_s: Percentiles | None
    tpot_s: Percentiles | None
    itl_s: Percentiles | None
    ttft_error: Errors | None  # of the router's predictions, for requests that ended well
    tpot_error: Errors | None
    refusal_s: Percentiles | None  # from sending to the refusal
    retry_after: float | None  # share of the refusals with a time to try again
    handoff_s: Percentiles | None
    handoff_bytes: int
    parts_s: dict[str, Percentiles]  # of the timelines of requests that ended well


def summarize(name: str, outcomes: Sequence[Outcome], objective: Objective, duration_s: float | None = None) -> Summary:
    """Add up one run; it lasted from the first send to the last end unless `duration_s` is given."""
    seconds = duration_s or max(o.ended_s for o in outcomes) - min(o.sent_s for o in outcomes)
    good = [outcome for outcome in outcomes if outcome.is_good]
    refused = [outcome for outcome in outcomes if outcome.is_refused]
    handed_off = [outcome for outcome in good if outcome.handoff_bytes]
    num_met = sum(outcome.meets(objective) for outcome in outcomes)
    return Summary(
        name=name,
        num_requests=len(outcomes),
        duration_s=seconds,
        requests_per_s=len(good) / seconds,
        goodput_per_s=num_met / seconds,
        attainment=num_met / max(1, len(outcomes)),
        admitted_attainment=num_met / max(1, len(outcomes) - len(refused)),
        refused=len(refused) / max(1, len(outcomes)),
        failures=dict(Counter("WRONG" if o.status == OK else o.status for o in outcomes if not o.is_good)),
        input_tokens_per_s=sum(o.prompt_tokens for o in good) / seconds,
        output_tokens_per_s=sum(o.num_tokens for o in outcomes) / seconds,
        ttft_s=percentiles(o.ttft_s for o in outcomes),
        tpot_s=percentiles(o.tpot_s for o in outcomes),
        itl_s=percentiles(gap_s for o in outcomes for gap_s in o.itls_s),
        ttft_error=errors_of((o.predicted_ttft_s, o.ttft_s) for o in good),
        tpot_error=errors_of((o.predicted_tpot_s, o.tpot_s) for o in good),
        refusal_s=percentiles(o.ended_s - o.sent_s for o in refused),
        retry_after=sum(o.retry_after_s is not None for o in refused) / len(refused) if refused else None,
        handoff_s=percentiles(o.handoff_s for o in handed_off),
        handoff_bytes=sum(o.handoff_bytes for o in handed_off),
        parts_s=_parts(good),
    )


def errors_of(pairs: Iterable[tuple[float | None, float | None]]) -> Errors | None:
    """Compare what was predicted with what was seen; None where nothing was predicted."""
    ratios = [predicted_s / seen_s for predicted_s, seen_s in pairs if predicted_s is not None and seen_s]
    errors = percentiles(abs(ratio - 1) for ratio in ratios)
    return None if errors is None else Errors(len(ratios), errors.p50, errors.p90, median(ratios))


def _parts(outcomes: Sequence[Outcome]) -> dict[str, Percentiles]:
    times = [part_times(outcome.stages_s) for outcome in outcomes]
    found = {name: percentiles(each.get(name) for each in times) for name in PARTS}
    return {name: values for name, values in found.items() if values is not None}
