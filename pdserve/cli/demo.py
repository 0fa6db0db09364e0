"""Show that it works: a cluster answers one question."""

import typer

from pdserve.cli.requests import add_message, new_request, sampling
from pdserve.cli.running import Terminal, first_of, ready_line, until_ready, until_signal
from pdserve.cli.stream import ask, ledger_line
from pdserve.errors import CommandError
from pdserve.files import ReadyFile
from pdserve.launch.plan import ClusterSpec

MAX_TOKENS = 64


async def run_demo(spec: ClusterSpec, terminal: Terminal, question: str, expect: str) -> None:
    """Run a cluster for one question; CommandError unless the streamed answer contains `expect`."""
    texts: list[str] = []
    async with until_signal(spec, terminal, ReadyFile(None)) as (cluster, stop):
        if await until_ready(cluster, terminal, stop):
            terminal.notice(ready_line(cluster, terminal.status))
            await first_of(_question(cluster.state.endpoint, question, texts), stop.asked.wait())
    if expect not in "".join(texts):
        raise CommandError(f"the answer does not contain {expect!r}")


async def _question(endpoint: str, question: str, texts: list[str]) -> None:
    params = sampling(temperature=0.0)
    params.max_tokens = MAX_TOKENS
    request = new_request(params, [])
    add_message(request, "user", question)
    typer.echo(f"> {question}")
    answer = await ask(endpoint, request, lambda _index, text: typer.echo(text, nl=False))
    typer.echo()
    typer.echo(ledger_line(answer.usage, answer.ledger), err=True)
    texts += answer.texts
