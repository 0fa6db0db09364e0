"""InferenceService over gRPC, and what the services of other APIs share with it.

All of them require a key, bound messages, write answers as they come, and end calls with a status.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from math import inf
from typing import Any, Never, TypeAlias, cast

import grpc
from google.protobuf.message import DecodeError

from pdserve.base.errors import InvariantError
from pdserve.net.rpc import PUBLIC_MESSAGE_BYTES, AnyContext, Continuation, Handler, abort
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.protocol.inference import logprobs_to_proto
from pdserve.protocol.refusal import Cause, Refused, RefusedError, Status
from pdserve.router import wire
from pdserve.router.frontend.answer import Answer, Gain, Outcome
from pdserve.router.frontend.call_writer import CallWriter
from pdserve.router.frontend.clients import Clients, bearer
from pdserve.router.frontend.intake import Intake
from pdserve.router.frontend.models import Models
from pdserve.router.requests.commands import Finished

INFERENCE_SERVICE = inference.DESCRIPTOR.services_by_name["InferenceService"].full_name
OPEN = "/grpc.health.v1.Health/"  # methods that need no key
HARD_LIMIT_BYTES = 4 * PUBLIC_MESSAGE_BYTES
CODES = {status: grpc.StatusCode[status.value] for status in Status}

Replies = Callable[[Answer, Sequence[Gain], Outcome | None], Iterable[object]]  # makes the replies of a call
_Context: TypeAlias = "grpc.aio.ServicerContext[bytes, bytes]"


def _take_trace(request: inference.GenerateRequest, context: AnyContext) -> None:
    """Take the trace context from the call's metadata, unless the request has one."""
    if not request.traceparent:
        given: dict[str, list[str]] = {}
        for name, shown in context.invocation_metadata() or ():
            if isinstance(shown, str):
                given.setdefault(name, []).append(shown)
        request.traceparent = given.get("traceparent", [""])[-1]
        request.tracestate = ",".join(given.get("tracestate", ()))


class CallSink:
    """The `Sink` of an answer that a gRPC call writes."""

    def __init__(self, writer: CallWriter, replies: Replies) -> None:
        self.answer: Answer | None = None  # to be set before the event loop runs next
        self._writer = writer
        self._replies = replies
        self._outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

    def write(self, gains: Sequence[Gain], outcome: Outcome | None) -> bool:
        if self.answer is None:
            raise InvariantError("an answer gained something before its request was admitted")
        try:
            is_free = self._writer.write(self._replies(self.answer, gains, outcome))
        except Exception as error:  # noqa: BLE001 - it ends this call alone, whose handler raises it
            self._end(error)
            return False
        if outcome is not None:
            self._end(outcome)
        elif not is_free:
            self._writer.when_free(self.answer.resume)
        return is_free

    def cut_off(self, outcome: Refused) -> None:
        self._end(RefusedError(outcome))

    def _end(self, how: Outcome | Exception) -> None:
        if self._outcome.done():
            return  # the client has gone, or the server stops
        if isinstance(how, Exception):
            self._outcome.set_exception(how)
        else:
            self._outcome.set_result(how)

    async def end(self) -> None:
        """Return when all replies are written. Raises RefusedError."""
        outcome = await self._outcome
        await self._writer.drain()
        if isinstance(outcome, Refused):
            raise RefusedError(outcome)


async def read_answer(
    intake: Intake, request: inference.GenerateRequest, context: AnyContext, writer: CallWriter, replies: Replies
) -> None:
    """Open a call's request and write the replies to the end of its answer. Raises RefusedError."""
    sink = CallSink(writer, replies)
    _take_trace(request, context)
    remaining_s: float | None = context.time_remaining()
    left_s = inf if remaining_s is None else max(0.0, remaining_s)
    answer = await intake.accept(request, sink, bearer(context.invocation_metadata()), left_s)
    sink.answer = answer
    try:
        await sink.end()
    finally:
        intake.leave(answer)


@asynccontextmanager
async def denying(context: AnyContext) -> AsyncIterator[None]:
    """End a call with a status if the block raises RefusedError."""
    try:
        yield
    except RefusedError as error:
        await refuse(context, error.refused)


async def refuse(context: AnyContext, refused: Refused) -> Never:
    """End a call with a status; the cause and hints for a later try are trailing metadata."""
    known = (("predicted-ttft-ms", refused.predicted_ttft_s), ("retry-after-ms", refused.retry_after_s))
    hints = [(name, f"{seconds * 1e3:.0f}") for name, seconds in known if seconds is not None]
    cause = ("refused-because", refused.cause.value)
    await abort(context, CODES[refused.status], refused.message, (*hints, cause))


