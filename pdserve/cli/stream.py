"""Make requests of text, send them to a router and pass on what it streams."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from pdserve.base.errors import CommandError
from pdserve.measure.client import Access, connect
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.proto.v1.inference_pb2_grpc import InferenceServiceStub
from pdserve.protocol.reports import FINISH_REASONS


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
        with naming(endpoint):
            async for reply in InferenceServiceStub(channel).Generate(request):
                answer.take(reply)
                for delta in reply.deltas:
                    if delta.text:
                        on_text(delta.index, delta.text)
    if not answer.request_id:
        raise CommandError(f"{endpoint}: the answer ended before it began")
    return answer


@contextmanager
def naming(endpoint: str) -> Iterator[None]:
    """Turn a gRPC error of the block into a CommandError that names the endpoint."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise CommandError(f"{endpoint}: {error.code().name}: {error.details()}") from error


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
