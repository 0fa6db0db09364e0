"""`pdserve bench routers`: several routers over one set of workers."""

import asyncio
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from pdserve.cli.experiments import (
    AZURE_MEANS,
    DEFAULT_MODEL,
    Calibration,
    JsonFile,
    MaxTokens,
    Model,
    Scale,
    Seconds,
    Seed,
    Threads,
    WorkloadText,
    cluster_spec,
    save,
    show,
    tell,
)

if TYPE_CHECKING:
    from rich.table import Table

    from pdserve.experiments.routers import Findings


def bench_routers(
    model: Model = DEFAULT_MODEL,
    workload: WorkloadText = AZURE_MEANS,
    scale: Scale = 0.125,
    max_tokens: MaxTokens = 1024,
    routers: Annotated[int, typer.Option(min=2, help="Routers over the same two prefill and two decode workers.")] = 4,
    threads: Threads = 1,
    load: Annotated[list[float] | None, typer.Option(help="Share of the capacity; repeatable.")] = None,
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
    found = asyncio.run(measure_routers(spec, trial, tell))
    for table in _tables(found, lengths.name):
        show(table)
    save(json_file, json.dumps({"workload": lengths.name, **asdict(found)}, indent=1) + "\n")


def _tables(found: "Findings", title: str) -> "list[Table]":
    from rich.table import Table

    from pdserve.experiments.report import error_cells

    late = Table(title="Routers that started after prompts were cached; seconds")
    for column in ("router", "listening after", "workers attached after", "prompts found", "all answered by"):
        late.add_column(column, justify="left" if column == "router" else "right")
    for each in found.late:
        times = (f"{each.listening_s:.2f}", f"{each.complete_s:.2f}")
        late.add_row(each.name, *times, f"{each.found} of {each.asked}", f"{each.asked_by_s:.2f}")
    errors = Table(title=f"{title}; capacity {found.capacity_per_s:.2f} requests/s")
    for column in ("load", "requests", "TTFT error p50", "p90", "predicted/seen", "TPOT error p50", "p90"):
        errors.add_column(column, justify="right")
    errors.add_column("predicted/seen", justify="right")
    for run in found.runs:
        errors.add_row(run.name, str(run.num_requests), *error_cells(run.ttft), *error_cells(run.tpot))
    return [late, errors]
