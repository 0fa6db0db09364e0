"""`pdserve bench chaos`: requests against a cluster whose workers are killed, and every token checked."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pdserve.cli.options import Dtype
from pdserve.cli.output import JsonFile, show

if TYPE_CHECKING:
    from pdserve.cli.chaos_run import Verdict


def bench_chaos(
    model: Annotated[str, typer.Argument(help="A path, or a name from the catalog.")],
    requests: Annotated[int, typer.Option(min=1, help="Requests sent.")] = 1000,
    clients: Annotated[int, typer.Option(min=1, help="Requests under way at once.")] = 8,
    distinct: Annotated[int, typer.Option(min=1, help="Different requests; they are sent in turn.")] = 200,
    prompt: Annotated[int, typer.Option(min=8, help="Longest prompt, in tokens.")] = 512,
    answer: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 48,
    kill_every: Annotated[float, typer.Option(min=0, help="Seconds between two kills of a worker; 0: none.")] = 5.0,
    freeze_for: Annotated[
        float | None, typer.Option(help="Freeze workers for so many seconds instead of killing.", show_default=False)
    ] = None,
    fail_copies: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the copies between workers that are made to fail.")
    ] = 0.0,
    baseline: Annotated[int, typer.Option(min=0, help="Requests sent without any fault first, to compare.")] = 0,
    prefill: Annotated[int, typer.Option("--prefill", help="Prefill workers.")] = 2,
    decode: Annotated[int, typer.Option("--decode", help="Decode workers.")] = 2,
    dtype: Dtype = "float32",
    mover: Annotated[str | None, typer.Option(help="The workers' --mover.", show_default=False)] = None,
    pool_grace: Annotated[float | None, typer.Option(help="The router's --pool-grace-s.", show_default=False)] = None,
    threads: Annotated[
        int | None, typer.Option(help="CPU threads of each worker's engine.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the requests and the faults.")] = 0,
    json_file: JsonFile = None,
) -> None:
    """Kill workers of a local cluster while requests run; check each answer against one engine alone.

    Fails unless every request was answered with the right tokens and every page was free in the end.
    """
    from rich.console import Console

    from pdserve.bench.asks import Lengths
    from pdserve.cli.chaos_run import Trial, expected, run_trial
    from pdserve.cli.models import fetched
    from pdserve.launch.havoc import HavocPlan
    from pdserve.launch.plan import ClusterSpec

    spec = ClusterSpec(
        model=str(fetched(model)),
        served_model_name="chaos",
        num_prefill=prefill,
        num_decode=decode,
        name=f"chaos-{seed}",
        worker_flags={"dtype": dtype, "mover": mover, "num_threads": threads},
        router_flags={"pool_grace_s": pool_grace},
    )
    faulty = replace(spec, worker_flags={**spec.worker_flags, "test_fail_copies": fail_copies or None})
    console = Console(stderr=True)
    asks, due = expected(spec.model, dtype, distinct, Lengths(prompt, answer), seed)
    trials = [Trial("faultless", spec, baseline, clients, None)] if baseline else []
    trials.append(
        Trial("chaos", faulty, requests, clients, HavocPlan(kill_every, freeze_for, seed) if kill_every else None)
    )
    verdicts = [asyncio.run(run_trial(trial, asks, due, console)) for trial in trials]
    _conclude(verdicts, json_file)


def _conclude(verdicts: "Sequence[Verdict]", json_file: Path | None) -> None:
    """Show what came of it; CommandError unless all of it is as it has to be."""
    from pdserve.cli.chaos_report import as_json, failures, is_clean, table
    from pdserve.errors import CommandError

    show(json_file, as_json(verdicts), table(verdicts), *failures(verdicts))
    if not all(map(is_clean, verdicts)):
        raise CommandError("not every request was answered as it had to be, or pages were not given back")
