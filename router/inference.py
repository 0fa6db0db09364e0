"""The public endpoint: InferenceService."""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from collections.abc import Sequence as Seq
from typing import TypeAlias, TypeVar, cast

import grpc
from google.protobuf.message import DecodeError

from pdserve.errors import InvariantError, RequestError
from pdserve.ids import RequestId, new_request_id
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.proto.v1.inference_pb2_grpc import InferenceServiceServicer
from pdserve.router import wire
from pdserve.router.clients import CODES, Clients, Visit, refuse
from pdserve.router.commands import Deliver, Finished, Refused
from pdserve.router.config import RouterConfig
from pdserve.router.events import ClientTooSlow, RequestArrived, StopStringFound
from pdserve.router.metrics import Outcomes
from pdserve.router.prompts import Prompts, ServedModel, Terms, check_model, check_terms, fitted
from pdserve.router.shell import Shell
from pdserve.rpc import PUBLIC_MESSAGE_BYTES, abort
from pdserve.text.stop import OutputText

logger = logging.getLogger(__name__)

GenerateContext: TypeAlias = "grpc.aio.ServicerContext[inference.GenerateRequest, inference.GenerateResponse]"

HARD_LIMIT_BYTES = 4 * PUBLIC_MESSAGE_BYTES
DELTA_BYTES = 16  # of a delta's frame and small fields, roughly
TOKEN_BYTES = 4

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")
_Context: TypeAlias = "grpc.aio.ServicerContext[bytes, bytes]"


class Answer:
    """One request's answer on its way to the client: text made of tokens, coalesced while the client is slow.

    Tokens come in through `deliver`, replies go out through `replies`; the former never waits for the latter. What
    waits is bounded: an answer that holds more than its limit when more comes says so, and takes no more.
    """

    def __init__(self, request_id: RequestId, terms: Terms, outputs: Seq[OutputText], max_unsent_bytes: int) -> None:
        self.request_id = request_id
        self.terms = terms
        self._hex_id = request_id.hex()
        self._outputs: list[OutputText | None] = list(outputs)  # None: the continuation has ended
        self._max_unsent_bytes = max_unsent_bytes
        self._unsent: dict[int, inference.SequenceDelta] = {}  # by continuation
        self._unsent_bytes = 0
        self._news = asyncio.Event()
        self.outcome: Finished | Refused | None = None  # how the request ended
        self.writer: asyncio.Task[object] | None = None  # interrupted where its client is too slow
        self.was_cut_off = False
        self.num_tokens = 0  # of all continuations
        self.finish_reasons: list[int] = []  # of the continuations that have ended

    @property
    def refusal(self) -> Refused | None:
        """How the request ended, if without its answer."""
        return self.outcome if isinstance(self.outcome, Refused) else None

    def deliver(self, command: Deliver) -> StopStringFound | ClientTooSlow | None:
        """Add tokens; return what the core has to know about it."""
        index = command.index
        output = self._outputs[index]
        if output is None:
            return None  # decoded before the workers heard of the stop string
        if self._unsent_bytes > self._max_unsent_bytes:
            self.was_cut_off = True
            return ClientTooSlow(self.request_id, self._max_unsent_bytes)
        delta = self._unsent.get(index)
        if delta is None:
            delta = self._unsent[index] = inference.SequenceDelta(index=index)
            self._unsent_bytes += DELTA_BYTES
        gained = output.push(command.token_ids)
        text, stop, finish_reason = gained.text, gained.stop, command.finish_reason
        if finish_reason and stop is None:
            last = output.finish()
            text, stop = text + last.text, last.stop
        self._add(delta, command, gained.num_tokens, text)
        if stop is not None:
            finish_reason = inference.FINISH_REASON_STOP
            delta.stop_match = stop
        if finish_reason:
            delta.finish_reason = inference.FinishReason.ValueType(finish_reason)
            self._outputs[index] = None
            self.finish_reasons.append(finish_reason)
        self._news.set()
        return StopStringFound(self.request_id, index) if stop is not None else None

    def _add(self, delta: inference.SequenceDelta, command: Deliver, num_tokens: int, text: str) -> None:
        token_ids, logprobs = command.token_ids, command.logprobs
        if num_tokens < len(token_ids):
            token_ids, logprobs = token_ids[:num_tokens], logprobs[:num_tokens]
        delta.token_ids.extend(token_ids)
        self.num_tokens += len(token_ids)
        if text:
            delta.text += text
        self._unsent_bytes += TOKEN_BYTES * len(token_ids) + len(text)
        for logprob in logprobs:
            if not isinstance(logprob, inference.TokenLogprobs):
                raise InvariantError(f"logprobs of a delta are {type(logprob).__name__}")
            delta.logprobs.append(logprob)
            self._unsent_bytes += logprob.ByteSize()

    def end(self, outcome: Finished | Refused) -> None:
        """Note the request's end. A client that reads too slowly does not get to read what waits."""
        self.outcome = outcome
        if self.was_cut_off:
            self._unsent.clear()
            if self.writer is not None:
                self.writer.cancel()
        self._news.set()

    async def replies(self) -> AsyncIterator[inference.GenerateResponse]:
        """Yield what the client has not seen, as much at once as there is, until the end."""
        while True:
            await self._news.wait()
            self._news.clear()
            outcome = self.outcome
            reply = inference.GenerateResponse(request_id=self._hex_id, deltas=self._unsent.values())
            self._unsent.clear()
            self._unsent_bytes = 0
            if isinstance(outcome, Finished):
                reply.usage.CopyFrom(wire.usage_message(outcome.usage))
                reply.ledger.CopyFrom(wire.ledger_message(outcome.ledger))
            if reply.deltas or reply.HasField("usage"):
                yield reply
            if outcome is not None:
                return


