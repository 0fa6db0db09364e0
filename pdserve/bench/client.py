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
        self._stub = InferenceServiceStub(channel)
        self._clock = clock
        self._slo = inference.Slo(ttft_ms=slo.ttft_ms, tpot_ms=slo.tpot_ms)

    async def vocab_size(self) -> int:
        """Return the size of the served model's vocabulary."""
        models = (await self._stub.ListModels(inference.ListModelsRequest(), timeout=30)).models
        return models[0].vocab_size

    async def run(
        self, arrivals: Sequence[Arrival], prompts: Sequence[Sequence[int]], on_end: Callable[[], None]
    ) -> list[Sample]:
        """Send each request at its time and return what came of it, in the same order.

        Each run is a tenant of its own: it finds none of an earlier run's prompts in a prefix cache.
        """
        tenant = f"bench-{secrets.token_hex(8)}"
        requests = [self._request(a, ids, tenant) for a, ids in zip(arrivals, prompts, strict=True)]
        began_s = self._clock.now_s()
        async with asyncio.TaskGroup() as tasks:
            calls = [
                tasks.create_task(self._send(arrival, request, began_s, on_end))
                for arrival, request in zip(arrivals, requests, strict=True)
            ]
        return [call.result() for call in calls]

    def _request(self, arrival: Arrival, token_ids: Sequence[int], tenant: str) -> inference.GenerateRequest:
        return inference.GenerateRequest(
            token_ids=inference.TokenIds(ids=token_ids),
            sampling=inference.SamplingParams(temperature=0.0, max_tokens=arrival.output_len, ignore_eos=True),
            slo=self._slo,
            tenant=tenant,
        )

    async def _send(
        self,
        arrival: Arrival,
        request: inference.GenerateRequest,
        began_s: float,
        on_end: Callable[[], None],
    ) -> Sample:
        await asyncio.sleep(max(0.0, began_s + arrival.start_s - self._clock.now_s()))
        sent_s = self._clock.now_s() - began_s
        token_times_s: list[float] = []
        ledger = inference.Ledger()
        status = "OK"
        try:
            async for reply in self._stub.Generate(request):
                num_tokens = sum(len(delta.token_ids) for delta in reply.deltas)
                token_times_s += [self._clock.now_s() - began_s] * num_tokens
                if reply.HasField("ledger"):
                    ledger = reply.ledger
        except grpc.aio.AioRpcError as error:
            status = error.code().name
        on_end()
        return Sample(
            sent_s=sent_s,
            token_times_s=tuple(token_times_s),
            ended_s=self._clock.now_s() - began_s,
            status=status,
            prompt_len=arrival.prompt_len,
            handoff_bytes=ledger.handoff_bytes,
            handoff_ms=ledger.handoff_ms,
        )


def connect(endpoint: str) -> grpc.aio.Channel:
    """Open a channel to a router's public endpoint."""
    return grpc.aio.insecure_channel(endpoint, options=rpc.channel_options(rpc.PUBLIC_MESSAGE_BYTES))
