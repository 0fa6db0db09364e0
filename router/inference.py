"""The public endpoint: InferenceService."""

import asyncio
import secrets
from typing import TypeAlias

import grpc

from pdserve.errors import RequestError, Status
from pdserve.ids import RequestId, new_request_id
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.proto.v1.inference_pb2_grpc import InferenceServiceServicer
from pdserve.router.answer import Answer
from pdserve.router.config import RouterConfig
from pdserve.router.events import Refused, RequestArrived
from pdserve.router.prompts import Prompts, ServedModel
from pdserve.router.shell import Shell
from pdserve.router.validation import Terms, check_model, check_terms, fitted
from pdserve.rpc import abort
from pdserve.text.output import OutputText

GenerateContext: TypeAlias = "grpc.aio.ServicerContext[inference.GenerateRequest, inference.GenerateResponse]"

CODES = {status: grpc.StatusCode[status.value] for status in Status}


class InferenceEndpoint(InferenceServiceServicer):
    """Checks and tokenizes requests, hands them to the core, and writes the answers."""

    def __init__(self, shell: Shell, model: ServedModel, prompts: Prompts, config: RouterConfig) -> None:
        self._shell = shell
        self._model = model
        self._prompts = prompts
        self._config = config

    async def Generate(  # type: ignore[override]  # replies are written to the context  # noqa: N802
        self, request: inference.GenerateRequest, context: GenerateContext
    ) -> None:
        received_s = self._shell.clock.now_s()
        try:
            answer = await self._admit(request, context, received_s)
        except RequestError as error:
            await abort(context, CODES[error.status], error.message)
        try:
            await self._write(answer, context)
        finally:
            self._shell.leave(answer.request_id)
        if answer.refusal is not None:
            refusal = answer.refusal
            await abort(context, CODES[refusal.status], refusal.message, _hints(refusal))

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

    async def _admit(self, request: inference.GenerateRequest, context: GenerateContext, received_s: float) -> Answer:
        check_model(request, self._model.name)
        model, seed = self._model, secrets.randbits(64)
        terms = check_terms(request, model.vocab_size, seed, self._config.max_deadline_ms, model.defaults)
        deadline_s = received_s + min(terms.deadline_s, _time_remaining_s(context))
        token_ids = await self._prompts.token_ids(request, self._max_model_len(), deadline_s - received_s)
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
        self._shell.admit(event, answer)
        return answer

    def _answer(self, request_id: RequestId, terms: Terms) -> Answer:
        outputs = [
            OutputText(self._model.tokenizer.detokenizer(at_start=False), terms.stops, terms.params.min_tokens)
            for _ in range(terms.params.n)
        ]
        return Answer(request_id, outputs, self._config.max_unsent_bytes)

    def _max_model_len(self) -> int:
        of_workers = self._shell.core.workers.max_model_len()
        known = (self._model.max_model_len, self._config.max_model_len, of_workers)
        return min(length for length in known if length is not None)

    async def ListModels(  # noqa: N802
        self, request: inference.ListModelsRequest, context: object
    ) -> inference.ListModelsResponse:
        del request, context
        model = inference.Model(
            name=self._model.name,
            max_model_len=self._max_model_len(),
            vocab_size=self._model.vocab_size,
            has_chat_template=self._model.chat is not None,
        )
        return inference.ListModelsResponse(models=[model])


def _time_remaining_s(context: GenerateContext) -> float:
    """Return the seconds that the client's own deadline leaves; infinite without one."""
    remaining: float | None = context.time_remaining()
    return float("inf") if remaining is None else max(0.0, remaining)


def _hints(refused: Refused) -> tuple[tuple[str, str], ...]:
    """Return what a refused client may plan with, as trailing metadata."""
    known = (("predicted-ttft-ms", refused.predicted_ttft_s), ("retry-after-ms", refused.retry_after_s))
    return tuple((name, f"{seconds * 1e3:.0f}") for name, seconds in known if seconds is not None)
