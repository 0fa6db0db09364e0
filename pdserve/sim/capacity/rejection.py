"""Early rejection by the decode load of the moment against by the load predicted for the end of the prefill.

A request joins its decode worker some time after it was admitted. Judged by the present load, a worker looks empty
until those admitted in the meantime arrive, all at once, and full until they have left: admission and load swing
against each other (Mooncake, Qin et al., FAST 2025). Counting what is on its way is the cure. Neither way is helped
here by margins learnt from past errors, which would hide a part of the difference.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, pstdev

from rich.table import Table

from pdserve.errors import ConfigError
from pdserve.sim.capacity.cluster import simulate
from pdserve.sim.capacity.measure import Question
from pdserve.sim.capacity.shape import Run, Shape

_NUM_SAMPLES = 300
_SETTLED = 0.15  # share of the time after which the cluster is taken to have settled


@dataclass(frozen=True, slots=True)
class Sway:
    """What one way to judge led to."""

    judged_by: str
    attainment: float
    refused: float  # share of all requests
    slow: float  # share that was admitted, and missed its time per token
    at_s: tuple[float, ...]
    decoding: tuple[int, ...]  # requests between their first and last token, at these times
    refusals: tuple[int, ...]  # since the time before

    @property
    def swing(self) -> float:
        """How far the decode load strays from its mean, as a share of it."""
        settled = self.decoding[round(_SETTLED * len(self.decoding)) :]
        return pstdev(settled) / max(1e-9, fmean(settled))


def compare(question: Question, shape: Shape, rate: float) -> tuple[Sway, Sway]:
    """Simulate the goodput policy under one load, judging by the present and by the predicted decode load."""
    workload = question.workload.at_rate(rate)
    runs = [
        simulate(
            question.profile,
            replace(shape, knows_arrivals=knows, widens=False),
            "goodput",
            workload,
            question.objective,
        )
        for knows in (False, True)
    ]
    return _sway(runs[0], question, "present load"), _sway(runs[1], question, "predicted load")


def _sway(run: Run, question: Question, judged_by: str) -> Sway:
    outcomes, objective = run.outcomes, question.objective
    end_s = max(outcome.arrival.at_s for outcome in outcomes)
    times = tuple((i + 1) * end_s / _NUM_SAMPLES for i in range(_NUM_SAMPLES))
    served = [outcome for outcome in outcomes if not outcome.refused]
    refused_at = [outcome.arrival.at_s for outcome in outcomes if outcome.refused]
    counts = [sum(at_s <= time_s for at_s in refused_at) for time_s in times]
    return Sway(
        judged_by=judged_by,
        attainment=sum(outcome.meets(objective) for outcome in outcomes) / len(outcomes),
        refused=len(refused_at) / len(outcomes),
        slow=sum(outcome.tpot_s > objective.tpot_s for outcome in served) / len(outcomes),
        at_s=times,
        decoding=tuple(sum(each.first_s <= time_s < each.last_s for each in served) for time_s in times),
        refusals=tuple(now - before for before, now in zip([0, *counts], counts, strict=False)),
    )


def table(sways: Sequence[Sway], title: str) -> Table:
    rows = Table(title=title)
    for column in ("admission by", "within both", "refused", "slow", "decoding, mean", "swing"):
        rows.add_column(column, justify="left" if column == "admission by" else "right")
    for sway in sways:
        shares = (f"{share:.1%}" for share in (sway.attainment, sway.refused, sway.slow))
        rows.add_row(sway.judged_by, *shares, f"{fmean(sway.decoding):.1f}", f"{sway.swing:.2f}")
    return rows


def plot(sways: Sequence[Sway], title: str, path: Path) -> None:
    """Draw decode load and refusals over time; ConfigError without matplotlib."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - an extra that only plots need
    except ImportError as error:
        raise ConfigError("--plot: needs matplotlib: pip install 'pdserve[plots]'") from error
    figure = Figure(figsize=(7, 2.4 * len(sways)))
    rows = figure.subplots(len(sways), 1, sharex=True, sharey=True)
    for axes, sway in zip(rows, sways, strict=True):
        axes.plot(sway.at_s, sway.decoding, label="requests that decode")
        axes.bar(sway.at_s, sway.refusals, width=sway.at_s[0], color="tab:red", alpha=0.5, label="refused in that time")
        axes.set_title(f"by {sway.judged_by}: {sway.attainment:.0%} within both objectives", fontsize="medium")
        axes.grid(alpha=0.3)
    rows[0].legend(fontsize="small")
    rows[-1].set_xlabel("seconds")
    figure.suptitle(title, fontsize="medium")
    figure.tight_layout()
    figure.savefig(path, dpi=110, bbox_inches="tight")
