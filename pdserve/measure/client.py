"""Sends requests to a router, open loop: nothing waits for an answer unless there is a limit of concurrency."""

import asyncio
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from math import isfinite
from pathlib import Path

import grpc

from pdserve.base.clock import Clock
from pdserve.base.files import read_file
from pdserve.measure.outcomes import OK, Objective, Outcome
from pdserve.measure.workload import Arrival
from pdserve.net import rpc
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.proto.v1.inference_pb2_grpc import InferenceServiceStub
from pdserve.protocol.drafts import Acceptance
from pdserve.router.requests.timeline import Moved

Timed = tuple[float, inference.GenerateRequest]  # seconds after the run's start, and what is sent then


class Door(StrEnum):
    """A protocol that clients speak."""

    GRPC = "grpc"
    HTTP = "http"


@dataclass(frozen=True, slots=True)
class Access:
    """How a client verifies a router, and the key that it sends."""

    ca_file: Path  # of the authorities that may have signed the router's certificate
    api_key: str = ""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the tokens of answers are sampled: by default the likeliest ones."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0  # of the first request; each has one of its own


GREEDY = Sampling()


class OpenLoop(ABC):
    """Sends requests at their times."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    @abstractmethod
    async def vocab_size(self) -> int:
        """Return the size of the served model's vocabulary."""

    @abstractmethod
    async def _receive(self, request: inference.GenerateRequest, outcome: Outcome, began_s: float) -> None:
        """Send one request, and note all of its answer, or how it failed."""

    async def send(self, request: inference.GenerateRequest, began_s: float = 0.0) -> Outcome:
        """Send one request now; return its outcome, with times after `began_s`.

        An answer that ignores ends of sequences is wrong unless it has all tokens that were asked for.
        """
        sampling = request.sampling
        outcome = Outcome(self.clock.now_s() - began_s, len(request.token_ids.ids), sampling.max_tokens, status=OK)
        await self._receive(request, outcome, began_s)
        outcome.ended_s = self.clock.now_s() - began_s
        wanted = max(1, sampling.n) * sampling.max_tokens
        if outcome.status == OK and sampling.ignore_eos and outcome.num_tokens != wanted:
            outcome.wrong = f"{outcome.num_tokens} of {wanted} tokens came"
        return outcome

    def _take(self, outcome: Outcome, gained: Sequence[tuple[int, Sequence[int]]], began_s: float) -> None:
        """Note the tokens of one message, by continuation."""
        if num_tokens := sum(len(ids) for _, ids in gained):
            outcome.take(num_tokens, self.clock.now_s() - began_s)
        for index, ids in gained:
            outcome.tokens.setdefault(index, []).extend(ids)
            outcome.times_s.setdefault(index, []).extend([outcome.last_s] * len(ids))

    async def run(
        self,
        requests: Sequence[Timed],
        on_end: Callable[[Outcome], None] = lambda _: None,
        max_concurrency: int | None = None,
    ) -> list[Outcome]:
        """Send each request at its time, or when fewer than so many are under way; return all outcomes in order."""
        began_s = self.clock.now_s()
        slots = nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)

        async def send(number: int, at_s: float, request: inference.GenerateRequest) -> Outcome:
            await asyncio.sleep(max(0.0, began_s + at_s - self.clock.now_s()))
            async with slots:
                outcome = await self.send(request, began_s)
            outcome.number = number
            on_end(outcome)
            return outcome

        async with asyncio.TaskGroup() as tasks:
            sent = [tasks.create_task(send(number, *timed)) for number, timed in enumerate(requests)]
        return [each.result() for each in sent]


class Client(OpenLoop):
    """One gRPC connection over which a measurement sends its requests."""

    def __init__(self, channel: grpc.aio.Channel, clock: Clock) -> None:
        super().__init__(clock)
        self.stub = InferenceServiceStub(channel)

    async def vocab_size(self) -> int:
        models = (await self.stub.ListModels(inference.ListModelsRequest(), timeout=30)).models
        return models[0].vocab_size

    async def _receive(self, request: inference.GenerateRequest, outcome: Outcome, began_s: float) -> None:
        try:
            async for reply in self.stub.Generate(request):
                self._take(outcome, [(delta.index, delta.token_ids) for delta in reply.deltas], began_s)
                if reply.HasField("ledger"):
                    outcome.cached_tokens = reply.usage.cached_tokens
                    take_ledger(outcome, reply.ledger)
        except grpc.aio.AioRpcError as error:
            outcome.status, outcome.detail = error.code().name, error.details() or ""
            _take_hints(outcome, error)


