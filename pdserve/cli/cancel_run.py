"""How soon everything that a cancelled request held is free, as the router's status tells."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import grpc

from pdserve.bench.client import connect
from pdserve.cli.status_board import StatusBoard, all_free, is_busy
from pdserve.clock import Clock, MonotonicClock
from pdserve.errors import CommandError
from pdserve.launch.local import Listener, running
from pdserve.launch.plan import ClusterSpec
from pdserve.proto.v1 import admin_pb2 as admin
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.proto.v1 import link_pb2 as link
from pdserve.proto.v1.inference_pb2_grpc import InferenceServiceStub

PATIENCE_S = 30.0
LONGEST_PAUSE_S = 0.3  # between the status that shows a request where it is wanted, and its cancel

ROLES = {"prefill": link.ROLE_PREFILL, "decode": link.ROLE_DECODE}
Call: TypeAlias = "grpc.aio.UnaryStreamCall[inference.GenerateRequest, inference.GenerateResponse]"


@dataclass(frozen=True, slots=True)
class CancelPlan:
    """What is cancelled, and how often at each moment."""

    count: int
    prompt_len: int
    answer_len: int
    vocab_size: int
    seed: int


@dataclass(slots=True)
class CancelTimes:
    """Seconds from the cancel until a pool held nothing, by moment and pool."""

    freed_s: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def add(self, moment: str, role: str, seconds: float) -> None:
        self.freed_s.setdefault(moment, {}).setdefault(role, []).append(seconds)


def _has(role: str) -> Callable[[admin.ClusterStatus], bool]:
    """Return whether a pool has anything in hand."""
    return lambda status: any(is_busy(w) for w in status.workers if w.registration.role == ROLES[role])


def _decodes(status: admin.ClusterStatus) -> bool:
    return not _has("prefill")(status) and any(w.load.num_running for w in status.workers)


MOMENTS: dict[str, Callable[[admin.ClusterStatus], bool]] = {"mid-prefill": _has("prefill"), "mid-decode": _decodes}


async def measure_cancels(spec: ClusterSpec, plan: CancelPlan) -> CancelTimes:
    """Start a cluster, and cancel requests while they are computed and while they decode."""
    board, clock, times = StatusBoard(), MonotonicClock(), CancelTimes()
    rng = random.Random(f"cancel {plan.seed}")
    async with running(spec, Listener(board.put, lambda _: None)) as cluster:
        await cluster.ready.wait()
        async with connect(cluster.state.endpoint) as channel:
            stub = InferenceServiceStub(channel)
            for _ in range(plan.count):
                for moment in MOMENTS:
                    await _cancel_once(stub.Generate(_request(plan, moment, rng)), moment, (board, clock, rng), times)
    return times


def _request(plan: CancelPlan, moment: str, rng: random.Random) -> inference.GenerateRequest:
    length = plan.prompt_len if moment == "mid-prefill" else plan.prompt_len // 8
    ids = [rng.randrange(plan.vocab_size) for _ in range(length)]
    sampling = inference.SamplingParams(temperature=0.0, max_tokens=plan.answer_len, ignore_eos=True)
    return inference.GenerateRequest(token_ids=inference.TokenIds(ids=ids), sampling=sampling)


async def _cancel_once(
    call: Call, moment: str, scene: tuple[StatusBoard, Clock, random.Random], times: CancelTimes
) -> None:
    board, clock, rng = scene
    reading = asyncio.create_task(_read(call))
    if not await board.until(MOMENTS[moment], PATIENCE_S):
        raise CommandError(f"no request was seen {moment}: prompts or answers are too short")
    await asyncio.sleep(rng.uniform(0.0, LONGEST_PAUSE_S))
    if not reading.done():
        concerned = [role for role in ROLES if _has(role)(board.last)]
        call.cancel()
        cancelled_s = clock.now_s()
        waits = [_free(board, clock, role) for role in concerned]
        for role, freed_s in zip(concerned, await asyncio.gather(*waits), strict=True):
            times.add(moment, role, freed_s - cancelled_s)
    await reading
    if not await board.until(all_free, PATIENCE_S):
        raise CommandError(f"{moment}: not all pages are free {PATIENCE_S:g} s after the cancel")


async def _free(board: StatusBoard, clock: Clock, role: str) -> float:
    """Return when a pool held nothing; infinitely late where that was not seen."""
    has = _has(role)
    is_free = await board.until(lambda status: not has(status), PATIENCE_S)
    return clock.now_s() if is_free else float("inf")


async def _read(call: Call) -> None:
    try:
        async for _ in call:
            pass
    except (grpc.aio.AioRpcError, asyncio.CancelledError):
        return  # cancelled, as it was meant to be
