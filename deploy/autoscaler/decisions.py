"""What the autoscaler decides: an order or none for a pool, and why. Pure values."""

from enum import StrEnum

from pdserve.base.errors import CommandError
from pdserve.base.roles import Role
from pdserve.base.values import value


@value
class Add:
    """Start a replica. The name is free, and stays the same when the order is repeated."""

    name: str
    role: Role

    def __str__(self) -> str:
        return f"add {self.name}"


@value
class Drain:
    """Let a replica finish or hand over what it runs, and end."""

    name: str

    def __str__(self) -> str:
        return f"drain {self.name}"


@value
class Flip:
    """Give a replica another role while it serves."""

    name: str
    role: Role

    def __str__(self) -> str:
        return f"flip {self.name} to {self.role}"


Action = Add | Drain | Flip


class ActuatorError(CommandError):
    """An order was not carried out, or nobody knows whether it was. Says why; the same order may be given again."""


def other(pool: Role) -> Role:
    """Return the pool beside a pool."""
    return Role.DECODE if pool is Role.PREFILL else Role.PREFILL


class Binds(StrEnum):
    """What keeps a pool from being smaller, or what is the reason for its size."""

    PREFILL_QUEUE = "prefill queue"  # prompts wait too long
    STEP_TIME = "step time"  # decode steps take too long
    PAGES = "pages"  # KV pages of decode workers
    BATCH = "batch"  # sequences that a decode worker runs at most
    WAITING = "waiting"  # what waits at this moment
    LATE = "late starts"  # nobody serves, and what starts takes longer than a start does
    MIN = "minReplicas"
    MAX = "maxReplicas"
    BUDGET = "budget"
    STALE = "stale figures"  # routers do not report, so nothing changes
    FALLBACK = "fallback"  # routers have not reported for long
    NOTHING = "nothing"  # the pool could be smaller


@value
class Decision:
    """One pool, one moment. Without an action the pool is left as it is."""

    pool: Role  # PREFILL or DECODE; of a flip, the pool that gains the replica
    action: Action | None
    num_replicas: int  # that run or start, and do not drain
    desired: int  # replicas that the pool should have
    binds: Binds
    seen: str  # demand and load
    predicted: str  # for the desired size
    refused: str = ""  # what was not possible, and why
    advisory: bool = False  # the action is not to be carried out

    @property
    def verb(self) -> str:
        """The action as one word, for metrics."""
        return "hold" if self.action is None else type(self.action).__name__.lower()

    @property
    def text(self) -> str:
        """The decision as one line."""
        parts = [
            f"{self.pool}: {self.action or 'hold'}{' (advisory)' if self.advisory else ''}",
            f"{self.num_replicas} of {self.desired} replicas",
            f"binds: {self.binds}",
            f"seen: {self.seen}",
            f"predicted: {self.predicted}" if self.predicted else "",
            f"not possible: {self.refused}" if self.refused else "",
        ]
        return "; ".join(part for part in parts if part)
