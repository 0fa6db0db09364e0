"""An operator's work on a cluster under load: changing roles, moving answers, draining, adding and removing workers."""

import asyncio
import os
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import grpc

from pdserve.clock import Clock
from pdserve.errors import CommandError
from pdserve.ids import WorkerId
from pdserve.launch.admin import AdminClient, LauncherClient
from pdserve.launch.local import LocalCluster
from pdserve.measure.live import StatusBoard
from pdserve.proto.v1 import admin_pb2 as admin
from pdserve.roles import POOLS, Role
from pdserve.wire import ROLES

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
Roles = Mapping[str, Role]  # by worker


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
    """Does an operator's work, never leaving the cluster without one who computes prompts and one who decodes."""

    def __init__(
        self,
        cluster: LocalCluster,
        board: StatusBoard,
        clients: tuple[AdminClient, LauncherClient],
        plan: OperationsPlan,
        clock: Clock,
    ) -> None:
        self.record = Record()
        self._cluster = cluster
        self._board = board
        self._operator, self._launcher = clients
        self._plan = plan
        self._clock = clock
        self._rng = random.Random(f"operations {plan.seed}")

    async def run(self) -> None:
        """Do all that is planned, or what time allows."""
        try:
            async with asyncio.timeout(self._plan.within_s), asyncio.TaskGroup() as tasks:
                tasks.create_task(self._move())
                await self._operate()
            self.record.is_complete = True
        except TimeoutError:
            return

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


def roles_of(status: admin.ClusterStatus) -> dict[str, Role]:
    """Return the roles of the workers that serve, as they last reported them."""
    return {
        each.registration.worker_id: ROLES[each.load.role or each.registration.role]
        for each in status.workers
        if each.registration.ready and not each.load.draining
    }


def serves(roles: Roles) -> bool:
    """Return whether workers of these roles can serve together: no single mixed one, which has nobody to move to."""
    return len(roles) > 1 and all(any(role.is_in(pool) for role in roles.values()) for pool in POOLS)


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
