"""What came of requests, as their clients saw it on a live or a simulated cluster: of each, and of a whole run.

Every request that was sent counts in a run's summary, also one that failed.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf, isfinite
from statistics import median

import numpy as np

from pdserve.base.errors import ConfigError
from pdserve.protocol.drafts import BySource, add
from pdserve.protocol.refusal import Status
from pdserve.router.requests.timeline import Moved


@dataclass(frozen=True, slots=True)
class Objective:
    """Limits in seconds; infinite: any time will do."""

    ttft_s: float = inf
    tpot_s: float = inf

    def __str__(self) -> str:
        named = ("TTFT", self.ttft_s), ("TPOT", self.tpot_s)
        limits = [f"{name} {1e3 * limit_s:.4g} ms" for name, limit_s in named if isfinite(limit_s)]
        return ", ".join(limits) or "no objective"


ANY = Objective()


def parse_objective(*texts: str) -> Objective:
    """Return the objective written "ttft:MS tpot:MS", in one text or in several; either limit may be missing."""
    limits: dict[str, float] = {}
    for part in " ".join(texts).split():
        name, _, value = part.partition(":")
        if name in limits:
            raise ConfigError(f"--goodput: {name} is given twice")
        try:
            limits[name] = float(value) / 1e3
        except ValueError:
            raise ConfigError(f"--goodput: {part!r} is not ttft:MS or tpot:MS") from None
        if name not in ("ttft", "tpot"):
            raise ConfigError(f"--goodput: {name!r} is neither ttft nor tpot")
        if not 0 < limits[name] < inf:
            raise ConfigError(f"--goodput: {part!r} must be over 0 milliseconds and finite")
    return Objective(limits.get("ttft", inf), limits.get("tpot", inf))


OK = "OK"


@dataclass(slots=True)
class Outcome:
    """One request. Times are seconds of its run; the cluster fills in the rest as it answers."""

    sent_s: float
    prompt_tokens: int
    output_tokens: int  # that were asked for
    number: int = 0  # in its run
    status: str = ""  # "OK" or the name of a gRPC status; empty: it has not ended
    detail: str = ""
    wrong: str = ""  # how its tokens differ from the expected ones; empty: they do not, or were not compared
    num_tokens: int = 0
    placed_s: float = 0.0  # when it was given to workers; of a simulated cluster
    first_s: float = 0.0  # when the first token came
    last_s: float = 0.0
    ended_s: float = inf
    gaps_s: list[float] = field(default_factory=list)  # between messages that brought tokens
    tokens: dict[int, list[int]] = field(default_factory=dict)  # of a live cluster, by continuation
    times_s: dict[int, list[float]] = field(default_factory=dict)  # when each of these tokens came
    predicted_ttft_s: float | None = None  # by the router, when it placed or refused the request
    predicted_tpot_s: float | None = None
    retry_after_s: float | None = None  # as a refusal proposed
    attempts: int = 0
    cached_tokens: int = 0  # of the prompt, found in the prefill worker's prefix cache
    prefill_worker: str = ""
    decode_worker: str = ""
    handoff_bytes: int = 0
    handoff_s: float = 0.0
    fetched_tokens: int = 0  # of the prompt, fetched from another worker's prefix cache
    moves: tuple[Moved, ...] = ()
    stages_s: Mapping[str, float] = field(default_factory=dict)  # of its timeline, after "received"
    drafts: BySource = field(default_factory=dict)  # how guesses of its tokens turned out

    @property
    def ttft_s(self) -> float | None:
        """Time to first token; None without one."""
        return self.first_s - self.sent_s if self.num_tokens else None

    @property
    def tpot_s(self) -> float | None:
        """Mean time per later token; None with fewer than two tokens."""
        return (self.last_s - self.first_s) / (self.num_tokens - 1) if self.num_tokens > 1 else None

    @property
    def itls_s(self) -> list[float]:
        """Gaps between tokens. Those that came in one message are 0 apart."""
        return self.gaps_s + [0.0] * (self.num_tokens - 1 - len(self.gaps_s))

    @property
    def is_good(self) -> bool:
        return self.status == OK and not self.wrong

    @property
    def is_refused(self) -> bool:
        return self.status == Status.RESOURCE_EXHAUSTED.value

    def meets(self, objective: Objective) -> bool:
        """Return whether it ended well and in time. One token alone has no TPOT to miss."""
        if not self.is_good or self.ttft_s is None or self.ttft_s > objective.ttft_s:
            return False
        return self.tpot_s is None or self.tpot_s <= objective.tpot_s

    def take(self, num_tokens: int, now_s: float) -> None:
        if self.num_tokens:
            self.gaps_s.append(now_s - self.last_s)
        else:
            self.first_s = now_s
        self.num_tokens += num_tokens
        self.last_s = now_s


_Stages = Mapping[str, float]

# Where a request's time went. The first four parts add up to the router's TTFT; the last four to the time from the end
# of the prompt's computing to the decode worker's first step.
PARTS: dict[str, Callable[[_Stages], float]] = {
    "placed": lambda at: at["placed"] - at["received"],
    "prefill queue": lambda at: at["prefill_started"] - at["placed"],
    "prefill": lambda at: at["prefill_done"] - at["prefill_started"],
    "first token": lambda at: at["first_token"] - at["prefill_done"],
    "wait for a grant": lambda at: max(0.0, at["granted"] - at["prefill_done"]),
    "until landed": lambda at: at["landed"] - max(at["prefill_done"], at["granted"]),
    "until committed": lambda at: at["committed"] - at["landed"],
    "until decoding": lambda at: at["decode_joined"] - at["committed"],
}


def part_times(stages_s: _Stages) -> dict[str, float]:
    """Return the time in each part whose stages a request has reached: without a hand-off, only the first four."""
    times = {}
    for name, part in PARTS.items():
        with suppress(KeyError):
            times[name] = part(stages_s)
    return times


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
class Guesses:
    """Guesses of one source that steps have verified."""

    verified: int
    right: int
    tokens_a_step: float  # of a sequence, in steps that verified some
    right_by_place: tuple[float, ...]  # share of the steps that verified some


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
    guesses: dict[str, Guesses]  # by where they came from


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
        guesses=_guesses(outcomes),
    )


def errors_of(pairs: Iterable[tuple[float | None, float | None]]) -> Errors | None:
    """Compare what was predicted with what was seen; None where nothing was predicted."""
    ratios = [predicted_s / seen_s for predicted_s, seen_s in pairs if predicted_s is not None and seen_s]
    errors = percentiles(abs(ratio - 1) for ratio in ratios)
    return None if errors is None else Errors(len(ratios), errors.p50, errors.p90, median(ratios))


def _guesses(outcomes: Iterable[Outcome]) -> dict[str, Guesses]:
    total: BySource = {}
    for outcome in outcomes:
        add(total, outcome.drafts)
    return {
        source: Guesses(
            verified=counted.num_draft_tokens,
            right=counted.num_accepted_tokens,
            tokens_a_step=1 + counted.num_accepted_tokens / counted.num_drafts,
            right_by_place=tuple([count / counted.num_drafts for count in counted.num_accepted_tokens_per_pos]),
        )
        for source, counted in sorted(total.items())
    }


def _parts(outcomes: Sequence[Outcome]) -> dict[str, Percentiles]:
    times = [part_times(outcome.stages_s) for outcome in outcomes]
    found = {name: percentiles(each.get(name) for each in times) for name in PARTS}
    return {name: values for name, values in found.items() if values is not None}
