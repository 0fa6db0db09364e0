"""Commands that ask a running cluster for text."""

import asyncio
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from pdserve.cli.options import (
    AsJson,
    ClusterName,
    Endpoint,
    MaxTokens,
    MinP,
    Seed,
    Stop,
    Temperature,
    TopK,
    TopP,
)

if TYPE_CHECKING:
    from pdserve.cli.stream import Answer
    from pdserve.proto.v1 import inference_pb2 as inference

# What a model writes must not drive the terminal: control characters are shown, not obeyed.
VISIBLE = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue.")],
    *,
    endpoint: Endpoint = None,
    name: ClusterName = "default",
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    seed: Seed = None,
    max_tokens: MaxTokens = 128,
    stop: Stop = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end of the answer.")] = False,
    n: Annotated[int, typer.Option(help="How many continuations.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Continue a text; stream it as it is computed, then say where the time went."""
    from pdserve.cli.requests import new_request, sampling

    params = sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    params.max_tokens, params.n, params.ignore_eos = max_tokens, n, ignore_eos
    request = new_request(params, stop or [])
    request.text = prompt
    answer = _run(endpoint, name, request, _quiet if as_json or n > 1 else _show)
    if as_json:
        _print_json(answer)
        return
    if n > 1:
        for index, text in enumerate(answer.texts):
            typer.echo(f"[{index}] {text.translate(VISIBLE)}")
    _print_ledger(answer)


def chat(
    *,
    once: Annotated[str | None, typer.Option(help="Send this one message and end.", show_default=False)] = None,
    system: Annotated[str | None, typer.Option(help="System message.", show_default=False)] = None,
    endpoint: Endpoint = None,
    name: ClusterName = "default",
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    seed: Seed = None,
    max_tokens: MaxTokens = 512,
    stop: Stop = None,
    as_json: AsJson = False,
) -> None:
    """Talk with the model. Ctrl-C ends an answer, Ctrl-D the talk."""
    from pdserve.cli.requests import add_message, new_request, sampling

    params = sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    params.max_tokens = max_tokens
    request = new_request(params, stop or [])
    if system is not None:
        add_message(request, "system", system)
    while (message := once if once is not None else _read_line()) is not None:
        add_message(request, "user", message)
        try:
            answer = _run(endpoint, name, request, _quiet if as_json else _show)
        except KeyboardInterrupt:  # ends this answer, as if it had not been asked for
            if once is not None:
                raise
            del request.chat.messages[-1]
            typer.echo()
            continue
        add_message(request, "assistant", answer.texts[0])
        if as_json:
            _print_json(answer)
        else:
            _print_ledger(answer)
        if once is not None:
            break


def _read_line() -> str | None:
    import readline  # noqa: F401  (editing and history for input)

    try:
        while True:
            if line := input("> ").strip():
                return line
    except EOFError:
        return None


def _run(
    endpoint: str | None,
    cluster: str,
    request: "inference.GenerateRequest",
    on_text: Callable[[int, str], None],
) -> "Answer":
    from pdserve.cli.stream import ask
    from pdserve.launch.state import read_state

    return asyncio.run(ask(endpoint or read_state(cluster).endpoint, request, on_text))


def _show(_index: int, text: str) -> None:
    typer.echo(text.translate(VISIBLE), nl=False)


def _quiet(_index: int, _text: str) -> None:
    pass


def _print_ledger(answer: "Answer") -> None:
    from pdserve.cli.stream import ledger_line

    typer.echo()
    typer.secho(ledger_line(answer.usage, answer.ledger), dim=True)


def _print_json(answer: "Answer") -> None:
    from pdserve.cli.stream import as_dict

    typer.echo(json.dumps(as_dict(answer), ensure_ascii=False))
