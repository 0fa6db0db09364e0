"""Early rejection by the decode load of the moment against by the load predicted for the end of the prefill.

A request joins its decode worker some time after it was admitted. Judged by the present load, a worker looks empty
until those admitted in the meantime arrive, all at once, and full until they have left: prompts under way and decode
load swing against each other (Mooncake, Qin et al., FAST 2025). Counting what is on its way is the cure. It shows where
a prompt takes long beside an answer, there are prefill workers enough to take in a whole wave at once, and requests are
alike: a queue for prefill, and lengths of all kinds, smooth the waves. Unless told otherwise, neither way is helped by
what is learnt of past errors, which would hide a part of the difference.
"""

import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import correlation, fmean, pstdev

from pdserve.bench.tables import Column, Sheet
from pdserve.capacity.cluster import simulate
from pdserve.capacity.measure import Question
from pdserve.capacity.shape import Run, Shape
from pdserve.errors import ConfigError

_SAMPLE_S = 0.1
_SETTLED_S = 10.0  # after which the cluster is taken to have settled
_WINDOW_S = 10.0  # some periods of a swing; what changes more slowly is drift, and does not count
_WINDOW = round(_WINDOW_S / _SAMPLE_S)


@dataclass(frozen=True, slots=True)
class Sway:
    """What one way to judge led to."""

    judged_by: str
    attainment: float
    refused: float  # share of all requests
    slow: float  # share that was admitted, and missed its time per token
    at_s: tuple[float, ...]
    prefilling: tuple[int, ...]  # requests placed whose first token is still to come, at these times
    decoding: tuple[int, ...]  # requests between their first and last token

    @property
    def prefill_swing(self) -> float:
        return swing(self.prefilling)

    @property
    def decode_swing(self) -> float:
        return swing(self.decoding)

    @property
    def phase(self) -> float:
        """Correlation of both loads in a window, on average: below 0, one is high while the other is low."""
        pairs = zip(_windows(self.prefilling), _windows(self.decoding), strict=True)
        return _mean([correlation(one, other) for one, other in pairs if pstdev(one) and pstdev(other)])


def swing(loads: Sequence[int]) -> float:
    """Return how far a load strays from its mean, as a share of it, within a window of a settled cluster."""
    return _mean([pstdev(window) / fmean(window) for window in _windows(loads) if any(window)])


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0


def _windows(loads: Sequence[int]) -> Iterator[Sequence[int]]:
    """Yield whole windows; of a time too short for one, all of it."""
    settled = loads[round(_SETTLED_S / _SAMPLE_S) :]
    if loads and len(settled) < _WINDOW:
        yield loads
    for start in range(0, len(settled) - _WINDOW + 1, _WINDOW):
        yield settled[start : start + _WINDOW]


def compare(question: Question, shape: Shape, rate: float) -> tuple[Sway, Sway]:
    """Simulate the goodput policy under one load, judging by the present and by the predicted decode load."""
    workload = question.workload.at_rate(rate)
    present, predicted = (
        simulate(question.profile, replace(shape, knows_arrivals=knows), "goodput", workload, question.objective)
        for knows in (False, True)
    )
    return _sway(present, question, "present load"), _sway(predicted, question, "predicted load")


def _sway(run: Run, question: Question, judged_by: str) -> Sway:
    outcomes, objective = run.outcomes, question.objective
    end_s = max(outcome.arrival.at_s for outcome in outcomes)
    times = tuple((i + 1) * _SAMPLE_S for i in range(int(end_s / _SAMPLE_S)))
    served = [outcome for outcome in outcomes if not outcome.refused]
    return Sway(
        judged_by=judged_by,
        attainment=sum(outcome.meets(objective) for outcome in outcomes) / len(outcomes),
        refused=1 - len(served) / len(outcomes),
        slow=sum(outcome.tpot_s > objective.tpot_s for outcome in served) / len(outcomes),
        at_s=times,
        prefilling=_present([(outcome.placed_s, outcome.first_s) for outcome in served], times),
        decoding=_present([(outcome.first_s, outcome.last_s) for outcome in served], times),
    )


def _present(spans: Sequence[tuple[float, float]], times: Sequence[float]) -> tuple[int, ...]:
    """Count the spans that each time lies in."""
    starts, ends = sorted(start for start, _ in spans), sorted(end for _, end in spans)
    return tuple(bisect_right(starts, time_s) - bisect_right(ends, time_s) for time_s in times)


_COLUMNS = (
    Column("admission by", is_text=True),
    Column("seed"),
    Column("within both", "share of all requests within both objectives, %"),
    Column("refused", "%", rank=1),
    Column("slow", "share admitted that missed its time per token, %"),
    Column("prefill swing", "standard deviation over mean of the requests being prefilled", rank=2),
    Column("decode swing", "the same of those that decode", rank=3),
    Column("phase", "correlation of the two loads", rank=4),
)


def sheet(sways: Mapping[int, Sequence[Sway]], title: str) -> Sheet:
    """Return a row for each seed and way to judge."""
    rows = []
    for number in range(2):
        for seed, ways in sways.items():
            sway = ways[number]
            shares = (f"{100 * share:.1f}" for share in (sway.attainment, sway.refused, sway.slow))
            swings = (f"{share:.2f}" for share in (sway.prefill_swing, sway.decode_swing, sway.phase))
            rows.append((sway.judged_by, str(seed), *shares, *swings))
    return Sheet(title, _COLUMNS, rows)


def as_json(sways: Mapping[int, Sequence[Sway]], title: str) -> str:
    """Return what each seed and way to judge led to as JSON."""
    seeds = [{"seed": seed, "ways": [_summary(way) for way in ways]} for seed, ways in sways.items()]
    return json.dumps({"title": title, "seeds": seeds}, indent=1) + "\n"


def _summary(way: Sway) -> dict[str, object]:
    swings = {"prefill_swing": way.prefill_swing, "decode_swing": way.decode_swing, "phase": way.phase}
    shares = {"attainment": way.attainment, "refused": way.refused, "slow": way.slow}
    return {"judged_by": way.judged_by, **shares, **swings}


def plot(sways: Sequence[Sway], title: str, path: Path) -> None:
    """Draw both loads over time; ConfigError without matplotlib."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - an extra that only plots need
    except ImportError as error:
        raise ConfigError("--plot: needs matplotlib: pip install 'pdserve[plots]'") from error
    figure = Figure(figsize=(8, 2.6 * len(sways)))
    rows = figure.subplots(len(sways), 1, sharex=True, sharey=True)
    for axes, sway in zip(rows, sways, strict=True):
        axes.plot(sway.at_s, sway.decoding, linewidth=1, label="requests between first and last token")
        axes.plot(sway.at_s, sway.prefilling, linewidth=1, label="requests being prefilled")
        text = f"by {sway.judged_by}: {sway.attainment:.0%} within both objectives, {sway.slow:.0%} admitted but slow"
        axes.set_title(text, fontsize="medium")
        axes.grid(alpha=0.3)
    rows[0].legend(fontsize="small", loc="upper right")
    rows[-1].set_xlabel("seconds")
    figure.suptitle(title, fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=110, bbox_inches="tight")
