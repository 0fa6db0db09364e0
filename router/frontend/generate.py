"""The native gRPC door: InferenceService."""

import asyncio
from collections.abc import Sequence
from typing import TypeAlias

import grpc

from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.proto.v1.inference_pb2_grpc import InferenceServiceServicer
from pdserve.router import wire
from pdserve.router.commands import Finished, Refused
from pdserve.router.frontend.answer import Answer, Gain
from pdserve.router.frontend.api_keys import bearer
from pdserve.router.frontend.grpc_door import NOT_OPENED, deny, refuse, remaining_s, take_trace
from pdserve.router.frontend.intake import Intake
from pdserve.sampling_wire import logprobs_to_proto

GenerateContext: TypeAlias = "grpc.aio.ServicerContext[inference.GenerateRequest, inference.GenerateResponse]"


class Writer:
    """Writes one answer to its call, a reply at a time. A `Client` of answers."""

    def __init__(self, context: GenerateContext) -> None:
        self._context = context
        self._reply: inference.GenerateResponse | None = None  # to be written next
        self._outcome: Finished | Refused | None = None
        self._news = asyncio.Event()
        self._task = asyncio.current_task()
        self._was_cut_off = False

    def write(self, answer: Answer, gains: Sequence[Gain], outcome: Finished | Refused | None) -> bool:
        reply = inference.GenerateResponse(request_id=answer.hex_id, deltas=map(_delta, gains))
        for gain in gains:
            for part in gain.prompt_logprobs:
                reply.prompt_logprobs.extend(map(logprobs_to_proto, part.entries()))
        if isinstance(outcome, Finished):
            reply.usage.CopyFrom(wire.usage_message(outcome.usage))
            reply.ledger.CopyFrom(wire.ledger_message(outcome.ledger))
        if gains or isinstance(outcome, Finished):
            self._reply = reply
        self._outcome = outcome
        self._news.set()
        return False

    def cut_off(self, answer: Answer, outcome: Refused) -> None:
        del answer
        self._outcome, self._was_cut_off = outcome, True
        if self._task is not None:
            self._task.cancel()

    async def run(self, answer: Answer) -> Finished | Refused | None:
        """Write an answer until its end, or until it is cut off; return how it ended."""
        is_begun = False
        try:
            while self._outcome is None or self._reply is not None:
                await self._news.wait()
                self._news.clear()
                reply, self._reply = self._reply, None
                if reply is not None:
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


def _delta(gain: Gain) -> inference.SequenceDelta:
    return inference.SequenceDelta(
        index=gain.index,
        token_ids=gain.token_ids,
        text=gain.text,
        logprobs=gain.logprobs,
        finish_reason=inference.FinishReason.ValueType(gain.finish_reason),
        stop_match=gain.stop_match or "",
    )


class InferenceEndpoint(InferenceServiceServicer):
    """Opens requests at the intake and writes their answers."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake

    async def Generate(  # type: ignore[override]  # replies are written to the context  # noqa: N802
        self, request: inference.GenerateRequest, context: GenerateContext
    ) -> None:
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

    async def ListModels(  # noqa: N802
        self, request: inference.ListModelsRequest, context: object
    ) -> inference.ListModelsResponse:
        del request, context
        model = inference.Model(
            name=self._intake.model.name,
            max_model_len=self._intake.max_model_len(),
            vocab_size=self._intake.model.vocab_size,
            has_chat_template=self._intake.model.chat is not None,
        )
        return inference.ListModelsResponse(models=[model])
