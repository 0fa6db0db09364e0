"""InferenceService over gRPC, and what the services of other APIs share with it.

All of them require a key, bound messages, write answers as they come, and end calls with a status.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from math import inf
from typing import Never, TypeAlias, cast

import grpc
from google.protobuf.message import DecodeError

from pdserve.net.rpc import PUBLIC_MESSAGE_BYTES, AnyContext, Continuation, Handler, abort
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.proto.v1.inference_pb2_grpc import InferenceServiceServicer
from pdserve.protocol.inference import logprobs_to_proto
from pdserve.protocol.refusal import Cause, Refused, RefusedError, Status
from pdserve.router import wire
from pdserve.router.frontend.answer import Answer, Gain, Outcome
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


class CallWriter:
    """Writes the replies of one call, one at a time, whichever of its requests they are of."""

    def __init__(self, context: AnyContext) -> None:
        self._context = context
        self._lock = asyncio.Lock()
        self._is_begun = False  # the call's initial metadata have been sent

    async def write(self, replies: Iterable[object]) -> None:
        """Return once the replies have been passed on. After a write that fails, or is cancelled, the call ends."""
        await self._lock.acquire()  # and kept then: gRPC takes no other write
        for reply in replies:
            if not self._is_begun:
                await self._begin()
            await self._context.write(reply)
        self._lock.release()

    async def _begin(self) -> None:
        """Send the metadata apart: gRPC aborts no call meanwhile, and would send those of a dropped write again."""
        sending = asyncio.ensure_future(self._context.send_initial_metadata(()))
        try:
            await asyncio.shield(sending)
        finally:
            await asyncio.wait((sending,))
        self._is_begun = True


class CallSink:
    """The `Sink` of an answer: the task of its call writes what was gained."""

    def __init__(self) -> None:
        self.gained: asyncio.Queue[tuple[Sequence[Gain], Outcome | None]] = asyncio.Queue()  # one at most
        self.slow_reader: Refused | None = None
        self._task = asyncio.current_task()

    def write(self, gains: Sequence[Gain], outcome: Outcome | None) -> bool:
        self.gained.put_nowait((gains, outcome))
        return False

    def cut_off(self, outcome: Refused) -> None:
        self.slow_reader = outcome
        if self._task is not None:
            self._task.cancel()


async def read_answer(
    intake: Intake, request: inference.GenerateRequest, context: AnyContext, writer: CallWriter, replies: Replies
) -> None:
    """Open a call's request and write the replies to the end of its answer. Raises RefusedError."""
    sink, outcome = CallSink(), None
    _take_trace(request, context)
    remaining_s: float | None = context.time_remaining()
    left_s = inf if remaining_s is None else max(0.0, remaining_s)
    answer = await intake.accept(request, sink, bearer(context.invocation_metadata()), left_s)
    try:
        while outcome is None:
            gains, outcome = await sink.gained.get()
            await writer.write(replies(answer, gains, outcome))
            answer.resume()
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if sink.slow_reader is None or task is None or task.uncancel():
            raise  # the client has gone, or the server stops
        raise RefusedError(sink.slow_reader) from None
    finally:
        intake.leave(answer)
    if isinstance(outcome, Refused):
        raise RefusedError(outcome)


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


def reply_of(answer: Answer, gains: Sequence[Gain], outcome: Outcome | None) -> list[inference.GenerateResponse]:
    """Return a GenerateResponse; none if the client would learn nothing from it."""
    reply = inference.GenerateResponse(request_id=answer.hex_id)
    for gain in gains:
        reply.deltas.add(
            index=gain.index,
            token_ids=gain.token_ids,
            text=gain.text,
            logprobs=gain.logprobs,
            finish_reason=inference.FinishReason.ValueType(gain.finish_reason),
            stop_match=gain.stop_match if isinstance(gain.stop_match, str) else "",
            pooled=gain.pooled,
        )
        for part in gain.prompt_logprobs:
            reply.prompt_logprobs.extend(map(logprobs_to_proto, part.entries()))
    if isinstance(outcome, Finished):
        reply.usage.CopyFrom(wire.usage_message(outcome.usage))
        reply.ledger.CopyFrom(wire.ledger_message(outcome.ledger))
    return [reply] if gains or reply.HasField("usage") else []


class InferenceEndpoint(InferenceServiceServicer):
    """Opens requests at the intake of their model and writes their answers."""

    def __init__(self, models: Models) -> None:
        self._models = models

    async def Generate(  # type: ignore[override]  # replies are written to the context
        self, request: inference.GenerateRequest, context: AnyContext
    ) -> None:
        async with denying(context):
            await read_answer(self._models.of(request.model), request, context, CallWriter(context), reply_of)

    async def ListModels(self, request: inference.ListModelsRequest, context: object) -> inference.ListModelsResponse:
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
