"""What the outcomes of a run add up to. Every request that was sent counts, the failed ones too."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from pdserve.measure.outcomes import OK, PARTS, Objective, Outcome, part_times
from pdserve.measure.tables import Comparison


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of one quantity, in its own unit."""

    p50: float
    p90: float
    p99: float
    max: float


def shown(values: Percentiles | None, share: str, factor: float = 1.0, digits: int = 1) -> str:
    """Return one of the percentiles, "p50" to "max", multiplied by a factor; "-" where there are none."""
    return "-" if values is None else f"{factor * getattr(values, share):.{digits}f}"


def shown_all(values: Percentiles | None, factor: float = 1.0, digits: int = 0) -> str:
    """Return "p50 / p90 / p99", each multiplied by a factor; "-" where there are none."""
    if values is None:
        return "-"
    return " / ".join(f"{factor * value:.{digits}f}" for value in (values.p50, values.p90, values.p99))


def percentiles(values: Iterable[float]) -> Percentiles | None:
    """Return the usual percentiles, interpolated linearly between values; None of no values."""
    known = np.fromiter(values, dtype=np.float64)
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
    failures: dict[str, int]  # by status
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
        failures=dict(Counter(o.status for o in outcomes if o.status != OK)),
        input_tokens_per_s=sum(o.prompt_tokens for o in good) / seconds,
        output_tokens_per_s=sum(o.num_tokens for o in outcomes) / seconds,
        ttft_s=_measured(o.ttft_s for o in outcomes),
        tpot_s=_measured(o.tpot_s for o in outcomes),
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


def _measured(values: Iterable[float | None]) -> Percentiles | None:
    return percentiles(value for value in values if value is not None)


def _parts(outcomes: Sequence[Outcome]) -> dict[str, Percentiles]:
    times = [part_times(outcome.stages_s) for outcome in outcomes]
    found = {name: percentiles(each[name] for each in times if name in each) for name in PARTS}
    return {name: values for name, values in found.items() if values is not None}


_RATES: dict[str, Callable[[Summary], str]] = {
    "seconds": lambda run: f"{run.duration_s:.2f}",
    "input tokens/s": lambda run: f"{run.input_tokens_per_s:.0f}",
    "output tokens/s": lambda run: f"{run.output_tokens_per_s:.0f}",
    "requests/s": lambda run: f"{run.requests_per_s:.2f}",
    "goodput/s": lambda run: f"{run.goodput_per_s:.2f}",
    "attainment": lambda run: f"{run.attainment:.0%}",
    "failed": lambda run: ", ".join(f"{count} {status}" for status, count in run.failures.items()) or "0",
    "hand-off MB": lambda run: f"{run.handoff_bytes / 1e6:.1f}",
}
_TIMES: dict[str, Callable[[Summary], Percentiles | None]] = {
    "TTFT": lambda run: run.ttft_s,
    "TPOT": lambda run: run.tpot_s,
    "ITL": lambda run: run.itl_s,
    "hand-off": lambda run: run.handoff_s,
}


def summary_tables(runs: Sequence[Summary]) -> tuple[Comparison, Comparison]:
    """Return two tables, one column a run: rates and times, and the parts of the requests' timelines."""
    rows = [(name, [rate(run) for run in runs]) for name, rate in _RATES.items()]
    for name, times in _TIMES.items():
        rows += [
            (f"{name} {share} ms", [shown(times(run), share, 1e3) for run in runs]) for share in ("p50", "p90", "p99")
        ]
    parts = [(name, [shown_all(run.parts_s.get(name), 1e3, 1) for run in runs]) for name in PARTS]
    names = [run.name for run in runs]
    return Comparison("", names, rows), Comparison("from stage to stage, ms: p50 / p90 / p99", names, parts)
