"""A cluster under load while an operator works on it: roles change, answers move, workers drain, come and go.

Every token is checked.
"""

import asyncio
import os
import random
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import count, pairwise
from statistics import fmean

import grpc

from pdserve.base.clock import Clock, MonotonicClock
from pdserve.base.errors import CommandError
from pdserve.base.ids import WorkerId
from pdserve.base.roles import POOLS, Role
from pdserve.launch.local import LocalCluster
from pdserve.launch.plan import ClusterSpec
from pdserve.measure.chaos import REQUEST_DEADLINE_S, Tally, tally
from pdserve.measure.client import Client, new_tenant
from pdserve.measure.known_answers import KnownRequest, check_answer
from pdserve.measure.live import Report, StatusBoard, recovered, saturate, started
from pdserve.measure.outcomes import Outcome, Percentiles, percentiles
from pdserve.measure.workload import Arrival
from pdserve.net.operator_client import LauncherClient
from pdserve.proto.v1 import admin_pb2 as admin
from pdserve.protocol.link import ROLES
from pdserve.router.requests.timeline import Moved

MOVE_PAUSE_S = 0.4  # between two calls that ask for moves
MOST_MOVED_AT_ONCE = 4
BACK_WITHIN_S = 90.0
_REFUSED = (
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.UNAVAILABLE,
)


@dataclass(frozen=True, slots=True)
class OperationsPlan:
    num_flips: int
    num_moves: int  # that succeed, drains' included
    num_drains: int  # of each worker, which starts again: once each is a rolling restart
    num_cycles: int  # in which one worker more starts, and ends for good once it serves
    pause_s: float  # between flips, drains and cycles, on average
    within_s: float
    seed: int


@dataclass(slots=True)
class Record:
    """What was done. Times are seconds of calls, or until a worker's process had ended."""

    flips_s: list[float] = field(default_factory=list)
    starts_s: list[float] = field(default_factory=list)  # until one more worker served
    drains_s: list[float] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)  # calls that the router refused, in words
    is_complete: bool = False


