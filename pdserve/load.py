"""A worker's load, as the worker counts it and reports it to routers."""

from dataclasses import field

from pdserve.roles import Role
from pdserve.values import value


@value
class LoadPart:
    """The part of a worker's load that comes from some of its routers. Each continuation of a request counts."""

    num_running: int = 0  # in the batch
    num_coming: int = 0  # accepted, and not decoding yet
    placed_tokens: int = 0  # of all of these, when they were placed
    waiting_tokens: int = 0  # of prompts, yet to be computed there
    waiting_work: int = 0  # of their attention
    num_taken: int = 0  # sequences taken in since the process started
    taken_tokens: int = 0  # of prompts to compute there, the same
    taken_work: int = 0

    def minus(self, part: "LoadPart") -> "LoadPart":
        return LoadPart(*(getattr(self, name) - getattr(part, name) for name in _PARTS))


_PARTS = tuple(LoadPart.__annotations__)


@value
class ReportedLoad:
    """What a worker reports of its load, as far as decisions depend on it."""

    pages_free: int
    pages_wanted: int = 0  # that requests taken in wait for
    pages_lost: int = 0  # in quarantine, or leaked
    draining: bool = False
    failed_steps: int = 0  # the last ones, in a row
    others: LoadPart = field(default_factory=LoadPart)  # what other routers have sent
    role: Role | None = None  # what it does now; None: unknown
    role_epoch: int = 0
