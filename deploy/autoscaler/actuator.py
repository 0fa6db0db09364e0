"""What starts and ends workers on the autoscaler's order, and the actuator of one machine.

There the launcher of `pdserve up` starts and ends workers, and a router gives them roles.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import grpc

from pdserve.autoscaler.decisions import ActuatorError
from pdserve.autoscaler.observation import Held, State
from pdserve.autoscaler.pools import bounds
from pdserve.autoscaler.schema import load
from pdserve.errors import ConfigError
from pdserve.ids import WorkerId
from pdserve.launch.admin import AdminClient, LauncherClient
from pdserve.proto.v1 import launcher_pb2 as launcher
from pdserve.roles import POOLS, Role
from pdserve.wire import ROLES


class Actuator(Protocol):
    """Starts and ends replicas. An order may be repeated: a repetition changes nothing.

    An order returns once it is taken on, not once it is done: `observe` shows that. All raise ActuatorError.
    """

    async def observe(self) -> Sequence[Held]:
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
    """Replicas are processes of this machine."""

    def __init__(self, launcher_: LauncherClient, router: AdminClient, timeout_s: float) -> None:
        """`timeout_s`: in which an order is to be taken on."""
        self._launcher = launcher_
        self._router = router
        self._timeout_s = timeout_s

    async def observe(self) -> Sequence[Held]:
        """Return all workers of the launcher, with the roles that they were started with."""
        async with ordering("list the workers", self._timeout_s):
            workers = await self._launcher.list_workers()
        return [Held(each.worker_id, ROLES[each.role], _STATES[each.state]) for each in workers]

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


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """Workers with which a cluster begins, and how many there may be at once."""

    prefill: int
    decode: int
    max_workers: int | None
    elsewhere: bool = False  # whether the autoscaler starts all of them, with Ray


def sizes_at_start(policy_file: Path) -> PoolSizes:
    """Return how few workers a policy lets a cluster of this machine begin with, and how many it lets be.

    ConfigError where the policy is not valid, or is for another actuator.
    """
    policy = load(policy_file)
    if policy.actuator.kind not in ("process", "ray"):
        raise ConfigError(f"{policy_file}: actuator.kind: {policy.actuator.kind} starts no workers of this cluster")
    prefill, decode = (bounds(policy.pools.of(pool), time.time()) for pool in POOLS)
    most = policy.budget.max_devices // min(prefill.devices, decode.devices)
    return PoolSizes(prefill.least, decode.least, most, policy.actuator.kind == "ray")
