"""What starts and ends workers on the autoscaler's order."""

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

from pdserve.errors import CommandError
from pdserve.roles import Role
from pdserve.values import value


class ActuatorError(CommandError):
    """An order was not carried out, or nobody knows whether it was. Says why; the same order may be given again."""


class State(Enum):
    """Where a replica is in its life. One that has ended is not listed."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


@value
class Held:
    """A replica that an actuator answers for."""

    name: str
    role: Role
    state: State
    worker_id: str = ""  # by which routers know it, where that is another name


class Actuator(Protocol):
    """Starts and ends replicas. Each order may be repeated: what is so already stays as it is.

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