class RequireKey(grpc.aio.ServerInterceptor):
    """Answers UNAUTHENTICATED to every call, of a known method or not, without a client's key."""

    def __init__(self, clients: Clients) -> None:
        self._clients = clients

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler:
        if not handler_call_details.method.startswith(OPEN):
            try:
                self._clients.identify(bearer(handler_call_details.invocation_metadata))
            except RefusedError as error:
                # Streaming on both sides: such a handler answers before it has read anything.
                return grpc.stream_stream_rpc_method_handler(partial(_deny, error.refused))
        return await continuation(handler_call_details)


async def _deny(denied: Refused, _messages: object, context: _Context) -> None:
    await refuse(context, denied)


class LimitSizes(grpc.aio.ServerInterceptor):
    """Answers INVALID_ARGUMENT to a call whose one request is too large, or cannot be parsed.

    gRPC itself answers RESOURCE_EXHAUSTED, which clients take as a reason to try again. It still does so for messages
    over HARD_LIMIT_BYTES, before it has the whole message in memory.
    """

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming or handler.request_deserializer is None:
            return handler
        parse = handler.request_deserializer
        streams, given = handler.response_streaming, handler.unary_stream or handler.unary_unary
        serve = cast("Callable[[object, _Context], Awaitable[object]]", given)  # grpc.aio's kind

        async def check(raw: bytes, context: _Context) -> object:
            if len(raw) > PUBLIC_MESSAGE_BYTES:
                text = f"message: {len(raw)} bytes are over the limit of {PUBLIC_MESSAGE_BYTES}"
                await refuse(context, Refused(Cause.TOO_LARGE, text))
            try:
                request = parse(raw)
            except DecodeError as error:
                await refuse(context, Refused(Cause.INVALID, f"message: {error}"))
            try:
                return await serve(request, context)
            except grpc.aio.AbortError as error:
                # gRPC keeps it with the call's state, in a cycle. It must not refer to frames that have the request.
                error.__context__ = None
                raise error.with_traceback(None) from None
            finally:
                del raw, request

        make = grpc.unary_stream_rpc_method_handler if streams else grpc.unary_unary_rpc_method_handler
        return make(check, response_serializer=handler.response_serializer)


# ---- InferenceService


def reply_bytes(hex_id: str, gains: Sequence[Gain], outcome: Outcome | None) -> bytes:
    """Return a GenerateResponse as bytes; empty if the client would learn nothing from it."""
    reply = b"".join([_delta(gain) for gain in gains])
    for gain in gains:
        if gain.prompt_logprobs:
            entries = [logprobs_to_proto(entry) for part in gain.prompt_logprobs for entry in part.entries()]
            reply += inference.GenerateResponse(prompt_logprobs=entries).SerializeToString()
    if isinstance(outcome, Finished):
        usage, ledger = wire.usage_message(outcome.usage), wire.ledger_message(outcome.ledger)
        reply += inference.GenerateResponse(usage=usage, ledger=ledger).SerializeToString()
    return b"\n\x20" + hex_id.encode() + reply if reply else b""  # field 1, request_id, of 32 bytes


def _delta(gain: Gain) -> bytes:
    """Return a gain as a field `deltas` of GenerateResponse. For most replies the bytes are written by hand."""
    if gain.index or gain.logprobs or gain.finish_reason:
        delta = inference.SequenceDelta(
            index=gain.index,
            token_ids=gain.token_ids,
            text=gain.text,
            logprobs=gain.logprobs,
            finish_reason=inference.FinishReason.ValueType(gain.finish_reason),
            stop_match=gain.stop_match if isinstance(gain.stop_match, str) else "",
            pooled=gain.pooled,
        ).SerializeToString()
    else:
        ids, text = b"".join(map(_varint, gain.token_ids)), gain.text.encode()
        delta = b"\x12" + _varint(len(ids)) + ids if ids else b""
        if text:
            delta += b"\x1a" + _varint(len(text)) + text
    return b"\x12" + _varint(len(delta)) + delta


def _varint(number: int) -> bytes:
    """Return a number in protobuf's encoding: seven bits a byte, the lowest first."""
    if number < 1 << 7:
        return _BYTES[number]
    low = _BYTES[number & 0x7F | 0x80]
    if number < 1 << 14:
        return low + _BYTES[number >> 7]
    return low + _varint(number >> 7)


_BYTES = [bytes([byte]) for byte in range(256)]


class InferenceEndpoint:
    """Opens requests at the intake of their model and writes their answers."""

    def __init__(self, models: Models) -> None:
        self._models = models

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve InferenceService. Generate writes bytes, so its handler has no serializer."""
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

        async with denying(context), CallWriter(context) as writer:
            await read_answer(self._models.of(request.model), request, context, writer, replies)

    async def _list_models(self, request: inference.ListModelsRequest, context: object) -> inference.ListModelsResponse:
        models = [
            inference.Model(
                name=name,
                max_model_len=intake.max_model_len(),
                vocab_size=intake.model.vocab_size,
                has_chat_template=intake.model.chat is not None,
            )
            for intake in self._models
            for name in intake.names
        ]
        return inference.ListModelsResponse(models=models)
