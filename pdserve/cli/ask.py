"""Commands that ask a running cluster for text."""

import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import grpc
import typer
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from pdserve.cli.flags import grouped_flags
from pdserve.cli.options import THIS_MACHINES_ROUTER, AsJson, Reached, Sampling
from pdserve.errors import CommandError, ConfigError
from pdserve.measure.client import Access, connect
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.proto.v1.inference_pb2_grpc import InferenceServiceStub
from pdserve.reports import FINISH_REASONS

if TYPE_CHECKING:
    from pdserve.measure.client import Access
    from pdserve.proto.v1 import inference_pb2 as inference

    Router = tuple[str, Access | None]


@dataclass(slots=True)
class Answer:
    """An answer as far as it has come, each continuation by its index."""

    texts: list[str]
    token_ids: list[list[int]]
    finish_reasons: list[str]
    request_id: str = ""
    usage: inference.Usage = field(default_factory=inference.Usage)  # of the last reply, as is the ledger
    ledger: inference.Ledger = field(default_factory=inference.Ledger)

    def take(self, reply: inference.GenerateResponse) -> None:
        self.request_id, self.usage, self.ledger = reply.request_id, reply.usage, reply.ledger
        for delta in reply.deltas:
            self.texts[delta.index] += delta.text
            self.token_ids[delta.index] += delta.token_ids
            if delta.finish_reason:
                self.finish_reasons[delta.index] = FINISH_REASONS[delta.finish_reason]


async def ask(
    endpoint: str,
    request: inference.GenerateRequest,
    on_text: Callable[[int, str], None],
    access: Access | None = None,
) -> Answer:
    """Stream one request; `on_text` gets a continuation's index and what it gained. CommandError on any error."""
    num_sequences = request.sampling.n if request.sampling.HasField("n") else 1
    answer = Answer([""] * num_sequences, [[] for _ in range(num_sequences)], ["none"] * num_sequences)
    async with connect(endpoint, access) as channel:
        try:
            async for reply in InferenceServiceStub(channel).Generate(request):
                answer.take(reply)
                for delta in reply.deltas:
                    if delta.text:
                        on_text(delta.index, delta.text)
        except grpc.aio.AioRpcError as error:
            raise failure(endpoint, error) from error
    if not answer.request_id:
        raise CommandError(f"{endpoint}: the answer ended before it began")
    return answer


def failure(endpoint: str, error: grpc.aio.AioRpcError) -> CommandError:
    return CommandError(f"{endpoint}: {error.code().name}: {error.details()}")


def plain(message: Message) -> dict[str, object]:
    """Return a message as JSON has it; names are the proto's."""
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


def as_dict(answer: Answer) -> dict[str, object]:
    bytes_moved = {"handoff_bytes": answer.ledger.handoff_bytes}  # a number, not a string
    return {
        "request_id": answer.request_id,
        "texts": answer.texts,
        "token_ids": answer.token_ids,
        "finish_reasons": answer.finish_reasons,
        "usage": plain(answer.usage),
        "ledger": plain(answer.ledger) | bytes_moved,
    }


def ledger_line(usage: inference.Usage, ledger: inference.Ledger) -> str:
    """Return where a request's time went, and who served it, in one line."""
    parts = [
        f"TTFT {ledger.ttft_ms:.0f} ms",
        f"TPOT {ledger.tpot_ms:.1f} ms",
        f"{usage.prompt_tokens} tokens in ({usage.cached_tokens} cached), {usage.completion_tokens} out",
    ]
    if ledger.decode_worker:
        reused = f", {ledger.handoff_pages_reused} pages reused" if ledger.handoff_pages_reused else ""
        parts.append(f"hand-off {ledger.handoff_bytes / 1e6:.2f} MB in {ledger.handoff_ms:.1f} ms{reused}")
    workers = [name for name in (ledger.prefill_worker, ledger.decode_worker) if name]
    parts.append(" -> ".join(workers))
    return " | ".join(parts)


def add_message(request: inference.GenerateRequest, role: str, content: str) -> None:
    request.chat.messages.append(inference.ChatMessage(role=role, content=content))


_SHORT, _LONG = Sampling(max_tokens=128), Sampling(max_tokens=512)

# What a model writes must not drive the terminal: control characters are shown, not obeyed.
VISIBLE = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


@grouped_flags
def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue.")],
    router: Reached = THIS_MACHINES_ROUTER,
    sampling: Sampling = _SHORT,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end of the answer.")] = False,
    n: Annotated[int, typer.Option(help="How many continuations.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Continue a text; stream it as it is computed, then print where the time went."""
    request = sampling.request(n=n, ignore_eos=ignore_eos)
    request.text = prompt
    answer = _run(router.router(), request, _quiet if as_json or n > 1 else _show)
    _print(answer, as_json=as_json)


@grouped_flags
def chat(
    once: Annotated[str | None, typer.Option(help="Send this one message and end.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    router: Reached = THIS_MACHINES_ROUTER,
    sampling: Sampling = _LONG,
    as_json: AsJson = False,
) -> None:
    """Talk with the model. Ctrl-C ends an answer, Ctrl-D the talk."""

    request = sampling.request()
    if system is not None:
        add_message(request, "system", system)
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

    address, access = router
    return asyncio.run(ask(address, request, on_text, access))


def _show(_index: int, text: str) -> None:
    typer.echo(text.translate(VISIBLE), nl=False)


def _quiet(_index: int, _text: str) -> None:
    pass


def _print(answer: "Answer", *, as_json: bool) -> None:
    """End what was streamed, or print what was not. Where the time went is no part of the answer: it is on stderr."""

    if as_json:
        typer.echo(json.dumps(as_dict(answer), ensure_ascii=False))
        return
    if len(answer.texts) == 1:
        typer.echo()
    else:
        for index, text in enumerate(answer.texts):
            typer.echo(f"[{index}] {text.translate(VISIBLE)}")
    typer.secho(ledger_line(answer.usage, answer.ledger), dim=True, err=True)
