"""An operator at work on a cluster under load: roles are flipped, answers moved, workers drained and awaited again."""

import asyncio
import os
import random
from collections.abc import Mapping
from dataclasses import dataclass, field

import grpc

from pdserve.clock import Clock
from pdserve.errors import CommandError
from pdserve.ids import WorkerId
from pdserve.launch.admin import AdminClient
from pdserve.launch.local import LocalCluster
from pdserve.measure.board import StatusBoard
from pdserve.proto.v1 import admin_pb2 as admin
from pdserve.proto.v1 import link_pb2 as link

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
_COMPUTES = {link.ROLE_PREFILL, link.ROLE_MIXED}
_DECODES = {link.ROLE_DECODE, link.ROLE_MIXED}
_ROLES = (link.ROLE_PREFILL, link.ROLE_DECODE, link.ROLE_MIXED)
Roles = Mapping[str, int]  # by worker


@dataclass(frozen=True, slots=True)
class OperationsPlan:
    """How much is done, and until when at the latest."""

    num_flips: int
    num_moves: int  # that succeed, drains' included
    num_drains: int  # of each worker
    pause_s: float  # between flips and drains, on average
    within_s: float
    seed: int


@dataclass(slots=True)
class Record:
    """What was done. Times are seconds of calls, or until a worker's process had ended."""

    flips_s: list[float] = field(default_factory=list)
    drains_s: list[float] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)  # calls that the router refused, in words
    is_complete: bool = False


class Operations:
    """Does an operator's work, never leaving the cluster without one who computes prompts and one who decodes."""

    def __init__(
        self, cluster: LocalCluster, board: StatusBoard, operator: AdminClient, plan: OperationsPlan, clock: Clock
    ) -> None:
        self.record = Record()
        self._cluster = cluster
        self._board = board
        self._operator = operator
        self._plan = plan
        self._clock = clock
        self._rng = random.Random(f"operations {plan.seed}")

    async def run(self) -> None:
        """Do all that is planned, or what time allows."""
        try:
            async with asyncio.timeout(self._plan.within_s), asyncio.TaskGroup() as tasks:
                tasks.create_task(self._move())
                await self._flip_and_drain()
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

    async def _flip_and_drain(self) -> None:
        workers = [process.name for process in self._cluster.state.processes if process.role != "router"]
        acts = [*workers * self._plan.num_drains, *[""] * self._plan.num_flips]
        self._rng.shuffle(acts)
        for name in acts:
            await asyncio.sleep(self._rng.expovariate(1 / self._plan.pause_s))
            if name:
                await self._drain(name)
            else:
                await self._flip_any()

    async def _flip_any(self) -> None:
        """Give one of the workers another role."""
        while True:
            roles = roles_of(self._board.last)
            choices = [
                (name, role)
                for name, before in roles.items()
                for role in _ROLES
                if role != before and serves({**roles, name: role})
            ]
            if choices and await self._flip(*self._rng.choice(choices)):
                return
            await self._board.changed()

    async def _flip(self, name: str, role: int) -> bool:
        began_s = self._clock.now_s()
        try:
            await self._operator.set_role(WorkerId(name), link.Role.ValueType(role))
        except grpc.aio.AioRpcError as error:
            self._note(f"{link.Role.Name(link.Role.ValueType(role))} for {name}", error)
            return False
        self.record.flips_s.append(self._clock.now_s() - began_s)
        return True

    async def _drain(self, name: str) -> None:
        """Drain a worker, once the others can do without it, and wait until its next process is ready."""
        while not serves(others := {each: role for each, role in roles_of(self._board.last).items() if each != name}):
            if not others or not await self._flip(self._rng.choice(sorted(others)), link.ROLE_MIXED):
                await self._board.changed()
        self.record.drains_s.append(await drained(self._cluster, self._operator, name, self._clock))
        if not await self._board.until(lambda status: name not in roles_of(status), BACK_WITHIN_S):
            raise CommandError(f"{name} has ended, and the router still counts on it")
        if not await self._board.until(lambda status: name in roles_of(status), BACK_WITHIN_S):
            raise CommandError(f"{name} was not ready again within {BACK_WITHIN_S:g} s")

    def _note(self, what: str, error: grpc.aio.AioRpcError) -> None:
        if error.code() not in _REFUSED:
            raise error
        self.record.refused.append(f"{what}: {error.code().name}: {error.details()}")


def roles_of(status: admin.ClusterStatus) -> dict[str, int]:
    """Return the roles of the workers that serve, as they last reported them."""
    return {
        each.registration.worker_id: each.load.role or each.registration.role
        for each in status.workers
        if each.registration.ready and not each.load.draining
    }


def serves(roles: Roles) -> bool:
    """Return whether workers of these roles can serve together: no single mixed one, which has nobody to move to."""
    present = set(roles.values())
    return len(roles) > 1 and bool(present & _COMPUTES) and bool(present & _DECODES)


async def drained(cluster: LocalCluster, operator: AdminClient, name: str, clock: Clock) -> float:
    """Drain a worker; return the seconds until its process has ended."""
    pid = cluster.state.pid_of(name)
    if pid is None:
        raise CommandError(f"{name} does not run")
    process = os.pidfd_open(pid)
    try:
        began_s, ended = clock.now_s(), asyncio.Event()
        asyncio.get_running_loop().add_reader(process, ended.set)
        await operator.drain(WorkerId(name))
        await ended.wait()
        return clock.now_s() - began_s
    finally:
        asyncio.get_running_loop().remove_reader(process)
        os.close(process)
