"""The native gRPC door: InferenceService."""

import asyncio
from collections.abc import Sequence
from typing import Any, TypeAlias

import grpc

from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.router import wire
from pdserve.router.commands import Finished, Refused
from pdserve.router.frontend.answer import Answer, Gain
from pdserve.router.frontend.api_keys import bearer
from pdserve.router.frontend.grpc_door import NOT_OPENED, deny, refuse, remaining_s, take_trace
from pdserve.router.frontend.intake import Intake
from pdserve.wire import logprobs_to_proto

INFERENCE_SERVICE = inference.DESCRIPTOR.services_by_name["InferenceService"].full_name

GenerateContext: TypeAlias = "grpc.aio.ServicerContext[inference.GenerateRequest, bytes]"


class Writer:
    """Writes one answer to its call, a reply at a time. A `Client` of answers."""

    def __init__(self, context: GenerateContext) -> None:
        self._context = context
        self._reply = b""  # to be written next
        self._outcome: Finished | Refused | None = None
        self._has_news = False
        self._waits: asyncio.Future[None] | None = None  # for news; an Event costs more
        self._task = asyncio.current_task()
        self._was_cut_off = False

    def write(self, answer: Answer, gains: Sequence[Gain], outcome: Finished | Refused | None) -> bool:
        self._reply = reply_bytes(answer.hex_id, gains, outcome)
        self._outcome, self._has_news = outcome, True
        if self._waits is not None and not self._waits.done():
            self._waits.set_result(None)
        return False

    def cut_off(self, answer: Answer, outcome: Refused) -> None:
        del answer
        self._outcome, self._was_cut_off = outcome, True
        if self._task is not None:
            self._task.cancel()

    async def run(self, answer: Answer) -> Finished | Refused | None:
        """Write an answer until its end, or until it is cut off; return how it ended."""
        is_begun, loop = False, asyncio.get_running_loop()
        try:
            while self._outcome is None or self._reply:
                if not self._has_news:
                    self._waits = loop.create_future()
                    await self._waits
                self._has_news = False
                reply, self._reply = self._reply, b""
                if reply:
                    if not is_begun:
                        # On its own: a first write that is interrupted leaves gRPC unsure whether this has been sent.
                        await self._context.send_initial_metadata(())
                        is_begun = True
                    await self._context.write(reply)
                if self._outcome is None:
                    answer.resume()
        except asyncio.CancelledError:
            if self._task is None or not self._was_cut_off or self._task.uncancel():
                raise  # the client has gone, or the server stops
        return self._outcome


def reply_bytes(hex_id: str, gains: Sequence[Gain], outcome: Finished | Refused | None) -> bytes:
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

    async def _generate(self, request: inference.GenerateRequest, context: GenerateContext) -> None:
        writer = Writer(context)
        take_trace(request, context)
        try:
            key = bearer(context.invocation_metadata())
            answer = await self._intake.open(request, writer, key, remaining_s(context))
        except NOT_OPENED as error:
            await deny(context, error)
        try:
            outcome = await writer.run(answer)
        finally:
            self._intake.leave(answer)
        if isinstance(outcome, Refused):
            await refuse(context, outcome)

    async def _list_models(self, request: inference.ListModelsRequest, context: object) -> inference.ListModelsResponse:
        del request, context
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
