"""What came of requests that were sent while workers failed, and what it adds up to."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.bench.asks import Answers


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request as its client saw it."""

    number: int
    sent_s: float  # since the run's start
    ended_s: float
    status: str  # "OK" or a gRPC status name
    detail: str = ""
    wrong: str = ""  # how the tokens differ from those due; empty: they do not
    ttft_s: float | None = None
    gap_s: float = 0.0  # longest between two messages with tokens
    num_tokens: int = 0
    attempts: int = 0

    @property
    def is_good(self) -> bool:
        return self.status == "OK" and not self.wrong


@dataclass(frozen=True, slots=True)
class Tally:
    """A run's outcomes. Times in seconds; None where nothing was measured."""

    num_requests: int
    num_good: int
    num_wrong: int
    num_moved: int  # answered well after more than one attempt
    most_attempts: int
    errors: dict[str, int]  # by status and detail
    duration_s: float
    goodput_per_s: float
    tokens_per_s: float
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    ttft_max_s: float | None
    gap_p50_s: float | None
    gap_p99_s: float | None
    moved_gap_p99_s: float | None
    moved_gap_max_s: float | None
    wrong_examples: tuple[str, ...]


def difference(answers: Answers, due: Answers, *, is_whole: bool) -> str:
    """Return where tokens first differ from those due; empty where they do not, or are a beginning of them."""
    for index, tokens in due.items():
        got = answers.get(index, ())
        for place, (one, other) in enumerate(zip(got, tokens, strict=False)):
            if one != other:
                return f"continuation {index}: token {place} of {len(tokens)} is {one}, {other} was due"
        if len(got) > len(tokens) or (is_whole and len(got) < len(tokens)):
            return f"continuation {index}: {len(got)} tokens came, {len(tokens)} were due"
    extra = set(answers) - set(due)
    return f"continuations {sorted(extra)} were not asked for" if extra else ""


def tally(outcomes: Sequence[Outcome]) -> Tally:
    """Add up a run."""
    good = [outcome for outcome in outcomes if outcome.is_good]
    moved = [outcome for outcome in good if outcome.attempts > 1]
    wrong = [outcome for outcome in outcomes if outcome.wrong]
    errors = Counter(f"{outcome.status}: {outcome.detail}" for outcome in outcomes if outcome.status != "OK")
    duration_s = max((outcome.ended_s for outcome in outcomes), default=0.0)
    ttfts_s = [outcome.ttft_s for outcome in good if outcome.ttft_s is not None]
    return Tally(
        num_requests=len(outcomes),
        num_good=len(good),
        num_wrong=len(wrong),
        num_moved=len(moved),
        most_attempts=max((outcome.attempts for outcome in good), default=0),
        errors=dict(errors.most_common()),
        duration_s=duration_s,
        goodput_per_s=len(good) / duration_s if duration_s else 0.0,
        tokens_per_s=sum(outcome.num_tokens for outcome in good) / duration_s if duration_s else 0.0,
        ttft_p50_s=percentile(ttfts_s, 0.5),
        ttft_p99_s=percentile(ttfts_s, 0.99),
        ttft_max_s=percentile(ttfts_s, 1.0),
        gap_p50_s=percentile([outcome.gap_s for outcome in good], 0.5),
        gap_p99_s=percentile([outcome.gap_s for outcome in good], 0.99),
        moved_gap_p99_s=percentile([outcome.gap_s for outcome in moved], 0.99),
        moved_gap_max_s=percentile([outcome.gap_s for outcome in moved], 1.0),
        wrong_examples=tuple(f"request {outcome.number}: {outcome.wrong}" for outcome in wrong[:10]),
    )


def percentile(values: Sequence[float], share: float) -> float | None:
    """Return the smallest value that at least `share` of all are no larger than."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, min(len(ordered) - 1, -int(-share * len(ordered) // 1) - 1))]