class InferenceEndpoint(InferenceServiceServicer):
    """Checks and tokenizes requests, hands them to the core, and writes the answers."""

    def __init__(self, shell: Shell, model: ServedModel, prompts: Prompts, config: RouterConfig) -> None:
        self.outcomes = Outcomes(model.name)
        self.clients = Clients(config.api_keys_file, shell.clock)
        self.shell = shell
        self.model = model
        self._prompts = prompts
        self._config = config

    async def Generate(  # type: ignore[override]  # replies are written to the context  # noqa: N802
        self, request: inference.GenerateRequest, context: GenerateContext
    ) -> None:
        async with self.clients.visit(context) as visit:
            await self._serve(request, context, visit)

    async def _serve(self, request: inference.GenerateRequest, context: GenerateContext, visit: Visit | None) -> None:
        received_s = self.shell.clock.now_s()
        try:
            answer = await self._admit(request, context, received_s, visit)
        except RequestError as error:
            self.outcomes.reject(error.status)
            await abort(context, CODES[error.status], error.message)
        try:
            await self._write(answer, context)
        finally:
            self.shell.leave(answer.request_id)
            if visit is not None:
                visit.use.spend(answer.num_tokens)
            if answer.outcome is not None:
                self.outcomes.end(answer.terms, answer.outcome, answer.finish_reasons)
        if answer.refusal is not None:
            refusal = answer.refusal
            if refusal.because is not None:
                cause, text = refusal.because.cause, refusal.message
                logger.debug("request %s is refused (%s): %s", answer.request_id.hex(), cause, text)
            await refuse(context, refusal)

    async def _write(self, answer: Answer, context: GenerateContext) -> None:
        """Write an answer until its end, or until its client has proved too slow."""
        task, is_begun = asyncio.current_task(), False
        answer.writer = task
        try:
            async for reply in answer.replies():
                if not is_begun:
                    # On its own: a first write that is interrupted leaves gRPC unsure whether this has been sent.
                    await context.send_initial_metadata(())
                    is_begun = True
                await context.write(reply)
        except asyncio.CancelledError:
            if task is None or not answer.was_cut_off or task.uncancel():
                raise  # the client has gone, or the server stops
        finally:
            answer.writer = None

    async def _admit(
        self, request: inference.GenerateRequest, context: GenerateContext, received_s: float, visit: Visit | None
    ) -> Answer:
        check_model(request, self.model.name)
        model, seed = self.model, secrets.randbits(64)
        terms = check_terms(request, model.vocab_size, seed, self._config.max_deadline_ms, model.defaults)
        if visit is not None:
            terms = visit.terms(terms)
        deadline_s = received_s + min(terms.deadline_s, _time_remaining_s(context))
        token_ids = await self._prompts.token_ids(request, self._max_model_len(), deadline_s - received_s)
        if visit is not None:
            visit.use.spend(len(token_ids))
        params = fitted(len(token_ids), terms, self._max_model_len())
        answer = self._answer(new_request_id(), terms)
        event = RequestArrived(
            request_id=answer.request_id,
            token_ids=token_ids,
            params=params,
            received_s=received_s,
            deadline_s=deadline_s,
            priority=terms.priority,
            tenant=terms.tenant,
            ttft_slo_s=terms.ttft_slo_s,
            tpot_slo_s=terms.tpot_slo_s,
        )
        self.shell.admit(event, answer)
        return answer

    def _answer(self, request_id: RequestId, terms: Terms) -> Answer:
        outputs = [
            OutputText(self.model.tokenizer.detokenizer(at_start=False), terms.stops, terms.params.min_tokens)
            for _ in range(terms.params.n)
        ]
        return Answer(request_id, terms, outputs, self._config.max_unsent_bytes)

    def _max_model_len(self) -> int:
        of_workers = self.shell.core.workers.max_model_len()
        known = (self.model.max_model_len, self._config.max_model_len, of_workers)
        return min(length for length in known if length is not None)

    async def ListModels(  # noqa: N802
        self, request: inference.ListModelsRequest, context: object
    ) -> inference.ListModelsResponse:
        del request, context
        model = inference.Model(
            name=self.model.name,
            max_model_len=self._max_model_len(),
            vocab_size=self.model.vocab_size,
            has_chat_template=self.model.chat is not None,
        )
        return inference.ListModelsResponse(models=[model])


