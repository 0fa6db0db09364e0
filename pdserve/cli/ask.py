"""Commands that ask for text: one answer, a talk, and a file of requests."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pdserve.base.errors import CommandError, ConfigError
from pdserve.cli import results
from pdserve.cli.flags import grouped_flags
from pdserve.cli.options import (
    THIS_MACHINES_ROUTER,
    AsJson,
    CaFile,
    ClusterName,
    HttpServer,
    RouterFlags,
    SamplingFlags,
    key_for,
    utf8,
)
from pdserve.protocol.sampling import MAX_SEQUENCES

if TYPE_CHECKING:
    from pdserve.cli.batch import Tally
    from pdserve.cli.stream import Answer
    from pdserve.measure.client import Access
    from pdserve.proto.v1 import inference_pb2 as inference

    Router = tuple[str, Access | None]

_SHORT, _LONG = SamplingFlags(max_tokens=128), SamplingFlags(max_tokens=512)

# What a model writes must not drive the terminal: control characters are shown, not obeyed.
VISIBLE = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


AskedModel = Annotated[
    str, typer.Option(help="Name of the model to ask; needed with --endpoint where several are served there.")
]


@grouped_flags
def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue.")],
    router: RouterFlags = THIS_MACHINES_ROUTER,
    sampling: SamplingFlags = _SHORT,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end of the answer.")] = False,
    n: Annotated[int, typer.Option(min=1, max=MAX_SEQUENCES, help="How many continuations.")] = 1,
    model: AskedModel = "",
    as_json: AsJson = False,
) -> None:
    """Continue a text; stream it as it is computed, then print where the time went."""
    request = sampling.request(n=n, ignore_eos=ignore_eos)
    request.text, request.model = utf8("PROMPT", prompt), router.model(model)
    answer = _run(router.router(), request, _quiet if as_json or n > 1 else _show)
    _print(answer, as_json=as_json)


@grouped_flags
def chat(
    once: Annotated[str | None, typer.Option(help="Send this one message and end.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    router: RouterFlags = THIS_MACHINES_ROUTER,
    sampling: SamplingFlags = _LONG,
    model: AskedModel = "",
    as_json: AsJson = False,
) -> None:
    """Talk with the model. Ctrl-C ends an answer, Ctrl-D the talk."""
    from pdserve.cli.stream import add_message

    request = sampling.request()
    request.model = router.model(model)
    if system is not None:
        add_message(request, "system", utf8("--system", system))
    once = None if once is None else utf8("--once", once)
    reached = router.router()  # before anything is typed
    on_text = _quiet if as_json else _show
    all_answered = True
    while (message := once if once is not None else _read_line()) is not None:
        add_message(request, "user", message)
        try:
            answer = _run(reached, request, on_text)
        except (KeyboardInterrupt, CommandError, ConfigError) as error:
            if once is not None:
                raise
            del request.chat.messages[-1]  # the conversation goes on as if this had not been asked
            all_answered &= isinstance(error, KeyboardInterrupt)
            typer.echo(f"\n{error}".rstrip(), err=True)
            continue
        add_message(request, "assistant", answer.texts[0])
        _print(answer, as_json=as_json)
        if once is not None:
            break
    if not all_answered and not sys.stdin.isatty():  # nobody has read why
        raise typer.Exit(1)


def _read_line() -> str | None:
    import readline  # noqa: F401  (editing and history for input)

    try:
        while True:
            if line := input("> ").strip():
                return line
    except EOFError:
        return None


def _run(router: "Router", request: "inference.GenerateRequest", on_text: Callable[[int, str], None]) -> "Answer":
    from pdserve.cli.stream import ask

    address, access = router
    return asyncio.run(ask(address, request, on_text, access))


def _show(_index: int, text: str) -> None:
    typer.echo(text.translate(VISIBLE), nl=False)


def _quiet(_index: int, _text: str) -> None:
    pass


def _print(answer: "Answer", *, as_json: bool) -> None:
    """End what was streamed, or print what was not. Where the time went is no part of the answer: it is on stderr."""
    from pdserve.cli.stream import as_dict, ledger_line

    if as_json:
        typer.echo(json.dumps(as_dict(answer), ensure_ascii=False))
        return
    if len(answer.texts) == 1:
        typer.echo()
    else:
        for index, text in enumerate(answer.texts):
            typer.echo(f"[{index}] {text.translate(VISIBLE)}")
    typer.secho(ledger_line(answer.usage, answer.ledger), dim=True, err=True)


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
        callback=results.writable("--output"),
    ),
]


def run_batch(
    file: BatchFile,
    output: OutputFile,
    server: HttpServer = None,
    model: Annotated[
        str | None, typer.Option(help="Start a cluster of this model for the length of the command.")
    ] = None,
    max_concurrency: Annotated[int, typer.Option(min=1, help="Requests under way at once.")] = 64,
    max_retries: Annotated[
        int, typer.Option(min=0, help="Tries after the first, where a server is not there or has no room.")
    ] = 20,
    skip_bad_lines: Annotated[
        bool, typer.Option("--skip-bad-lines", help="Leave out lines that are no requests; OUTPUT.errors names each.")
    ] = False,
    ca_file: CaFile = None,
    name: ClusterName = "default",
) -> None:
    """Send the requests of a file, and write their results. Repeated, it goes on where it ended.

    Exit status: 0 if each request has its answer, 1 if some failed or a line was left out, 2 if the file is no batch.
    """
    from pdserve.cli.batch import check, check_output, client, run_batch
    from pdserve.measure.tables import counted

    if server is not None and model is not None:
        raise ConfigError("--model: a cluster is started, and --server names another")
    check_output(output, file)  # before a cluster is started
    bad_lines = output.with_name(f"{output.name}.errors") if skip_bad_lines else None
    total = check(file, bad_lines)

    async def send() -> "Tally":
        async with _served(server, model, name, ca_file) as (url, believed):
            with counted(file.name, total) as advance:
                async with client(url, key_for(url), believed) as http:
                    return await run_batch(file, output, http, max_concurrency, max_retries, advance)

    tally = results.run(send())
    skipped = f", {tally.num_skipped} were there already" if tally.num_skipped else ""
    typer.echo(f"{tally.num_done} answered, {tally.num_failed} failed{skipped}", err=True)
    if tally.num_failed:
        raise CommandError(f"{output}: {tally.num_failed} requests have no answer")
    if bad_lines is not None and bad_lines.stat().st_size:
        raise CommandError(f"{bad_lines}: names the lines of {file} that are no requests")


@asynccontextmanager
async def _served(
    server: str | None, model: str | None, name: str, ca_file: Path | None
) -> AsyncIterator[tuple[str, Path | None]]:
    """Yield the URL of the API, and the certificates that its own must lead to."""
    from pdserve.cli.models import cluster_of
    from pdserve.launch.folder import read_state
    from pdserve.measure.live import live_cluster

    if server is not None:
        yield server, ca_file
    elif model is not None:
        async with live_cluster(cluster_of(model, f"batch-{os.getpid()}"), results.report) as cluster:
            yield cluster.state.http, None
    else:
        state = read_state(name)
        if not state.http:
            raise ConfigError(f"--server: the cluster named {name!r} serves no HTTP")
        yield state.http, ca_file or state.ca_file
