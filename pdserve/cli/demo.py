"""Show that it works: a cluster answers one question."""

import asyncio
import signal

import typer

from pdserve.cli.failure import CommandError
from pdserve.cli.requests import add_message, new_request, sampling
from pdserve.cli.running import Terminal, ready_line, until_ready
from pdserve.cli.stream import ask, ledger_line
from pdserve.launch.local import LaunchError, running
from pdserve.launch.plan import ClusterSpec

MAX_TOKENS = 64


async def run_demo(spec: ClusterSpec, terminal: Terminal, question: str, expect: str) -> None:
    """Run a cluster for one question; CommandError unless the streamed answer contains `expect`."""
    stopping = asyncio.Event()
    try:
        async with running(spec, terminal.listener) as cluster:
            for number in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(number, stopping.set)
            if not await until_ready(cluster, terminal, stopping):
                raise CommandError("interrupted before the cluster was ready")
            terminal.notice(ready_line(cluster, terminal.status))
            text = await _question(cluster.state.endpoint, question)
    except LaunchError as error:
        raise CommandError(str(error)) from error
    if expect not in text:
        raise CommandError(f"the answer does not contain {expect!r}")


async def _question(endpoint: str, question: str) -> str:
    params = sampling(temperature=0.0)
    params.max_tokens = MAX_TOKENS
    request = new_request(params, [])
    add_message(request, "user", question)
    typer.echo(f"> {question}")
    answer = await ask(endpoint, request, lambda _index, text: typer.echo(text, nl=False))
    typer.echo()
    typer.echo(ledger_line(answer.usage, answer.ledger))
    return answer.texts[0]
