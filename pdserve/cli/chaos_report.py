"""Show what came of clusters under attack."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict

from pdserve.bench.outcomes import percentile
from pdserve.bench.tables import Comparison
from pdserve.cli.chaos_run import Verdict

ROWS: dict[str, Callable[[Verdict], str]] = {
    "requests": lambda v: f"{v.tally.num_requests}",
    "answered rightly": lambda v: f"{v.tally.num_good}",
    "client errors": lambda v: f"{sum(v.tally.errors.values())}",
    "wrong tokens": lambda v: f"{v.tally.num_wrong}",
    "seconds": lambda v: f"{v.tally.duration_s:.1f}",
    "goodput/s": lambda v: f"{v.tally.goodput_per_s:.2f}",
    "tokens/s": lambda v: f"{v.tally.tokens_per_s:.0f}",
    "workers hit": lambda v: f"{len(v.blows)}",
    "noticed p50 s": lambda v: _shown(percentile(noticed_s(v), 0.5)),
    "noticed max s": lambda v: _shown(percentile(noticed_s(v), 1.0)),
    "ended, says the router": lambda v: f"{sum(v.ended.values())}",
    "moved": lambda v: f"{v.tally.num_moved}",
    "most attempts": lambda v: f"{v.tally.most_attempts}",
    "placed again": lambda v: f"{v.num_replaced}",
    "TTFT p50 s": lambda v: _shown(v.tally.ttft_p50_s),
    "TTFT p99 s": lambda v: _shown(v.tally.ttft_p99_s),
    "TTFT max s": lambda v: _shown(v.tally.ttft_max_s),
    "gap p50 s": lambda v: _shown(v.tally.gap_p50_s),
    "gap p99 s": lambda v: _shown(v.tally.gap_p99_s),
    "gap p99 s, moved": lambda v: _shown(v.tally.moved_gap_p99_s),
    "gap max s, moved": lambda v: _shown(v.tally.moved_gap_max_s),
    "all pages free after s": lambda v: v.left_over or _shown(v.free_after_s),
}


def noticed_s(verdict: Verdict) -> list[float]:
    """Return how long the router took to notice each blow that it could notice."""
    return [blow.noticed_s for blow in verdict.blows if blow.noticed_s is not None]


def is_clean(verdict: Verdict) -> bool:
    """Return whether every request was answered rightly and ended once, and every page came back."""
    total = verdict.tally
    num_ended = sum(verdict.ended.values())
    return total.num_good == total.num_requests == num_ended and not verdict.left_over


def table(verdicts: Sequence[Verdict]) -> Comparison:
    """Return one column a trial, one row a quantity."""
    rows = [(name, [row(verdict) for verdict in verdicts]) for name, row in ROWS.items()]
    if len(verdicts) > 1:
        rows.append(("goodput, share of the first", [f"{share:.0%}" for share in goodput_shares(verdicts)]))
    return Comparison("", [verdict.name for verdict in verdicts], rows)


def failures(verdicts: Sequence[Verdict]) -> list[str]:
    """Return a line for each kind of error, and some for wrong answers."""
    lines = []
    for verdict in verdicts:
        lines += [f"{verdict.name}: {count} x {error}" for error, count in verdict.tally.errors.items()]
        lines += [f"{verdict.name}: {example}" for example in verdict.tally.wrong_examples]
    return lines


def goodput_shares(verdicts: Sequence[Verdict]) -> list[float]:
    """Return each trial's goodput over the first one's."""
    first = verdicts[0].tally.goodput_per_s or 1.0
    return [verdict.tally.goodput_per_s / first for verdict in verdicts]


def as_json(verdicts: Sequence[Verdict]) -> str:
    """Return the verdicts as JSON, without each request's own outcome."""
    trials = [{name: value for name, value in asdict(v).items() if name != "outcomes"} for v in verdicts]
    return json.dumps({"trials": trials, "goodput_shares": goodput_shares(verdicts)}, indent=2) + "\n"


def _shown(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f}"
