"""Reports of measurements: one HTML file each, readable offline, in dark and light, without scripts."""

from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import jinja2

from pdserve import __version__
from pdserve.measure import plots
from pdserve.measure.load import Run
from pdserve.measure.outcomes import Objective, Outcome, Summary
from pdserve.measure.plots import Bar, Line, Plot, Timeline, plot, shares, timeline
from pdserve.measure.tables import Comparison, compared
from pdserve.reports import Stage
from pdserve.router.timeline import parts

MAX_ROWS = 60  # of a timeline
_TEMPLATES = Path(__file__).parent / "static"


def write_page(
    path: Path, title: str, note: str, table: Comparison, charts: Sequence[Plot], timelines: Sequence[Timeline] = ()
) -> None:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    made = f"pdserve {__version__}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    page = environment.get_template("report.html").render(
        title=title, note=note, made=made, table=table, charts=charts, timelines=timelines, plots=plots
    )
    path.write_text(page, encoding="utf-8")


def write_report(path: Path, title: str, runs: Sequence[Run], objective: Objective) -> None:
    """Write a report of load runs, with where the time of their requests went."""
    charts = [*_over_rate(runs), *_distributions(runs)]
    timelines = [timeline for run in runs for timeline in _timelines(run)]
    note = f"Goodput counts requests that ended well ({objective})"
    write_page(path, title, note, compared(run.summary for run in runs), charts, timelines)


def _distributions(runs: Sequence[Run]) -> list[Plot]:
    times: tuple[tuple[str, Callable[[Outcome], float | None]], ...] = (
        ("Time to first token", lambda outcome: outcome.ttft_s),
        ("Mean time per later token", lambda outcome: outcome.tpot_s),
    )
    charts = []
    for title, time_of in times:
        seen = [[1e3 * time for each in run.outcomes if (time := time_of(each)) is not None] for run in runs]
        lines = [Line(run.summary.name, shares(values)) for run, values in zip(runs, seen, strict=True)]
        charts.append(plot(title, ("ms", "% of requests"), lines, y_end=100.0))
    return charts


def _over_rate(runs: Sequence[Run]) -> list[Plot]:
    """Return what changes with the rate; nothing where no workload was sent at several."""
    rated = [(run.workload, run.rate_per_s, run) for run in runs if run.rate_per_s is not None]
    rated.sort(key=itemgetter(0, 1))
    swept = {name: [run for *_, run in group] for name, group in groupby(rated, key=itemgetter(0))}
    if max(map(len, swept.values()), default=0) < 2:
        return []

    def line(name: str, value: Callable[[Summary], float]) -> Line:
        return Line(name, [(run.rate_per_s or 0.0, value(run.summary)) for run in swept[name]])

    def over(title: str, unit: str, value: Callable[[Summary], float], y_end: float = 0.0) -> Plot:
        lines = [line(name, value) for name in swept]
        return plot(title, ("requests sent per second", unit), lines, y_end=y_end, has_marks=True)

    return [
        over("Goodput", "requests per second within the objectives", lambda summary: summary.goodput_per_s),
        over("Attainment", "% of requests within the objectives", lambda summary: 100 * summary.attainment, 100.0),
        over("Time to first token, 90th percentile", "ms", lambda each: 1e3 * each.ttft_s.p90 if each.ttft_s else 0.0),
        over("Time per token, 90th percentile", "ms", lambda each: 1e3 * each.tpot_s.p90 if each.tpot_s else 0.0),
    ]


def _timelines(run: Run) -> Iterator[Timeline]:
    """Yield what the first requests that ended well went through: from arrival to decoding, and over the run."""
    shown = sorted((each for each in run.rounds[-1] if each.stages_s), key=lambda each: each.sent_s)[:MAX_ROWS]
    rows = [
        (f"request {each.number}, {each.prompt_tokens} + {each.num_tokens} tokens", each.sent_s, _bars(each))
        for each in shown
    ]
    before = [(label, [bar for bar in bars if bar[0] != "decode"]) for label, _, bars in rows]
    yield timeline(f"{run.summary.name}: from arrival to decoding", "ms after arrival", before)
    over = [
        (label, [(name, sent_s + start / 1e3, sent_s + end / 1e3) for name, start, end in bars])
        for label, sent_s, bars in rows
    ]
    yield timeline(f"{run.summary.name}: over the run", "seconds of the run", over)


def _bars(outcome: Outcome) -> list[Bar]:
    """Return name, start and end of each part of a request's time, ms after its arrival."""
    stages = sorted(((Stage(name), 1e3 * at_s) for name, at_s in outcome.stages_s.items()), key=lambda step: step[1])
    return list(parts(stages))
