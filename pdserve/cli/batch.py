"""The command that runs a file of requests."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pdserve.cli.options import CaFile, ClusterName, key_for
from pdserve.cli.results import report, run, writable
from pdserve.errors import CommandError, ConfigError

if TYPE_CHECKING:
    from pdserve.batch import Tally

BatchFile = Annotated[
    Path, typer.Argument(metavar="FILE.jsonl", help="Requests in OpenAI's batch format, one on each line.")
]
OutputFile = Annotated[
    Path,
    typer.Option(
        "--output",
        "-o",
        metavar="OUT.jsonl",
        help="Results. Those that are there from an earlier run are kept.",
        callback=writable("--output"),
    ),
]


def run_batch(
    file: BatchFile,
    output: OutputFile,
    server: Annotated[
        str | None,
        typer.Option(help="Where OpenAI's API is served, http://host:port; by default by the cluster that runs here."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Start a cluster of this model for the length of the command.")
    ] = None,
    max_concurrency: Annotated[int, typer.Option(min=1, help="Requests under way at once.")] = 64,
    max_retries: Annotated[
        int, typer.Option(min=0, help="Tries after the first, where a server is not there or has no room.")
    ] = 20,
    ca_file: CaFile = None,
    name: ClusterName = "default",
) -> None:
    """Send the requests of a file, and write their results. Repeated, it goes on where it ended.

    Exit status: 0 if each request has its answer, 1 if some failed, 2 if the file is no batch.
    """
    from rich.console import Console

    from pdserve.batch import check, check_output, client, run_batch
    from pdserve.measure.tables import counted

    if server is not None and model is not None:
        raise ConfigError("--model: a cluster is started, and --server names another")
    total = check(file)
    check_output(output, file)  # before a cluster is started

    async def send() -> "Tally":
        async with _served(server, model, name, ca_file) as (url, believed):
            with counted(Console(stderr=True), file.name, total) as advance:
                async with client(url, key_for(url), believed) as http:
                    return await run_batch(file, output, http, max_concurrency, max_retries, advance)

    tally = run(send())
    skipped = f", {tally.num_skipped} were there already" if tally.num_skipped else ""
    typer.echo(f"{tally.num_done} answered, {tally.num_failed} failed{skipped}", err=True)
    if tally.num_failed:
        raise CommandError(f"{output}: {tally.num_failed} requests have no answer")


@asynccontextmanager
async def _served(
    server: str | None, model: str | None, name: str, ca_file: Path | None
) -> AsyncIterator[tuple[str, Path | None]]:
    """Yield the URL of the API, and the certificates that its own must lead to."""
    from pdserve.cli.models import fetched, model_name
    from pdserve.launch.folder import read_state
    from pdserve.launch.plan import ClusterSpec
    from pdserve.measure.live import live_cluster

    if server is not None:
        yield server, ca_file
    elif model is not None:
        spec = ClusterSpec(str(fetched(model)), model_name(model), name=f"batch-{os.getpid()}")
        async with live_cluster(spec, report) as cluster:
            yield cluster.state.http, None
    else:
        state = read_state(name)
        if not state.http:
            raise ConfigError(f"--server: the cluster named {name!r} serves no HTTP")
        yield state.http, ca_file or state.ca_file
