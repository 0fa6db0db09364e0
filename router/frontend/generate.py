"""The native gRPC door: InferenceService."""

from collections.abc import Sequence
from typing import Any

import grpc

from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.router import wire
from pdserve.router.commands import Finished
from pdserve.router.frontend.answer import Answer, Gain
from pdserve.router.frontend.call_writer import CallWriter
from pdserve.router.frontend.grpc_door import NOT_SERVED, Outcome, deny, read_answer
from pdserve.router.frontend.intake import Intake
from pdserve.rpc import AnyContext
from pdserve.wire import logprobs_to_proto

INFERENCE_SERVICE = inference.DESCRIPTOR.services_by_name["InferenceService"].full_name


def reply_bytes(hex_id: str, gains: Sequence[Gain], outcome: Outcome | None) -> bytes:
    """Return a GenerateResponse as bytes; none where there is nothing to say."""
    reply = b"".join([_delta(gain) for gain in gains])
    for gain in gains:
        if gain.prompt_logprobs:
            entries = [logprobs_to_proto(entry) for part in gain.prompt_logprobs for entry in part.entries()]
            reply += inference.GenerateResponse(prompt_logprobs=entries).SerializeToString()
    if isinstance(outcome, Finished):
        usage, ledger = wire.usage_message(outcome.usage), wire.ledger_message(outcome.ledger)
        reply += inference.GenerateResponse(usage=usage, ledger=ledger).SerializeToString()
    return b"\n\x20" + hex_id.encode() + reply if reply else b""  # request_id, of 32 bytes; fields follow in any order


def _delta(gain: Gain) -> bytes:
    """Return a gain as a field `deltas` of GenerateResponse. Those of most replies are put together by hand."""
    if gain.index or gain.logprobs or gain.finish_reason:
        delta = inference.SequenceDelta(
            index=gain.index,
            token_ids=gain.token_ids,
            text=gain.text,
            logprobs=gain.logprobs,
            finish_reason=inference.FinishReason.ValueType(gain.finish_reason),
            stop_match=gain.stop_match if isinstance(gain.stop_match, str) else "",
        ).SerializeToString()
    else:
        ids, text = b"".join(map(_varint, gain.token_ids)), gain.text.encode()
        delta = b"\x12" + _varint(len(ids)) + ids if ids else b""
        if text:
            delta += b"\x1a" + _varint(len(text)) + text
    return b"\x12" + _varint(len(delta)) + delta


def _varint(number: int) -> bytes:
    """Return a number as protobuf has it: seven bits a byte, the lowest first."""
    if number < 1 << 7:
        return _BYTES[number]
    low = _BYTES[number & 0x7F | 0x80]
    if number < 1 << 14:
        return low + _BYTES[number >> 7]
    return low + _varint(number >> 7)


_BYTES = [bytes([byte]) for byte in range(256)]


class InferenceEndpoint:
    """Opens requests at the intake and writes their answers."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve InferenceService. Generate writes bytes, which gRPC takes as they are."""
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Generate": grpc.unary_stream_rpc_method_handler(
                self._generate, request_deserializer=inference.GenerateRequest.FromString
            ),
            "ListModels": grpc.unary_unary_rpc_method_handler(
                self._list_models,
                request_deserializer=inference.ListModelsRequest.FromString,
                response_serializer=inference.ListModelsResponse.SerializeToString,
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(INFERENCE_SERVICE, handlers),))

    async def _generate(self, request: inference.GenerateRequest, context: AnyContext) -> None:
        def replies(answer: Answer, gains: Sequence[Gain], outcome: Outcome | None) -> Sequence[bytes]:
            reply = reply_bytes(answer.hex_id, gains, outcome)
            return (reply,) if reply else ()

        try:
            async with CallWriter(context) as writer:
                await read_answer(self._intake, request, context, writer, replies)
        except NOT_SERVED as error:
            await deny(context, error)

    async def _list_models(self, request: inference.ListModelsRequest, context: object) -> inference.ListModelsResponse:
        served = self._intake.model
        models = [
            inference.Model(
                name=name,
                max_model_len=self._intake.max_model_len(),
                vocab_size=served.vocab_size,
                has_chat_template=served.chat is not None,
            )
            for name in served.names
        ]
        return inference.ListModelsResponse(models=models)
