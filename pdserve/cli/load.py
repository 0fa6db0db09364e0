"""The command that measures a running cluster."""

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pdserve.cli.options import ClusterName, Endpoint
from pdserve.cli.output import JsonFile, show

if TYPE_CHECKING:
    from pdserve.bench.summary import Slo, Summary
    from pdserve.bench.workload import Workload


def bench(
    more: Annotated[
        list[str] | None, typer.Argument(metavar="[WORKLOAD]...", help="More workloads.", show_default=False)
    ] = None,
    *,
    workload: Annotated[
        list[str] | None,
        typer.Option(
            help="NUMxINxOUT: requests, prompt tokens, answer tokens; or a trace, by its path (.csv of Azure, .jsonl "
            "of Mooncake) or the name of a slice that comes with pdserve (azure-conv, azure-code, mooncake); "
            "repeatable.",
            show_default=False,
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="JSON list of {start_time (s), prompt_len, output_len}.", show_default=False),
    ] = None,
    scale: Annotated[float, typer.Option(help="Stretch a trace's time by this much.")] = 1.0,
    rate: Annotated[
        float | None,
        typer.Option(help="Requests a second at random moments; by default all at once.", show_default=False),
    ] = None,
    slo: Annotated[str, typer.Option(help="Objective for goodput: ttft=MS,tpot=MS.", show_default=False)] = "",
    seed: Annotated[int, typer.Option(help="Of the prompts and the arrivals.")] = 0,
    json_file: JsonFile = None,
    endpoint: Endpoint = None,
    name: ClusterName = "default",
) -> None:
    """Send workloads of random prompts, greedy and to full length, and measure what a client sees."""
    from pdserve.bench import report
    from pdserve.bench import workload as workloads
    from pdserve.bench.summary import Slo, parse_slo
    from pdserve.errors import ConfigError
    from pdserve.launch.state import read_state

    runs = [_parse(text, scale) for text in (*(workload or ()), *(more or ()))]
    if trace is not None:
        runs.append(workloads.read_trace(trace, scale))
    if not runs:
        raise ConfigError("--workload or --trace is needed, for example --workload 16x32x128")
    if rate is not None:
        runs = [workloads.poisson(run, rate, seed) for run in runs]
    goal = parse_slo(slo) if slo else Slo()
    summaries = asyncio.run(_measure(endpoint or read_state(name).endpoint, runs, goal, seed))
    text = report.as_json(summaries, goal)
    show(json_file, text, report.table(summaries), report.parts_table(summaries), report.objective(goal))


def _parse(text: str, scale: float) -> "Workload":
    """Return what is written NUMxINxOUT, or the requests of a trace."""
    from pdserve.bench import workload as workloads
    from pdserve.capacity.workload import read_workload, trace_path

    path = trace_path(text)
    if not path.suffix:
        return workloads.parse(text)
    trace = read_workload(path)
    start_s = trace.arrivals[0].at_s
    arrivals = [
        workloads.Arrival(each.at_s - start_s, each.prompt_tokens, each.output_tokens) for each in trace.arrivals
    ]
    return workloads.stretched(workloads.Workload(trace.name, tuple(arrivals)), scale)


async def _measure(endpoint: str, runs: "Sequence[Workload]", slo: "Slo", seed: int) -> "list[Summary]":
    import grpc
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from pdserve.bench.client import LoadClient, connect
    from pdserve.bench.summary import summarize
    from pdserve.bench.workload import prompts
    from pdserve.cli.stream import failure
    from pdserve.clock import MonotonicClock

    summaries = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        async with connect(endpoint) as channel:
            client = LoadClient(channel, MonotonicClock(), slo)
            try:
                vocab_size = await client.vocab_size()
            except grpc.aio.AioRpcError as error:
                raise failure(endpoint, error) from error
            for run in runs:
                task = progress.add_task(run.name, total=len(run.arrivals))
                token_ids = prompts(run.arrivals, vocab_size, seed)
                samples = await client.run(run.arrivals, token_ids, partial(progress.advance, task))
                summaries.append(summarize(run.name, samples, slo))
    return summaries
