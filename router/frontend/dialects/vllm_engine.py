"""The service `vllm.grpc.engine.VllmEngine`: the cluster as one engine, for gateways that drive vLLM over gRPC."""

import asyncio
import hashlib
import json
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Never

import grpc
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineServicer

import pdserve
from pdserve.net.rpc import AnyContext, abort
from pdserve.protocol.refusal import Cause, Refused, RefusedError
from pdserve.router.frontend.answer import Answer, Gain, Outcome
from pdserve.router.frontend.call_writer import CallWriter
from pdserve.router.frontend.clients import bearer
from pdserve.router.frontend.dialects.vllm_messages import Replies, native
from pdserve.router.frontend.grpc_endpoint import denying, read_answer
from pdserve.router.frontend.intake import Intake

CHUNK_BYTES = 64 * 1024  # of a tokenizer's archive


def _unimplemented(text: str) -> Callable[[VllmEngineServicer, object, AnyContext], Awaitable[Never]]:
    """Return a method that says why it is not served."""

    async def refuse_call(_self: VllmEngineServicer, _request: object, context: AnyContext) -> Never:
        await abort(context, grpc.StatusCode.UNIMPLEMENTED, text)

    return refuse_call


class VllmEngine(VllmEngineServicer):  # type: ignore[misc]  # the stubs have no types
    """Opens vLLM's requests at the intake. What is not served answers UNIMPLEMENTED."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake
        intake.backend.aborts.append(self._abort)
        self._started_s = time.monotonic()
        self._running: dict[tuple[str, str], set[asyncio.Task[object]]] = {}  # calls, by tenant and name
        self._archive: tuple[bytes, str] | None = None

    async def Generate(self, request: vllm.GenerateRequest, context: AnyContext) -> None:
        async with denying(context):
            asked = native(request, self._intake.max_model_len())
            tenant = self._intake.clients.tenant(bearer(context.invocation_metadata()))
            made = Replies(asked, streams=request.stream)

            def replies(answer: Answer, gains: Sequence[Gain], outcome: Outcome | None) -> list[vllm.GenerateResponse]:
                return made.take(answer.event.token_ids, gains, outcome)

            with self._abortable(tenant, request.request_id):
                async with CallWriter(context) as writer:
                    await read_answer(self._intake, asked, context, writer, replies)

    @contextmanager
    def _abortable(self, tenant: str, name: str) -> Iterator[None]:
        """For the length of the block, let `Abort` end this call; the block then raises RefusedError."""
        calls, task = self._running.setdefault((tenant, name), set()) if name else set(), asyncio.current_task()
        assert task is not None
        calls.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if task in calls:
                raise  # the client has gone, or the server stops
            task.uncancel()
            raise RefusedError(Refused(Cause.CANCELLED, "the request was aborted")) from None
        finally:
            calls.discard(task)
            if not calls and self._running.get((tenant, name)) is calls:
                del self._running[tenant, name]

    async def Abort(self, request: vllm.AbortRequest, context: AnyContext) -> vllm.AbortResponse:
        """End requests of the caller's tenant by the names that it gave them. Unknown names are ignored."""
        async with denying(context):
            tenant = self._intake.clients.tenant(bearer(context.invocation_metadata()))
        self._intake.backend.abort(tenant, tuple(request.request_ids))
        return vllm.AbortResponse()

    def _abort(self, tenant: str, names: Sequence[str]) -> None:
        for name in names:
            calls = self._running.get((tenant, name), set())
            while calls:
                calls.pop().cancel()

    async def HealthCheck(self, request: vllm.HealthCheckRequest, context: AnyContext) -> vllm.HealthCheckResponse:
        is_ready = (await self._intake.backend.engine()).is_ready
        return vllm.HealthCheckResponse(healthy=is_ready, message="" if is_ready else "no pair of workers can serve")

    async def GetModelInfo(self, request: vllm.GetModelInfoRequest, context: AnyContext) -> vllm.GetModelInfoResponse:
        model, length = self._intake.model, self._intake.max_model_len()
        return vllm.GetModelInfoResponse(
            model_path=model.name,
            served_model_name=model.name,
            tokenizer_path=model.name,
            is_generation=True,
            max_context_length=length,
            max_req_input_len=length,
            vocab_size=model.vocab_size,
            model_type=model.model_type,
            architectures=model.architectures,
            eos_token_ids=model.eos_token_ids,
            default_sampling_params_json=json.dumps(model.defaults.sampling()),
        )

    async def GetServerInfo(
        self, request: vllm.GetServerInfoRequest, context: AnyContext
    ) -> vllm.GetServerInfoResponse:
        state = await self._intake.backend.engine()
        return vllm.GetServerInfoResponse(
            active_requests=state.num_running + state.num_waiting,
            uptime_seconds=time.monotonic() - self._started_s,
            server_type="vllm-grpc",
            data_parallel_size=1,
            max_num_seqs=state.max_num_seqs,
        )

    async def GetLoads(self, request: vllm.GetLoadsRequest, context: AnyContext) -> vllm.GetLoadsResponse:
        state = await self._intake.backend.engine()
        load = vllm.SchedulerLoad(
            num_running_reqs=state.num_running,
            num_waiting_reqs=state.num_waiting,
            num_total_reqs=state.num_running + state.num_waiting,
            num_used_tokens=state.num_tokens,
            max_total_num_tokens=state.max_num_tokens,
            token_usage=state.num_tokens / max(1, state.max_num_tokens),
            max_running_requests=state.max_num_seqs,
        )
        return vllm.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(), version=pdserve.__version__, dp_rank_count=1, loads=[load]
        )

    async def GetTokenizer(self, request: common.GetTokenizerRequest, context: AnyContext) -> None:
        """Stream a ZIP archive of the tokenizer's files; the last chunk has its digest."""
        archived = self._intake.model.archived
        if archived is None:
            await abort(context, grpc.StatusCode.UNIMPLEMENTED, "the tokenizer's files are not known here")
        if self._archive is None:
            data = await asyncio.to_thread(archived)
            self._archive = data, hashlib.sha256(data).hexdigest()
        data, digest = self._archive
        for start in range(0, len(data), CHUNK_BYTES):
            is_last = start + CHUNK_BYTES >= len(data)
            chunk = common.GetTokenizerChunk(data=data[start : start + CHUNK_BYTES], sha256=digest if is_last else "")
            await context.write(chunk)

    Embed = _unimplemented("Embed: the models served here generate text")
    FlushCache = _unimplemented("FlushCache: workers keep their prefix caches; a tenant of its own shares none of them")
    StartProfile = StopProfile = _unimplemented("routers run no profiler; they export traces")
    SubscribeKvEvents = _unimplemented(
        "SubscribeKvEvents: routers place by prefixes themselves; each worker publishes its events over ZMQ"
    )
