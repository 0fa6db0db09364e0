"""`pdserve bench routers`: several routers over one set of workers."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from pdserve.cli.experiments import (
    AZURE_MEANS,
    DEFAULT_MODEL,
    Calibration,
    Loads,
    MaxTokens,
    Model,
    Scale,
    Seconds,
    Seed,
    Threads,
    WorkloadText,
    cluster_spec,
    run,
    tell,
)
from pdserve.cli.output import JsonFile, show

if TYPE_CHECKING:
    from pdserve.bench.tables import Sheet
    from pdserve.experiments.routers import Findings


def bench_routers(
    model: Model = DEFAULT_MODEL,
    workload: WorkloadText = AZURE_MEANS,
    scale: Scale = 0.125,
    max_tokens: MaxTokens = 1024,
    routers: Annotated[int, typer.Option(min=2, help="Routers over the same two prefill and two decode workers.")] = 4,
    threads: Threads = 1,
    load: Loads = None,
    seconds: Seconds = 45,
    rounds: Annotated[int, typer.Option(min=1, help="Of a run with one router and a run with all.")] = 2,
    calibration: Calibration = 60,
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """Compare one router's predictions with those of several, and see whether late ones know what is cached."""
    from pdserve.experiments.lengths import read_lengths
    from pdserve.experiments.routers import Trial, measure_routers

    lengths = read_lengths(workload, scale, max_tokens, seed)
    loads = tuple(load or (0.6,))
    trial = Trial(lengths, routers, loads, calibration, seconds, rounds, seed=seed)
    spec = cluster_spec(model, (2, 2), {"policy": "goodput"}, threads)
    found = run(measure_routers(spec, trial, tell))
    text = json.dumps({"workload": lengths.name, **asdict(found)}, indent=1) + "\n"
    show(json_file, text, *_sheets(found, lengths.name))


def _sheets(found: "Findings", title: str) -> "list[Sheet]":
    from pdserve.bench.tables import Column, Sheet
    from pdserve.experiments.report import error_sheet

    columns = (
        Column("router", is_text=True),
        Column("listening after", "s", rank=2),
        Column("workers attached after", "s", rank=1),
        Column("prompts found"),
        Column("last miss after", "s"),
        Column("all answered after", "s", rank=3),
    )
    rows = [
        (
            each.name,
            f"{each.listening_s:.2f}",
            f"{each.complete_s:.2f}",
            f"{each.found} of {each.asked}",
            f"{each.missed_until_s:.2f}",
            f"{each.asked_by_s:.2f}",
        )
        for each in found.late
    ]
    late = Sheet("Routers that started after prompts were cached", columns, rows)
    return [late, error_sheet(found.runs, found.capacity_per_s, title)]
