"""What starts and ends workers on the autoscaler's order: the protocol, and the actuators that need only pdserve.

Ray's and Kubernetes' actuators have modules of their own.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import grpc

from pdserve.autoscaler.decisions import ActuatorError
from pdserve.autoscaler.observation import Listed, State
from pdserve.autoscaler.pools import bounds
from pdserve.autoscaler.schema import load
from pdserve.base.errors import ConfigError
from pdserve.base.ids import WorkerId
from pdserve.base.roles import POOLS, Role
from pdserve.net.operator_client import CALL_TIMEOUT_S, AdminClient, LauncherClient
from pdserve.proto.v1 import launcher_pb2 as launcher
from pdserve.protocol.link import ROLES


class Actuator(Protocol):
    """Starts and ends replicas. An order may be repeated: a repetition changes nothing.

    An order returns once it is taken on, not once it is done: `observe` shows that. All raise ActuatorError.
    """

    async def observe(self) -> Sequence[Listed]:
        """Return all replicas that run, or that will."""

    async def add(self, name: str, role: Role) -> None:
        """Start a replica of this name, unless there is one."""

    async def drain(self, name: str) -> None:
        """Let a replica finish or hand over what it runs, then end for good."""

    async def flip(self, name: str, role: Role) -> None:
        """Give a replica another role while it serves."""


@asynccontextmanager
async def ordering(
    what: str, timeout_s: float, *errors: type[Exception], also_done: grpc.StatusCode | None = None
) -> AsyncIterator[None]:
    """Bound the time of a call. Its failure, also by one of these errors, becomes an ActuatorError that names it.

    `also_done`: the answer if nothing is left to do.
    """
    refusals: tuple[type[Exception], ...] = (ActuatorError, *errors)
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError as error:
        raise ActuatorError(f"{what}: no answer within {timeout_s:g} s") from error
    except grpc.aio.AioRpcError as error:
        if error.code() is not also_done:
            raise ActuatorError(f"{what}: {error.code().name}: {error.details()}") from error
    except refusals as error:
        raise ActuatorError(f"{what}: {error}") from error


async def give_role(router: AdminClient, name: str, role: Role, timeout_s: float) -> None:
    """Give a worker another role while it serves; ActuatorError where its router does not."""
    async with ordering(f"flip {name} to {role}", timeout_s):
        await router.set_role(WorkerId(name), role)


_STATES = {
    launcher.WORKER_STATE_STARTING: State.STARTING,
    launcher.WORKER_STATE_READY: State.READY,
    launcher.WORKER_STATE_DRAINING: State.DRAINING,
}


class LocalActuator:
    """Replicas are processes of this machine. The launcher of `pdserve up` starts and ends them."""

    def __init__(self, launcher_: LauncherClient, router: AdminClient, timeout_s: float) -> None:
        """`timeout_s`: in which an order is to be taken on."""
        self._launcher = launcher_
        self._router = router
        self._timeout_s = timeout_s

    async def observe(self) -> Sequence[Listed]:
        """Return all workers of the launcher, with the roles that they were started with."""
        async with ordering("list the workers", self._timeout_s):
            workers = await self._launcher.list_workers()
        return [Listed(each.worker_id, ROLES[each.role], _STATES[each.state]) for each in workers]

    async def add(self, name: str, role: Role) -> None:
        """Start a worker, unless there is one of this name."""
        async with ordering(f"add {name}", self._timeout_s):
            await self._launcher.start_worker(name, role)

    async def drain(self, name: str) -> None:
        """Let a worker drain and end for good."""
        async with ordering(f"drain {name}", self._timeout_s, also_done=grpc.StatusCode.NOT_FOUND):
            await self._launcher.stop_worker(name)

    async def flip(self, name: str, role: Role) -> None:
        """Give a worker another role while it serves."""
        await give_role(self._router, name, role, self._timeout_s)


class PublishActuator:
    """Starts and ends nothing: replicas are what is attached to a router, and HPA or KEDA follow the published sizes.

    Invariant: an order changes a published size by one, however often the order is repeated. Before its first order a
    pool's size is the most of its workers that were attached at once: a router that starts again sees few at first.

    HPA or KEDA chooses which workers start, under which names, and which ones end. So orders are matched with workers
    by number alone. A replica that was ordered counts as starting, under the order's name, until its pool has grown.
    One that was to leave counts as draining until its pool has shrunk, whichever worker came or went.
    """

    def __init__(self, router: AdminClient) -> None:
        self._router = router
        self.sizes = Counter[Role]()  # replicas that each pool should have; a pool that was never seen is missing
        self._ordered: set[Role] = set()  # pools whose size is what was ordered
        self._present: dict[str, Listed] = {}  # as last reported
        self._coming: dict[str, Role] = {}  # replicas that are to attach, the oldest first
        self._leaving: dict[str, Role] = {}  # replicas ordered to leave, the oldest first; others may leave instead
        self._shown: set[str] = set()  # names in both that `observe` has returned

    async def observe(self) -> Sequence[Listed]:
        """Return the workers that are attached, and those that are to come."""
        await self._look()
        self._shown = {*self._coming, *self._leaving}
        present = [
            Listed(listed.name, listed.role, State.DRAINING) if listed.name in self._leaving else listed
            for listed in self._present.values()
        ]
        return [*present, *(Listed(name, role, State.STARTING) for name, role in self._coming.items())]

    async def _look(self) -> None:
        """Compare what is attached with what was ordered."""
        async with ordering("list the workers", CALL_TIMEOUT_S):
            status = await self._router.status()
        found = {}
        for worker in status.workers:
            name, role = worker.registration.worker_id, ROLES.get(worker.registration.role)
            if role is not None:
                ready = State.READY if worker.registration.ready else State.STARTING
                found[name] = Listed(name, role, State.DRAINING if worker.load.draining else ready)
        self._compare(found)

    async def add(self, name: str, role: Role) -> None:
        """Let a pool be one greater, unless this replica is there or to come."""
        await self._look()
        if name in self._leaving:
            raise ActuatorError(f"add {name}: it is to leave")
        if name not in self._present and name not in self._coming:
            self._come(name, role)

    async def drain(self, name: str) -> None:
        """Let a pool be one smaller, unless this replica is to leave already."""
        await self._look()
        role = self._coming.pop(name, None)
        if role is not None:
            self._resize(role, -1)
        elif name in self._present:
            self._leave(self._present[name])

    async def flip(self, name: str, role: Role) -> None:
        """Let one pool be smaller and the other greater by one. The worker itself keeps its role."""
        await self._look()
        listed = self._present.get(name)
        if listed is None:
            raise ActuatorError(f"flip {name}: no such replica is attached")
        if listed.role is not role and name not in self._leaving:
            self._leave(listed)
            self._come(f"{name}-as-{role}", role)

    def _come(self, name: str, role: Role) -> None:
        self._coming[name] = role
        self._resize(role, 1)

    def _leave(self, listed: Listed) -> None:
        if listed.name not in self._leaving and listed.state is not State.DRAINING:
            self._leaving[listed.name] = listed.role
            self._resize(listed.role, -1)

    def _resize(self, role: Role, change: int) -> None:
        self.sizes[role] = max(0, self.sizes[role] + change)
        self._ordered.add(role)

    def _compare(self, found: Mapping[str, Listed]) -> None:
        """Note who is attached. Forget orders that were followed; expect back workers that left without an order."""
        staying = Counter(listed.role for listed in found.values() if listed.state is not State.DRAINING)
        gone = [listed for name, listed in self._present.items() if name not in found and name not in self._leaving]
        self._present = dict(found)
        self._coming = {name: role for name, role in self._coming.items() if name not in found}
        self._leaving = {name: role for name, role in self._leaving.items() if name in found}
        for role in Role:
            if role not in self._ordered and staying[role]:
                self.sizes[role] = max(self.sizes[role], staying[role])
            missing = self.sizes[role] - staying[role]
            self._trim(self._coming, role, missing)
            self._trim(self._leaving, role, -missing)
            missing -= Counter(self._coming.values())[role]
            lost = [listed.name for listed in gone if listed.role is role and listed.state is not State.DRAINING]
            self._coming |= dict.fromkeys(lost[: max(0, missing)], role)

    def _trim(self, orders: dict[str, Role], role: Role, num_open: int) -> None:
        """Forget a pool's oldest orders beyond `num_open`, but none that `observe` has not returned yet."""
        of_pool = [name for name, each in orders.items() if each is role]
        for name in of_pool[: max(0, len(of_pool) - max(0, num_open))]:
            if name in self._shown:
                del orders[name]


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """Workers with which a cluster begins, and how many there may be at once."""

    prefill: int
    decode: int
    max_workers: int | None
    elsewhere: bool = False  # whether the autoscaler starts all of them, with Ray
    may_be_empty: bool = False  # whether a pool may have none later


def sizes_at_start(policy_file: Path) -> PoolSizes:
    """Return how few workers a policy lets a cluster of this machine begin with, and how many it lets be.

    A pool that may have none begins with one, so that its steps and its size are known once it is to come back.

    ConfigError where the policy is not valid, or is for another actuator.
    """
    policy = load(policy_file)
    if policy.actuator.kind not in ("process", "ray"):
        raise ConfigError(f"{policy_file}: actuator.kind: {policy.actuator.kind} starts no workers of this cluster")
    prefill, decode = (bounds(policy.pools.of(pool), time.time()) for pool in POOLS)
    most = policy.budget.max_devices // min(prefill.devices, decode.devices)
    may_be_empty = any(policy.pools.of(pool).may_be_empty for pool in POOLS)
    return PoolSizes(max(1, prefill.least), max(1, decode.least), most, policy.actuator.kind == "ray", may_be_empty)