class Operations:
    """Does an operator's work. The cluster always keeps a worker that computes prompts and one that decodes."""

    def __init__(self, cluster: LocalCluster, board: StatusBoard, plan: OperationsPlan, clock: Clock) -> None:
        state = cluster.state
        self.record = Record()
        self._cluster = cluster
        self._board = board
        self._operator = state.operator()
        self._launcher = LauncherClient(state.launcher, state.secret_file, state.identity_dir)
        self._plan = plan
        self._clock = clock
        self._rng = random.Random(f"operations {plan.seed}")

    async def run(self) -> None:
        """Do all that is planned, or what time allows."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._plan.within_s), asyncio.TaskGroup() as tasks:
                tasks.create_task(self._move())
                await self._operate()
            self.record.is_complete = True

    async def _move(self) -> None:
        """Ask for moves until enough have succeeded."""
        while self._board.last.moves["done"] < self._plan.num_moves:
            await asyncio.sleep(MOVE_PAUSE_S)
            busy = [each.registration.worker_id for each in self._board.last.workers if each.load.num_running]
            if busy:
                source, count = WorkerId(self._rng.choice(busy)), self._rng.randint(1, MOST_MOVED_AT_ONCE)
                try:
                    await self._operator.move(source, count=count)
                except grpc.aio.AioRpcError as error:
                    self._note(f"move off {source}", error)

    async def _operate(self) -> None:
        workers = [process.name for process in self._cluster.state.processes if process.role != "router"]
        acts: list[Callable[[], Awaitable[None]]] = [partial(self._restart, name) for name in workers]
        acts *= self._plan.num_drains
        acts += [self._flip_any] * self._plan.num_flips
        acts += [partial(self._come_and_go, number) for number in range(self._plan.num_cycles)]
        self._rng.shuffle(acts)
        for act in acts:
            await asyncio.sleep(self._rng.expovariate(1 / self._plan.pause_s))
            await act()

    async def _come_and_go(self, number: int) -> None:
        """Start one worker more, of either role in turn, and let it end once it serves."""
        name, role = f"extra-{number}", POOLS[number % len(POOLS)]
        began_s = self._clock.now_s()
        await self._launcher.start_worker(name, role)
        await self._until(lambda status: name in roles_of(status), f"{name} did not serve")
        self.record.starts_s.append(self._clock.now_s() - began_s)
        await asyncio.sleep(self._rng.expovariate(1 / self._plan.pause_s))
        self.record.drains_s.append(await drained(self._cluster, name, self._clock, self._launcher.stop_worker(name)))
        await self._until(lambda status: name not in roles_of(status), f"{name} has ended, and is counted on")

    async def _flip_any(self) -> None:
        while True:
            roles = roles_of(self._board.last)
            choices = [
                (name, role)
                for name, before in roles.items()
                for role in Role
                if role != before and serves({**roles, name: role})
            ]
            if choices and await self._flip(*self._rng.choice(choices)):
                return
            await self._board.changed()

    async def _flip(self, name: str, role: Role) -> bool:
        began_s = self._clock.now_s()
        try:
            await self._operator.set_role(WorkerId(name), role)
        except grpc.aio.AioRpcError as error:
            self._note(f"{role} for {name}", error)
            return False
        self.record.flips_s.append(self._clock.now_s() - began_s)
        return True

    async def _restart(self, name: str) -> None:
        """Drain a worker, once the others can do without it, and wait until its next process is ready."""
        while not serves(others := {each: role for each, role in roles_of(self._board.last).items() if each != name}):
            if not others or not await self._flip(self._rng.choice(sorted(others)), Role.MIXED):
                await self._board.changed()
        asked = self._operator.drain(WorkerId(name))
        self.record.drains_s.append(await drained(self._cluster, name, self._clock, asked))
        await self._until(lambda status: name not in roles_of(status), f"{name} has ended, and is counted on")
        await self._until(lambda status: name in roles_of(status), f"{name} was not ready again")

    async def _until(self, holds: Callable[[admin.ClusterStatus], bool], otherwise: str) -> None:
        if not await self._board.until(holds, BACK_WITHIN_S):
            raise CommandError(f"{otherwise} within {BACK_WITHIN_S:g} s")

    def _note(self, what: str, error: grpc.aio.AioRpcError) -> None:
        if error.code() not in _REFUSED:
            raise error
        self.record.refused.append(f"{what}: {error.code().name}: {error.details()}")


async def drained(cluster: LocalCluster, name: str, clock: Clock, ask: Awaitable[None]) -> float:
    """Drain a worker as `ask` does; return the seconds until its process has ended."""
    pid = cluster.state.pid_of(name)
    if pid is None:
        raise CommandError(f"{name} does not run")
    process = os.pidfd_open(pid)
    try:
        began_s, ended = clock.now_s(), asyncio.Event()
        asyncio.get_running_loop().add_reader(process, ended.set)
        await ask
        await ended.wait()
        return clock.now_s() - began_s
    finally:
        asyncio.get_running_loop().remove_reader(process)
        os.close(process)


def roles_of(status: admin.ClusterStatus) -> dict[str, Role]:
    """Return the roles of the workers that serve, as they last reported them."""
    return {
        each.registration.worker_id: ROLES[each.load.role or each.registration.role]
        for each in status.workers
        if each.registration.ready and not each.load.draining
    }


def serves(roles: Mapping[str, Role]) -> bool:
    """Return whether workers of these roles can serve together. A mixed worker alone cannot move its answers."""
    return len(roles) > 1 and all(any(role.is_in(pool) for role in roles.values()) for pool in POOLS)


STEPS_ALLOWED = 3  # that a move may cost, beside the transfer of the last page
_NEAR = 12  # gaps on each side of a move: their mean stands for the time of a step then


@dataclass(frozen=True, slots=True)
class MovedGap:
    """The longest time between two tokens of an answer where it moved."""

    at_s: float  # when it began
    gap_s: float
    first_s: float  # the gap that ends with the target's first token; `gap_s` is the longer of it and the next
    step_s: float  # mean gap around the move: a mean, because a busy client reads several tokens at once
    move: Moved | None  # None: of an answer that never moved

    @property
    def allowed_s(self) -> float:
        return STEPS_ALLOWED * self.step_s + (self.move.handoff_ms / 1e3 if self.move is not None else 0.0)


@dataclass(frozen=True, slots=True)
class MovesVerdict:
    capacity_per_s: float
    rate_per_s: float
    tally: Tally
    moves: dict[str, int]  # by how they ended, as the router counts
    record: Record
    gaps: tuple[MovedGap, ...]  # of moved answers
    beside: tuple[MovedGap, ...]  # of answers that never moved, at the moments of moves
    free_after_s: float | None
    left_over: str
    num_ended: int  # requests, as the router counts

    @property
    def is_clean(self) -> bool:
        """Return whether all was done, every request answered rightly and ended once, and every page came back."""
        is_right = self.tally.num_right == self.tally.summary.num_requests == self.num_ended
        return is_right and not self.left_over and self.record.is_complete

    @property
    def result(self) -> dict[str, object]:
        """The verdict as its table and its JSON have it: all on one level."""
        record, fields = self.record, asdict(self)
        del fields["tally"]
        return {
            **self.tally.result,
            **fields,
            "done": {"flips": len(record.flips_s), "drains": len(record.drains_s), "starts": len(record.starts_s)},
            "num_calls_refused": len(record.refused),
            "flip_s": percentiles(record.flips_s),
            "drain_s": percentiles(record.drains_s),
            "start_s": percentiles(record.starts_s),
            "move_gap_s": percentiles(gap.gap_s for gap in self.gaps),
            "step_beside_it_s": percentiles(gap.step_s for gap in self.gaps),
            "move_gap_over_allowed": over_allowed(self.gaps),
            "first_gap_over_allowed": percentiles(g.first_s / g.allowed_s for g in self.gaps if g.allowed_s),
            "unmoved_gap_over_allowed": over_allowed(self.beside),
        }


async def run_moves(
    spec: ClusterSpec,
    load: float,
    calibration_s: float,
    plan: OperationsPlan,
    requests: Sequence[KnownRequest],
    report: Report,
) -> MovesVerdict:
    """Start a cluster, load it with this share of its capacity, and do an operator's work on it meanwhile."""
    gaps, unmoved = list[MovedGap](), list[Sequence[float]]()
    async with started(spec, report) as (cluster, live, board):
        report("calibrating: keeping the cluster full")
        arrivals = [Arrival(0.0, len(each.prompt), each.params.max_tokens) for each in requests]
        capacity = await saturate(live.client, arrivals, [each.prompt for each in requests], calibration_s)
        await recovered(lambda: cluster.state, board)
        before, rate = sum(board.last.ended.values()), load * capacity
        report(f"capacity {capacity:.2f} requests/s; operating under {rate:.2f} requests/s")

        def on_end(outcome: Outcome) -> None:
            gaps.extend(moved_gaps(outcome))
            moved = {move.index for move in outcome.moves}
            unmoved.extend(times_s for index, times_s in outcome.times_s.items() if index not in moved)
            check_answer(outcome, requests)
            if not outcome.is_good:
                report(f"{outcome}")

        operations = Operations(cluster, board, plan, MonotonicClock())
        async with asyncio.TaskGroup() as tasks:
            operating = tasks.create_task(operations.run())
            outcomes = await _load(live.client, requests, rate, operating, on_end)
        free_after_s, left_over = await recovered(lambda: cluster.state, board)
        return MovesVerdict(
            capacity_per_s=capacity,
            rate_per_s=rate,
            tally=tally("moves", outcomes),
            moves=dict(board.last.moves),
            record=operations.record,
            gaps=tuple(gaps),
            beside=tuple(gaps_beside(gaps, unmoved)),
            free_after_s=free_after_s,
            left_over=left_over,
            num_ended=sum(board.last.ended.values()) - before,
        )