def _time_remaining_s(context: GenerateContext) -> float:
    """Return the seconds that the client's own deadline leaves; infinite without one."""
    remaining: float | None = context.time_remaining()
    return float("inf") if remaining is None else max(0.0, remaining)


class LimitSizes(grpc.aio.ServerInterceptor):
    """Answers INVALID_ARGUMENT to a call whose one request is over the limit, or is none.

    gRPC by itself answers RESOURCE_EXHAUSTED, which clients take for a reason to try again. It still does so beyond
    HARD_LIMIT_BYTES, before it has the whole message in memory.
    """

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[_Request, _Response] | None"]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[_Request, _Response] | None":
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming or handler.request_deserializer is None:
            return handler
        parse = handler.request_deserializer
        streams, given = handler.response_streaming, handler.unary_stream or handler.unary_unary
        serve = cast("Callable[[_Request, _Context], Awaitable[_Response]]", given)  # grpc.aio's kind

        async def check(raw: bytes, context: _Context) -> _Response:
            if len(raw) > PUBLIC_MESSAGE_BYTES:
                text = f"message: {len(raw)} bytes are over the limit of {PUBLIC_MESSAGE_BYTES}"
                await abort(context, grpc.StatusCode.INVALID_ARGUMENT, text)
            try:
                request = parse(raw)
            except DecodeError as error:
                await abort(context, grpc.StatusCode.INVALID_ARGUMENT, f"message: {error}")
            return await serve(request, context)

        make = grpc.unary_stream_rpc_method_handler if streams else grpc.unary_unary_rpc_method_handler
        return make(check, response_serializer=handler.response_serializer)
