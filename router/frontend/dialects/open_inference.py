"""The service `inference.GRPCInferenceService`: Open Inference Protocol v2, with the streams of Triton's clients.

A stream answers several requests at once, up to a bound. A request that fails does not end the stream; a client that
reads too slowly does.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress

import pdserve
from pdserve.net.rpc import PUBLIC_MESSAGE_BYTES, AnyContext
from pdserve.proto.v1 import open_inference_pb2 as protocol
from pdserve.proto.v1.open_inference_pb2_grpc import GRPCInferenceServiceServicer
from pdserve.protocol.refusal import Cause, Refused, RefusedError, invalid
from pdserve.router.frontend.answer import Answer, Gain, Outcome
from pdserve.router.frontend.backend import EngineState, Span
from pdserve.router.frontend.call_writer import CallWriter
from pdserve.router.frontend.dialects.open_inference_request import (
    OUTPUTS,
    STREAM,
    TEXT_INPUT,
    VERSION,
    check_version,
    native,
    reply,
)
from pdserve.router.frontend.grpc_endpoint import denying, read_answer, refuse
from pdserve.router.frontend.intake import Intake
from pdserve.router.frontend.models import Models

PLATFORM = "pdserve"
MAX_CONCURRENT = 64  # requests of one stream; more wait unread


class OpenInference(GRPCInferenceServiceServicer):
    def __init__(self, models: Models) -> None:
        self._models = models

    async def ModelInfer(self, request: protocol.ModelInferRequest, context: AnyContext) -> protocol.ModelInferResponse:
        texts: list[str] = []
        ends: list[int] = []

        def replies(_answer: Answer, gains: Sequence[Gain], _outcome: Outcome | None) -> Sequence[object]:
            texts.extend(gain.text for gain in gains)
            ends.extend(gain.finish_reason for gain in gains)
            return ()

        async with denying(context), CallWriter(context) as writer:
            asked = native(request)
            if asked.streams:
                raise invalid(STREAM[0], "ModelStreamInfer streams, this call does not")
            intake = self._models.of(request.model_name)
            await read_answer(intake, asked.request, context, writer, replies)
        return reply(asked, request, "".join(texts), max(ends))

    async def ModelStreamInfer(  # type: ignore[override]  # replies are written to the context
        self, request_iterator: AsyncIterator[protocol.ModelInferRequest], context: AnyContext
    ) -> None:
        refused: list[Refused] = []
        try:
            async with CallWriter(context) as writer:
                stream = _Stream(self._models, context, writer)
                async with asyncio.TaskGroup() as tasks:
                    async for request in request_iterator:
                        await stream.room.acquire()
                        tasks.create_task(stream.serve(request), name="infer")
        except* RefusedError as group:
            refused += [error.refused for error in group.exceptions if isinstance(error, RefusedError)]
        if refused:
            await refuse(context, refused[0])

    async def ServerLive(self, request: protocol.ServerLiveRequest, context: AnyContext) -> protocol.ServerLiveResponse:
        return protocol.ServerLiveResponse(live=self._models.is_live)

    async def ServerReady(
        self, request: protocol.ServerReadyRequest, context: AnyContext
    ) -> protocol.ServerReadyResponse:
        return protocol.ServerReadyResponse(ready=self._models.is_ready)

    async def ModelReady(self, request: protocol.ModelReadyRequest, context: AnyContext) -> protocol.ModelReadyResponse:
        intake = self._models.find(request.name) if request.version in ("", VERSION) else None
        return protocol.ModelReadyResponse(ready=intake is not None and intake.backend.readiness().is_ready)

    async def ServerMetadata(
        self, request: protocol.ServerMetadataRequest, context: AnyContext
    ) -> protocol.ServerMetadataResponse:
        extensions = ["model_configuration", "model_repository", "parameters", "statistics"]
        return protocol.ServerMetadataResponse(name=PLATFORM, version=pdserve.__version__, extensions=extensions)

    async def RepositoryIndex(
        self, request: protocol.RepositoryIndexRequest, context: AnyContext
    ) -> protocol.RepositoryIndexResponse:
        response = protocol.RepositoryIndexResponse()
        for intake in self._models:
            is_ready = intake.backend.readiness().is_ready
            state, reason = ("READY", "") if is_ready else ("UNAVAILABLE", "no pair of workers serves")
            for name in intake.names if is_ready or not request.ready else ():
                response.models.add(name=name, version=VERSION, state=state, reason=reason)
        return response

    async def ModelStatistics(
        self, request: protocol.ModelStatisticsRequest, context: AnyContext
    ) -> protocol.ModelStatisticsResponse:
        found = []
        if request.name:
            intake = await self._check(request.name, request.version, context)
            async with denying(context):
                found.append(_statistics(request.name, await intake.backend.engine()))
        for each in () if request.name else self._models:
            with suppress(RefusedError):  # no router of it is here
                found.append(_statistics(each.model.name, await each.backend.engine()))
        return protocol.ModelStatisticsResponse(model_stats=found)

    async def ModelMetadata(
        self, request: protocol.ModelMetadataRequest, context: AnyContext
    ) -> protocol.ModelMetadataResponse:
        await self._check(request.name, request.version, context)
        tensor = protocol.ModelMetadataResponse.TensorMetadata
        return protocol.ModelMetadataResponse(
            name=request.name,
            versions=[VERSION],
            platform=PLATFORM,
            inputs=[
                tensor(name=TEXT_INPUT, datatype="BYTES", shape=[1]),
                tensor(name=STREAM[0], datatype="BOOL", shape=[1]),
            ],
            outputs=[tensor(name=name, datatype="BYTES", shape=[1]) for name in OUTPUTS],
        )

    async def ModelConfig(
        self, request: protocol.ModelConfigRequest, context: AnyContext
    ) -> protocol.ModelConfigResponse:
        await self._check(request.name, request.version, context)
        config = protocol.ModelConfig(
            name=request.name,
            platform=PLATFORM,
            backend=PLATFORM,
            input=[
                protocol.ModelInput(name=TEXT_INPUT, data_type=protocol.TYPE_STRING, dims=[1]),
                protocol.ModelInput(name=STREAM[0], data_type=protocol.TYPE_BOOL, dims=[1], optional=True),
            ],
            output=[protocol.ModelOutput(name=name, data_type=protocol.TYPE_STRING, dims=[1]) for name in OUTPUTS],
            model_transaction_policy=protocol.ModelTransactionPolicy(decoupled=True),
        )
        return protocol.ModelConfigResponse(config=config)

    async def _check(self, name: str, version: str, context: AnyContext) -> Intake:
        """Return the intake of a model; end the call for a name or version that is not served."""
        async with denying(context):
            intake = self._models.of(name)
            check_version(name, version)
        return intake


def _statistics(name: str, engine: EngineState) -> protocol.ModelStatistics:
    return protocol.ModelStatistics(
        name=name,
        version=VERSION,
        inference_count=engine.answered.count,
        inference_stats=protocol.InferStatistics(
            success=_duration(engine.answered),
            fail=protocol.StatisticDuration(count=engine.num_failed),
            queue=_duration(engine.queued),
            compute_infer=_duration(engine.computed),
        ),
    )


def _duration(span: Span) -> protocol.StatisticDuration:
    return protocol.StatisticDuration(count=span.count, ns=round(span.total_s * 1e9))


class _Stream:
    """The requests of one ModelStreamInfer call."""

    def __init__(self, models: Models, context: AnyContext, writer: CallWriter) -> None:
        self.room = asyncio.Semaphore(MAX_CONCURRENT)
        self._models = models
        self._context = context
        self._writer = writer

    async def serve(self, request: protocol.ModelInferRequest) -> None:
        """Write one request's replies. Raises RefusedError where the stream is read too slowly."""
        try:
            await self._serve(request)
        except RefusedError as error:
            if error.refused.cause is Cause.SLOW_READER:
                raise
            await self._fail(request, str(error.refused))
        finally:
            self.room.release()

    async def _serve(self, request: protocol.ModelInferRequest) -> None:
        if request.ByteSize() > PUBLIC_MESSAGE_BYTES:
            raise invalid("message", f"{request.ByteSize()} bytes are over the limit of {PUBLIC_MESSAGE_BYTES}")
        asked, texts = native(request), list[str]()

        def replies(_answer: Answer, gains: Sequence[Gain], _outcome: Outcome | None) -> Sequence[object]:
            found = []
            for gain in gains:
                texts.append(gain.text)
                if gain.finish_reason or (asked.streams and gain.text):
                    response = reply(asked, request, "".join(texts), gain.finish_reason)
                    found.append(protocol.ModelStreamInferResponse(infer_response=response))
                    texts.clear()
            return found

        intake = self._models.of(request.model_name)
        await read_answer(intake, asked.request, self._context, self._writer, replies)

    async def _fail(self, request: protocol.ModelInferRequest, text: str) -> None:
        named = protocol.ModelInferResponse(id=request.id)
        self._writer.write((protocol.ModelStreamInferResponse(error_message=text, infer_response=named),))
        await self._writer.drain()