async def _load(
    client: Client,
    requests: Sequence[KnownRequest],
    rate: float,
    operating: asyncio.Task[None],
    on_end: Callable[[Outcome], None],
) -> list[Outcome]:
    """Send the requests in turn, at random moments, while the operator works. Rounds share no cached prompts."""
    rng, tenant, began_s = random.Random("moves"), new_tenant(), client.clock.now_s()

    async def send(number: int) -> Outcome:
        round_, place = divmod(number, len(requests))
        message = requests[place].message(REQUEST_DEADLINE_S, f"{tenant}-{round_}")
        outcome = await client.send(message, began_s)
        outcome.number = number
        on_end(outcome)
        return outcome

    sent: list[asyncio.Task[Outcome]] = []
    async with asyncio.TaskGroup() as tasks:
        for number in count():
            await asyncio.wait((operating,), timeout=rng.expovariate(rate))
            if operating.done():
                break
            sent.append(tasks.create_task(send(number)))
    return [each.result() for each in sent]


def moved_gaps(outcome: Outcome) -> list[MovedGap]:
    """Return the gap of each move that an answer outlived."""
    found = (_longest(outcome.times_s.get(move.index, ()), move.num_tokens - 1, move) for move in outcome.moves)
    return [gap for gap in found if gap is not None]


def gaps_beside(moved: Iterable[MovedGap], unmoved: Iterable[Sequence[float]]) -> list[MovedGap]:
    """Return the gaps of answers that never moved, at the moments when others moved. `unmoved`: their tokens' times.

    The gap after a first token is left out: there the answer waits for a place to decode.
    """
    answers, found = [times_s[1:] for times_s in unmoved if len(times_s) > 1], list[MovedGap | None]()
    for gap in moved:
        under_way = (times_s for times_s in answers if times_s[0] <= gap.at_s < times_s[-1])
        found += [_longest(times_s, bisect_right(times_s, gap.at_s) - 1) for times_s in under_way]
    return [gap for gap in found if gap is not None]


def _longest(times_s: Sequence[float], place: int, move: Moved | None = None) -> MovedGap | None:
    """Return the longer of the gaps after token `place` and the next one; None where there is nothing to compare."""
    gaps_s = [later - earlier for earlier, later in pairwise(times_s)]
    there = range(max(0, place), min(len(gaps_s), place + 2))
    begin, end = max(0, there.start - _NEAR), there.stop + _NEAR
    near_s = [gap_s for at, gap_s in enumerate(gaps_s[begin:end], begin) if at not in there]
    if not there or not near_s:
        return None
    longest = max(there, key=lambda at: gaps_s[at])
    return MovedGap(times_s[longest], gaps_s[longest], gaps_s[there.start], fmean(near_s), move)


def over_allowed(gaps: Iterable[MovedGap]) -> Percentiles | None:
    """Return each gap over its allowed time. An answer whose tokens came all at once has no such time."""
    return percentiles(gap.gap_s / gap.allowed_s for gap in gaps if gap.allowed_s)