def take_ledger(outcome: Outcome, ledger: inference.Ledger) -> None:
    """Note what a request's ledger says."""
    outcome.attempts = ledger.attempts
    outcome.prefill_worker, outcome.decode_worker = ledger.prefill_worker, ledger.decode_worker
    outcome.handoff_bytes, outcome.handoff_s = ledger.handoff_bytes, ledger.handoff_ms / 1e3
    outcome.fetched_tokens = ledger.fetched_tokens
    outcome.moves = tuple(
        Moved(move.index, move.num_tokens, move.source, move.target, move.handoff_bytes, move.handoff_ms)
        for move in ledger.moves
    )
    outcome.drafts = {
        source: Acceptance(each.num_drafts, each.num_draft_tokens, list(each.num_accepted_tokens_per_pos))
        for source, each in ledger.drafts.items()
    }
    outcome.stages_s = {step.name: step.at_ms / 1e3 for step in ledger.steps}
    if ledger.HasField("predicted_ttft_ms"):
        outcome.predicted_ttft_s = ledger.predicted_ttft_ms / 1e3
    if ledger.HasField("predicted_tpot_ms"):
        outcome.predicted_tpot_s = ledger.predicted_tpot_ms / 1e3


def _take_hints(outcome: Outcome, error: grpc.aio.AioRpcError) -> None:
    """Take the times in a refusal's trailing metadata."""
    hints = {key: float(value) / 1e3 for key, value in error.trailing_metadata() if key.endswith("-ms")}
    outcome.predicted_ttft_s = hints.get("predicted-ttft-ms")
    outcome.predicted_tpot_s = hints.get("predicted-tpot-ms")
    outcome.retry_after_s = hints.get("retry-after-ms")


def request_of(
    arrival: Arrival, token_ids: Sequence[int], tenant: str, objective: Objective, sampling: Sampling = GREEDY
) -> inference.GenerateRequest:
    """Return a request whose answer has exactly the arrival's length."""
    params = inference.SamplingParams(**asdict(sampling), max_tokens=arrival.output_tokens, ignore_eos=True)
    ids = inference.TokenIds(ids=token_ids)
    return inference.GenerateRequest(token_ids=ids, sampling=params, slo=slo_of(objective), tenant=tenant)


def slo_of(objective: Objective) -> inference.Slo:
    return inference.Slo(
        ttft_ms=1e3 * objective.ttft_s if isfinite(objective.ttft_s) else None,
        tpot_ms=1e3 * objective.tpot_s if isfinite(objective.tpot_s) else None,
    )


def requests_of(
    arrivals: Sequence[Arrival], prompts: Sequence[Sequence[int]], objective: Objective, sampling: Sampling = GREEDY
) -> list[Timed]:
    """Return the requests of one run, all of a tenant of its own."""
    tenant, requests = new_tenant(), list[Timed]()
    for number, (arrival, ids) in enumerate(zip(arrivals, prompts, strict=True)):
        own = replace(sampling, seed=sampling.seed + number)
        requests.append((arrival.at_s, request_of(arrival, ids, tenant, objective, own)))
    return requests


def new_tenant() -> str:
    """Return a tenant of its own: it finds none of another's prompts in a prefix cache."""
    return f"bench-{secrets.token_hex(8)}"


def connect(endpoint: str, access: Access | None = None) -> grpc.aio.Channel:
    """Open a channel to a router's public endpoint: a plain one unless with access."""
    options = rpc.channel_options(rpc.PUBLIC_MESSAGE_BYTES)
    if access is None:
        return grpc.aio.insecure_channel(endpoint, options=options)
    shown = grpc.ssl_channel_credentials(read_file(access.ca_file, "ca_file"))
    if access.api_key:
        shown = grpc.composite_channel_credentials(shown, grpc.access_token_call_credentials(access.api_key))
    return grpc.aio.secure_channel(endpoint, shown, options=options)
