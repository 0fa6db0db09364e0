"""The command that runs a file of requests."""

import os
from pathlib import Path
from typing import Annotated

import typer

from pdserve.cli.options import CaFile

BatchFile = Annotated[
    Path, typer.Argument(metavar="FILE.jsonl", help="Requests in OpenAI's batch format, one on each line.")
]
OutputFile = Annotated[
    Path,
    typer.Option(
        "--output", "-o", metavar="OUT.jsonl", help="Results. Those that are there from an earlier run are kept."
    ),
]


def run_batch(
    file: BatchFile,
    output: OutputFile,
    server: Annotated[str, typer.Option(help="Where OpenAI's API is served, http://host:port.")],
    max_concurrency: Annotated[int, typer.Option(min=1, help="Requests under way at once.")] = 64,
    max_retries: Annotated[
        int, typer.Option(min=0, help="Tries after the first, where a server is not there or has no room.")
    ] = 20,
    ca_file: CaFile = None,
) -> None:
    """Send the requests of a file, and write their results. Repeated, it goes on where it ended.

    Exit status: 0 if each request has its answer, 1 if some failed, 2 if the file is no batch.
    """
    import asyncio

    from rich.console import Console

    from pdserve.batch import Pace, Tally, check, client, run_batch
    from pdserve.cli.stream import API_KEY
    from pdserve.errors import CommandError
    from pdserve.measure.tables import counted

    total = check(file)

    async def send() -> Tally:
        with counted(Console(stderr=True), file.name, total) as advance:
            async with client(server, os.environ.get(API_KEY, ""), ca_file) as http:
                return await run_batch(file, output, http, Pace(max_concurrency, max_retries), advance)

    tally = asyncio.run(send())
    skipped = f", {tally.num_skipped} were there already" if tally.num_skipped else ""
    typer.echo(f"{tally.num_done} answered, {tally.num_failed} failed{skipped}", err=True)
    if tally.num_failed:
        raise CommandError(f"{output}: {tally.num_failed} requests have no answer")
