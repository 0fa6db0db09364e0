"""Send a workload to a router, open loop: nothing waits for an answer before the next request goes out."""

import asyncio
import secrets
from collections.abc import Callable, Sequence

import grpc

from pdserve import rpc
from pdserve.bench.summary import Sample, Slo
from pdserve.bench.workload import Arrival
from pdserve.clock import Clock
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.proto.v1.inference_pb2_grpc import InferenceServiceStub


class LoadClient:
    """One connection over which a benchmark sends its requests."""

    def __init__(self, channel: grpc.aio.Channel, clock: Clock, slo: Slo) -> None:
        self.clock = clock
        self._stub = InferenceServiceStub(channel)
        self._slo = slo

    async def vocab_size(self) -> int:
        """Return the size of the served model's vocabulary."""
        models = (await self._stub.ListModels(inference.ListModelsRequest(), timeout=30)).models
        return models[0].vocab_size

    def new_tenant(self) -> str:
        """Return a tenant of its own: it finds none of another's prompts in a prefix cache."""
        return f"bench-{secrets.token_hex(8)}"

    async def run(
        self,
        arrivals: Sequence[Arrival],
        prompts: Sequence[Sequence[int]],
        on_end: Callable[[], None],
        slo: Slo | None = None,
    ) -> list[Sample]:
        """Send each request at its time, as one tenant of this run; return what came of it, in the same order."""
        tenant = self.new_tenant()
        requests = [
            self._request(arrival, ids, tenant, slo or self._slo)
            for arrival, ids in zip(arrivals, prompts, strict=True)
        ]
        began_s = self.clock.now_s()
        async with asyncio.TaskGroup() as tasks:
            calls = [
                tasks.create_task(self._send(arrival, request, began_s, on_end))
                for arrival, request in zip(arrivals, requests, strict=True)
            ]
        return [call.result() for call in calls]

    async def ask(self, arrival: Arrival, token_ids: Sequence[int], tenant: str) -> Sample:
        """Send one request now; return what came of it."""
        began_s = self.clock.now_s() - arrival.start_s
        return await self._send(arrival, self._request(arrival, token_ids, tenant, self._slo), began_s, lambda: None)

    def _request(self, arrival: Arrival, token_ids: Sequence[int], tenant: str, slo: Slo) -> inference.GenerateRequest:
        return inference.GenerateRequest(
            token_ids=inference.TokenIds(ids=token_ids),
            sampling=inference.SamplingParams(temperature=0.0, max_tokens=arrival.output_len, ignore_eos=True),
            slo=inference.Slo(ttft_ms=slo.ttft_ms, tpot_ms=slo.tpot_ms),
            tenant=tenant,
        )

    async def _send(
        self,
        arrival: Arrival,
        request: inference.GenerateRequest,
        began_s: float,
        on_end: Callable[[], None],
    ) -> Sample:
        await asyncio.sleep(max(0.0, began_s + arrival.start_s - self.clock.now_s()))
        sent_s = self.clock.now_s() - began_s
        token_times_s: list[float] = []
        ledger, usage = inference.Ledger(), inference.Usage()
        status, hints = "OK", dict[str, float]()
        try:
            async for reply in self._stub.Generate(request):
                num_tokens = sum(len(delta.token_ids) for delta in reply.deltas)
                token_times_s += [self.clock.now_s() - began_s] * num_tokens
                if reply.HasField("ledger"):
                    ledger, usage = reply.ledger, reply.usage
        except grpc.aio.AioRpcError as error:
            status, hints = error.code().name, _hints(error)
        else:
            hints = _predictions(ledger)
        on_end()
        return Sample(
            sent_s=sent_s,
            token_times_s=tuple(token_times_s),
            ended_s=self.clock.now_s() - began_s,
            status=status,
            prompt_len=arrival.prompt_len,
            handoff_bytes=ledger.handoff_bytes,
            handoff_ms=ledger.handoff_ms,
            predicted_ttft_s=hints.get("predicted-ttft-ms"),
            predicted_tpot_s=hints.get("predicted-tpot-ms"),
            retry_after_s=hints.get("retry-after-ms"),
            rungs_ms={step.name: step.at_ms for step in ledger.steps},
            cached_tokens=usage.cached_tokens,
            prefill_worker=ledger.prefill_worker,
        )


def _hints(error: grpc.aio.AioRpcError) -> dict[str, float]:
    """Return the seconds that a refusal tells of in its trailing metadata, by name."""
    told = {key: value for key, value in error.trailing_metadata() if key.endswith("-ms")}
    return {key: float(value) / 1e3 for key, value in told.items()}


def _predictions(ledger: inference.Ledger) -> dict[str, float]:
    told = {}
    if ledger.HasField("predicted_ttft_ms"):
        told["predicted-ttft-ms"] = ledger.predicted_ttft_ms / 1e3
    if ledger.HasField("predicted_tpot_ms"):
        told["predicted-tpot-ms"] = ledger.predicted_tpot_ms / 1e3
    return told


def connect(endpoint: str) -> grpc.aio.Channel:
    """Open a channel to a router's public endpoint."""
    return grpc.aio.insecure_channel(endpoint, options=rpc.channel_options(rpc.PUBLIC_MESSAGE_BYTES))
