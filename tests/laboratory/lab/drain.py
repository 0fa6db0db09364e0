"""How long a decode worker with many running answers takes to drain, beside the time that moving their pages takes."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lab.moves import MovedGap, drained, moved_gaps, over_allowed
from pdserve.base.clock import MonotonicClock
from pdserve.base.errors import CommandError
from pdserve.base.ids import WorkerId
from pdserve.base.roles import Role
from pdserve.launch.plan import ClusterSpec
from pdserve.measure.client import Client, new_tenant
from pdserve.measure.known_answers import KnownRequest, check_answer
from pdserve.measure.live import Report, StatusBoard, recovered, started
from pdserve.measure.outcomes import Outcome, Percentiles, percentiles
from pdserve.proto.v1 import admin_pb2 as admin
from pdserve.proto.v1 import link_pb2 as link

LEAVING, STAYING = WorkerId("decode-0"), WorkerId("decode-1")
REQUEST_DEADLINE_S = 600.0
REACHED_WITHIN_S = 300.0


@dataclass(frozen=True, slots=True)
class DrainFindings:
    num_answers: int  # that ran when it began
    kv_tokens: int  # of theirs
    drain_s: float
    idle_drain_s: float  # of the other worker, when nothing ran
    moved_bytes: int
    bytes_per_s: float  # measured between the two when they met
    transfer_s: float  # of these bytes at this rate
    beyond_transfer_s: float  # of the drain
    moves: dict[str, int]  # by how they ended
    gap_s: Percentiles | None
    over_allowed: Percentiles | None
    failed: tuple[str, ...]  # answers that were not right, in words
    left_over: str


async def measure_drain(
    spec: ClusterSpec, requests: Sequence[KnownRequest], count: int, report: Report
) -> DrainFindings:
    """Start two decode workers, run `count` answers on one, and drain it once half of their tokens are there."""
    clock, gaps, pairs = MonotonicClock(), list[MovedGap](), dict[str, float]()
    async with started(spec, report) as (cluster, live, board):
        operator = cluster.state.operator()
        board.watchers.append(lambda status: pairs.update(_bandwidth(status)))
        await operator.set_role(STAYING, Role.PREFILL)  # so that all answers begin on the other

        def on_end(outcome: Outcome) -> None:
            gaps.extend(moved_gaps(outcome))
            check_answer(outcome, requests)

        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(_send(live.client, requests, count, on_end))
            report(f"{count} answers begin on {LEAVING}")
            kv_tokens = await _until_begun(board, requests, count)
            await operator.set_role(STAYING, Role.DECODE)
            await operator.move(LEAVING, STAYING, 1)  # the two have met, and know their bandwidth
            if not await board.until(lambda status: status.moves["done"] > 0, REACHED_WITHIN_S):
                raise CommandError(f"no answer moved from {LEAVING} to {STAYING}: {dict(board.last.moves)}")
            report(f"draining {LEAVING}, with {kv_tokens} tokens of KV")
            drain_s = await drained(cluster, LEAVING, clock, operator.drain(LEAVING))
            report(f"it has left after {drain_s:.2f} s")
            outcomes = await running
        _, left_over = await recovered(lambda: cluster.state, board)
        idle_drain_s = await drained(cluster, STAYING, clock, operator.drain(STAYING))
        moved_bytes = sum(move.handoff_bytes for outcome in outcomes for move in outcome.moves)
        bytes_per_s = pairs.get(STAYING, float("nan"))
        return DrainFindings(
            num_answers=count,
            kv_tokens=kv_tokens,
            drain_s=drain_s,
            idle_drain_s=idle_drain_s,
            moved_bytes=moved_bytes,
            bytes_per_s=bytes_per_s,
            transfer_s=moved_bytes / bytes_per_s,
            beyond_transfer_s=drain_s - moved_bytes / bytes_per_s,
            moves=dict(board.last.moves),
            gap_s=percentiles(gap.gap_s for gap in gaps),
            over_allowed=over_allowed(gaps),
            failed=tuple(f"{o.status} {o.detail} {o.wrong}" for o in outcomes if not o.is_good),
            left_over=left_over,
        )


async def _send(
    client: Client, requests: Sequence[KnownRequest], count: int, on_end: Callable[[Outcome], None]
) -> list[Outcome]:
    """Send the requests in turn, all at once; no two share a cached prompt."""
    asked = [requests[number % len(requests)] for number in range(count)]
    return await client.run([(0.0, each.message(REQUEST_DEADLINE_S, new_tenant())) for each in asked], on_end)


async def _until_begun(board: StatusBoard, requests: Sequence[KnownRequest], count: int) -> int:
    """Wait until all answers run and have half of their tokens; return how many tokens of KV they have."""
    asked = [requests[number % len(requests)] for number in range(count)]
    wanted = sum(len(each.prompt) + each.params.max_tokens / 2 for each in asked)

    def has_begun(status: admin.ClusterStatus) -> bool:
        load = _load_of(status)
        return load.num_running == count and load.kv_tokens >= wanted

    if not await board.until(has_begun, REACHED_WITHIN_S):
        load = _load_of(board.last)
        raise CommandError(f"{LEAVING} runs {load.num_running} of {count} answers, with {load.kv_tokens} tokens")
    return _load_of(board.last).kv_tokens


def _load_of(status: admin.ClusterStatus) -> link.Heartbeat:
    return next((each.load for each in status.workers if each.registration.worker_id == LEAVING), link.Heartbeat())


def _bandwidth(status: admin.ClusterStatus) -> dict[str, float]:
    """Return how fast the leaving worker reaches others, by their names."""
    leaving = [each for each in status.workers if each.registration.worker_id == LEAVING]
    return {pair.decode_worker_id: float(pair.bytes_per_s) for each in leaving for pair in each.pairs}
