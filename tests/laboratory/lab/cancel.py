"""How soon everything that a cancelled request held is free, as the router's status shows."""

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

import grpc

from pdserve.base.clock import MonotonicClock
from pdserve.base.errors import CommandError
from pdserve.base.roles import POOLS, Role
from pdserve.launch.plan import ClusterSpec
from pdserve.measure.client import request_of
from pdserve.measure.live import StatusBoard, all_free, is_busy, started
from pdserve.measure.outcomes import ANY, Percentiles, percentiles
from pdserve.measure.workload import Arrival
from pdserve.proto.v1 import admin_pb2 as admin
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.protocol.link import ROLE_NUMBERS

PATIENCE_S = 30.0
LONGEST_PAUSE_S = 0.3  # between the status that shows the wanted moment, and the cancel; its length is random

_Call: TypeAlias = "grpc.aio.UnaryStreamCall[inference.GenerateRequest, inference.GenerateResponse]"


@dataclass(frozen=True, slots=True)
class Freed:
    """Times from cancels until a pool held nothing, as the router's status shows."""

    name: str  # when they were cancelled, and which pool
    num_cancels: int
    freed_s: Percentiles


def _has(role: Role) -> Callable[[admin.ClusterStatus], bool]:
    """Return whether a pool has anything in hand."""
    return lambda status: any(is_busy(w) for w in status.workers if w.registration.role == ROLE_NUMBERS[role])


def _decodes(status: admin.ClusterStatus) -> bool:
    return not _has(Role.PREFILL)(status) and any(w.load.num_running for w in status.workers)


MOMENTS: dict[str, Callable[[admin.ClusterStatus], bool]] = {"mid-prefill": _has(Role.PREFILL), "mid-decode": _decodes}


async def measure_cancels(
    spec: ClusterSpec, count: int, prompt_tokens: int, output_tokens: int, seed: int
) -> list[Freed]:
    """Start a cluster, and cancel requests while they are computed and while they decode, `count` of each.

    `prompt_tokens`: of a request that is cancelled while its prompt is computed. Prompts of the others are shorter.
    """
    rng, freed_s = random.Random(f"cancel {seed}"), dict[tuple[str, str], list[float]]()
    lengths = {"mid-prefill": prompt_tokens, "mid-decode": prompt_tokens // 8}
    async with started(spec, lambda _: None) as (_, live, board):
        for _ in range(count):
            for moment, length in lengths.items():
                ids = [rng.randrange(live.vocab_size) for _ in range(length)]
                call = live.client.stub.Generate(request_of(Arrival(0.0, length, output_tokens), ids, "", ANY))
                for pool, seconds in (await _cancel(call, moment, board, rng)).items():
                    freed_s.setdefault((moment, pool), []).append(seconds)
    found = [(f"{moment}, {pool}", len(values), percentiles(values)) for (moment, pool), values in freed_s.items()]
    return [Freed(name, count, shares) for name, count, shares in found if shares is not None]


async def _cancel(call: _Call, moment: str, board: StatusBoard, rng: random.Random) -> dict[str, float]:
    """Cancel a request at the wanted moment; return how long each pool still held something of it."""
    clock, times = MonotonicClock(), dict[str, float]()
    reading = asyncio.create_task(_read(call))
    if not await board.until(MOMENTS[moment], PATIENCE_S):
        raise CommandError(f"no request was seen {moment}: prompts or answers are too short")
    await asyncio.sleep(rng.uniform(0.0, LONGEST_PAUSE_S))
    if not reading.done():
        concerned = [pool for pool in POOLS if _has(pool)(board.last)]
        call.cancel()
        cancelled_s = clock.now_s()

        async def freed(pool: Role) -> None:
            has = _has(pool)
            is_free = await board.until(lambda status: not has(status), PATIENCE_S)
            times[pool] = clock.now_s() - cancelled_s if is_free else float("inf")

        async with asyncio.TaskGroup() as tasks:
            for pool in concerned:
                tasks.create_task(freed(pool))
    await reading
    if not await board.until(all_free, PATIENCE_S):
        raise CommandError(f"{moment}: not all pages are free {PATIENCE_S:g} s after the cancel")
    return times


async def _read(call: _Call) -> None:
    with suppress(grpc.aio.AioRpcError, asyncio.CancelledError):  # cancelled, as it was meant to be
        async for _ in call:
            pass
