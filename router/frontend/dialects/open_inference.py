"""The door `inference.GRPCInferenceService`: Open Inference Protocol v2, with the streams of Triton's clients.

Streams answer several requests at once, a bounded number, and one that goes wrong ends alone. A reader that is too slow
for one answer is so for all of its stream, which ends.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TypeAlias, TypeVar

import grpc

import pdserve
from pdserve.errors import RequestError, Status
from pdserve.proto.v1 import open_inference_pb2 as protocol
from pdserve.proto.v1.open_inference_pb2_grpc import GRPCInferenceServiceServicer
from pdserve.router.commands import Refused
from pdserve.router.frontend.answer import Gain
from pdserve.router.frontend.api_keys import bearer
from pdserve.router.frontend.clients import DeniedError, OverLimitError
from pdserve.router.frontend.dialects.open_inference_request import (
    OUTPUTS,
    STREAM,
    TEXT_INPUT,
    VERSION,
    Asked,
    check_version,
    native,
    reply,
)
from pdserve.router.frontend.grpc_door import NOT_OPENED, deny, refuse, remaining_s, take_trace
from pdserve.router.frontend.intake import Intake
from pdserve.router.frontend.prompts import check_model
from pdserve.router.frontend.reading import Outcome, Reading, Take
from pdserve.rpc import PUBLIC_MESSAGE_BYTES

PLATFORM = "pdserve"
MAX_CONCURRENT = 64  # requests of one stream; more wait unread

Context: TypeAlias = "grpc.aio.ServicerContext[object, object]"
InferContext: TypeAlias = "grpc.aio.ServicerContext[protocol.ModelInferRequest, protocol.ModelInferResponse]"
Response = TypeVar("Response")
StreamContext: TypeAlias = "grpc.aio.ServicerContext[protocol.ModelInferRequest, protocol.ModelStreamInferResponse]"


class RefusedError(Exception):
    """An answer ended without its text."""

    def __init__(self, refused: Refused, *, was_cut_off: bool) -> None:
        super().__init__(refused.message)
        self.refused = refused
        self.was_cut_off = was_cut_off  # nobody reads


class OpenInference(GRPCInferenceServiceServicer):
    """Opens requests at the intake."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake

    async def ModelInfer(  # noqa: N802
        self, request: protocol.ModelInferRequest, context: InferContext
    ) -> protocol.ModelInferResponse:
        try:
            asked = native(request)
            if asked.streams:
                raise RequestError(
                    Status.INVALID_ARGUMENT, f"{STREAM[0]}: ModelStreamInfer streams, this call does not"
                )
            return await self._whole(asked, request, context)
        except NOT_OPENED as error:
            await deny(context, error)
        except RefusedError as error:
            await refuse(context, error.refused)

    async def ModelStreamInfer(  # type: ignore[override]  # replies are written to the context  # noqa: N802
        self, request_iterator: AsyncIterator[protocol.ModelInferRequest], context: StreamContext
    ) -> None:
        stream, refused = _Stream(self._intake, context), list[Refused]()
        try:
            async with asyncio.TaskGroup() as tasks:
                async for request in request_iterator:
                    await stream.room.acquire()
                    tasks.create_task(stream.serve(request), name="infer")
        except* RefusedError as group:
            refused += [error.refused for error in group.exceptions if isinstance(error, RefusedError)]
        if refused:
            await refuse(context, refused[0])

    async def _whole(
        self, asked: Asked, request: protocol.ModelInferRequest, context: InferContext
    ) -> protocol.ModelInferResponse:
        texts: list[str] = []
        ends: list[int] = []

        async def take(gains: Sequence[Gain], outcome: Outcome | None) -> None:
            del outcome
            texts.extend(gain.text for gain in gains)
            ends.extend(gain.finish_reason for gain in gains)

        await _answer(self._intake, asked, context, take)
        return reply(asked, request, "".join(texts), max(ends))

    async def ServerLive(  # noqa: N802
        self, request: protocol.ServerLiveRequest, context: Context
    ) -> protocol.ServerLiveResponse:
        del request, context
        return protocol.ServerLiveResponse(live=self._intake.backend.standing().is_live)

    async def ServerReady(  # noqa: N802
        self, request: protocol.ServerReadyRequest, context: Context
    ) -> protocol.ServerReadyResponse:
        del request, context
        return protocol.ServerReadyResponse(ready=self._intake.backend.standing().is_ready)

    async def ModelReady(  # noqa: N802
        self, request: protocol.ModelReadyRequest, context: Context
    ) -> protocol.ModelReadyResponse:
        del context
        is_served = request.name in self._intake.model.names and request.version in ("", VERSION)
        return protocol.ModelReadyResponse(ready=is_served and self._intake.backend.standing().is_ready)

    async def ServerMetadata(  # noqa: N802
        self, request: protocol.ServerMetadataRequest, context: Context
    ) -> protocol.ServerMetadataResponse:
        del request, context
        return protocol.ServerMetadataResponse(
            name=PLATFORM, version=pdserve.__version__, extensions=["model_configuration", "parameters"]
        )

    async def ModelMetadata(  # noqa: N802
        self, request: protocol.ModelMetadataRequest, context: Context
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

    async def ModelConfig(  # noqa: N802
        self, request: protocol.ModelConfigRequest, context: Context
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

    async def _check(self, name: str, version: str, context: Context) -> None:
        try:
            check_model(name, self._intake.model)
            check_version(name, version)
        except RequestError as error:
            await deny(context, error)


async def _answer(
    intake: Intake, asked: Asked, context: "grpc.aio.ServicerContext[protocol.ModelInferRequest, Response]", take: Take
) -> None:
    """Let `take` have an answer to its end; raises what Intake.open does, and RefusedError."""
    reading = Reading()
    take_trace(asked.request, context)
    answer = await intake.open(asked.request, reading, bearer(context.invocation_metadata()), remaining_s(context))
    try:
        outcome = await reading.run(answer, take)
    finally:
        intake.leave(answer)
    if isinstance(outcome, Refused):
        raise RefusedError(outcome, was_cut_off=reading.was_cut_off)


class _Stream:
    """The requests of one ModelStreamInfer call."""

    def __init__(self, intake: Intake, context: StreamContext) -> None:
        self.room = asyncio.Semaphore(MAX_CONCURRENT)
        self._intake = intake
        self._context = context
        self._writing = asyncio.Lock()
        self._is_interrupted = False  # in the middle of a write

    async def serve(self, request: protocol.ModelInferRequest) -> None:
        """Write one request's replies. Raises RefusedError where the stream is read too slowly."""
        try:
            await self._serve(request)
        except (DeniedError, OverLimitError) as error:
            await self._fail(request, str(error))
        except RequestError as error:
            await self._fail(request, f"{error.status.value}: {error.message}")
        except RefusedError as error:
            if error.was_cut_off:
                raise
            await self._fail(request, f"{error.refused.status.value}: {error.refused.message}")
        finally:
            self.room.release()

    async def _serve(self, request: protocol.ModelInferRequest) -> None:
        if request.ByteSize() > PUBLIC_MESSAGE_BYTES:
            text = f"message: {request.ByteSize()} bytes are over the limit of {PUBLIC_MESSAGE_BYTES}"
            raise RequestError(Status.INVALID_ARGUMENT, text)
        asked, texts = native(request), list[str]()

        async def take(gains: Sequence[Gain], outcome: Outcome | None) -> None:
            del outcome
            for gain in gains:
                texts.append(gain.text)
                if gain.finish_reason or (asked.streams and gain.text):
                    await self._write(infer_response=reply(asked, request, "".join(texts), gain.finish_reason))
                    texts.clear()

        await _answer(self._intake, asked, self._context, take)

    async def _fail(self, request: protocol.ModelInferRequest, text: str) -> None:
        await self._write(error_message=text, infer_response=protocol.ModelInferResponse(id=request.id))

    async def _write(self, **fields: object) -> None:
        async with self._writing:
            if self._is_interrupted:
                await asyncio.Event().wait()  # gRPC takes no other write; all tasks of this stream are being cancelled
            try:
                await self._context.write(protocol.ModelStreamInferResponse(**fields))  # type: ignore[arg-type]
            except asyncio.CancelledError:
                self._is_interrupted = True
                raise
