"""Make requests of text, send them to a router and pass on what it streams."""

from collections.abc import Callable
from dataclasses import dataclass

import grpc
from google.protobuf.json_format import MessageToDict

from pdserve.errors import CommandError
from pdserve.measure.client import connect
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.proto.v1.inference_pb2_grpc import InferenceServiceStub

FINISH_REASONS = {
    inference.FINISH_REASON_UNSPECIFIED: "none",
    inference.FINISH_REASON_STOP: "stop",
    inference.FINISH_REASON_LENGTH: "length",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """All of an answer, each continuation by its index."""

    request_id: str
    texts: tuple[str, ...]
    token_ids: tuple[tuple[int, ...], ...]
    finish_reasons: tuple[str, ...]
    usage: inference.Usage
    ledger: inference.Ledger


class _Collected:
    """An answer on its way."""

    def __init__(self, num_sequences: int) -> None:
        self.texts = [""] * num_sequences
        self.token_ids: list[list[int]] = [[] for _ in range(num_sequences)]
        self.finish_reasons = ["none"] * num_sequences

    def add(self, delta: inference.SequenceDelta) -> None:
        self.texts[delta.index] += delta.text
        self.token_ids[delta.index] += delta.token_ids
        if delta.finish_reason:
            self.finish_reasons[delta.index] = FINISH_REASONS[delta.finish_reason]


async def ask(endpoint: str, request: inference.GenerateRequest, on_text: Callable[[int, str], None]) -> Answer:
    """Stream one request; `on_text` gets a continuation's index and what it gained. CommandError on any error."""
    num_sequences = request.sampling.n if request.sampling.HasField("n") else 1
    collected = _Collected(num_sequences)
    reply: inference.GenerateResponse | None = None
    async with connect(endpoint) as channel:
        try:
            async for reply in InferenceServiceStub(channel).Generate(request):
                for delta in reply.deltas:
                    collected.add(delta)
                    if delta.text:
                        on_text(delta.index, delta.text)
        except grpc.aio.AioRpcError as error:
            raise failure(endpoint, error) from error
    if reply is None:
        raise CommandError(f"{endpoint}: the answer ended before it began")
    return Answer(
        request_id=reply.request_id,
        texts=tuple(collected.texts),
        token_ids=tuple(map(tuple, collected.token_ids)),
        finish_reasons=tuple(collected.finish_reasons),
        usage=reply.usage,
        ledger=reply.ledger,
    )


def failure(endpoint: str, error: grpc.aio.AioRpcError) -> CommandError:
    """Return a gRPC error as one line for the terminal."""
    return CommandError(f"{endpoint}: {error.code().name}: {error.details()}")


def as_dict(answer: Answer) -> dict[str, object]:
    """Return an answer as JSON has it; names are the proto's."""
    ledger = MessageToDict(answer.ledger, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    usage = MessageToDict(answer.usage, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return {
        "request_id": answer.request_id,
        "texts": answer.texts,
        "token_ids": answer.token_ids,
        "finish_reasons": answer.finish_reasons,
        "usage": usage,
        "ledger": {**ledger, "handoff_bytes": answer.ledger.handoff_bytes},  # a number, not a string
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
    """Append a message to the request's conversation."""
    request.chat.messages.append(inference.ChatMessage(role=role, content=content))
