"""Messages between routers and a worker's core, and all that its core handles and decides. Pure values.

Each message names its router: several may be attached, each with its own requests.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NewType

from pdserve.base.ids import Attempt, AttemptKey, Peer, RequestId
from pdserve.base.roles import Role
from pdserve.base.values import value
from pdserve.engine.sequence import Finish, Job
from pdserve.kvtransfer import doors
from pdserve.kvtransfer.doors import IncomingEvent, OutgoingEvent
from pdserve.observe.trace_context import TraceContext
from pdserve.perfmodel.curve import Step
from pdserve.protocol.drafts import Verified
from pdserve.protocol.prefix_hash import CacheScope
from pdserve.protocol.reports import Failure, LoadPart, Stage
from pdserve.protocol.sampling import PromptLogprobs, SampledToken

RouterRef = NewType("RouterRef", int)  # one attached stream to a router


@value
class Fetch:
    """Leading pages of a prompt that another worker has, and sends before the prompt is computed."""

    holder: Peer
    num_tokens: int  # that it probably has
    deadline_s: float  # on this worker's clock; after it the prompt is computed without them


@value
class Placed:
    """A job for this worker: its KV comes from a source, or goes to a target, or all of it is computed here."""

    router: RouterRef
    job: Job
    deadline_s: float  # on this worker's clock
    source: Peer | None = None
    target: Peer | None = None
    target_address: str = ""
    extra_tokens: int = 0  # with a source: tokens beyond the job's that need pages here, too
    fetch: Fetch | None = None
    trace: TraceContext | None = None


@value
class MoveAsked:
    """Hand a running continuation over to another worker, which has been given it as a new attempt."""

    router: RouterRef
    key: AttemptKey  # of the attempt that runs here
    index: int
    new_attempt: Attempt
    target: Peer
    target_address: str
    num_tokens: int  # that the target's job names; later ones travel with the pages


@value
class ShareAsked:
    """Send the cached pages of a prefix to another worker, where an attempt with this key is placed."""

    key: AttemptKey
    token_ids: Seq[int]
    scope: CacheScope
    target: Peer
    target_address: str
    deadline_s: float  # on this worker's clock


@value
class RoleGiven:
    """Take this role, if the epoch is greater than that of the present one."""

    role: Role
    epoch: int


@value
class RoleTaken:
    """This worker has taken a role; all routers are to learn of it at once."""

    role: Role
    epoch: int
    step_tokens: int  # that a step computes at most from now on


@value
class Cancelled:
    """Stop a request's attempts up to and including this one. Unknown ones are fine."""

    request_id: RequestId
    attempt: Attempt
    indices: tuple[int, ...] = ()  # only these continuations; none named: all


@value
class RouterLost:
    router: RouterRef


@value
class DrainAsked:
    """Take nothing more; the shell exits when nothing is left."""

    is_final: bool = False  # it cannot be cancelled


@value
class DrainCancelled:
    """Take work again, unless the drain is final or this worker itself began it."""


@value
class Ticked:
    """Time has passed: about half a second."""

    silent_s: float = 0.0  # the longest that this process has sent no heartbeat since the last tick


@value
class Due:
    """The time has come that the core has named as the next at which it has something to do."""


@value
class Tokens:
    """A sequence gained tokens. `position` counts those generated before the first, from the request's start."""

    router: RouterRef
    key: AttemptKey
    index: int
    position: int
    tokens: tuple[SampledToken, ...]  # at least one, or none with `pooled`
    finish: Finish | None
    pooled: bytes = b""  # the vector that was asked for in place of an answer
    verified: Verified | None = None  # the guesses among the tokens, and those that were wrong


@value
class PromptScored:
    """Tokens of a prompt were scored, the first of which has that number; some may have been before."""

    router: RouterRef
    key: AttemptKey
    position: int
    logprobs: PromptLogprobs


@value
class Progress:
    router: RouterRef
    key: AttemptKey
    stage: Stage
    at_s: float
    cached_tokens: int = 0
    handoff_bytes: int = 0
    handoff_s: float = 0.0
    pages_reused: int = 0


@value
class Failed:
    """This attempt has ended here without its answer."""

    router: RouterRef
    key: AttemptKey
    code: Failure
    reason: str


@value
class StepCost:
    """What a step computed, its wall time in seconds, and when it ended."""

    step: Step
    elapsed_s: float
    at_s: float


Report = Tokens | PromptScored | Progress | Failed


@value
class Parts:
    """A worker's load by the router that sent it. The total counts what routers have sent that are gone, too."""

    total: LoadPart = field(default_factory=LoadPart)
    by_router: Mapping[RouterRef, LoadPart] = field(default_factory=dict)

    def others(self, router: RouterRef) -> LoadPart:
        """Return what other routers than this one have sent."""
        part = self.by_router.get(router)
        return self.total if part is None else self.total.minus(part)


@dataclass(frozen=True, slots=True)
class Load:
    pages_free: int
    pages_held: int
    pages_granted: int
    pages_quarantined: int
    pages_cached: int
    num_running: int
    num_waiting: int
    waiting_tokens: int
    kv_tokens: int
    num_preemptions: int
    num_handoffs: int
    num_digest_mismatches: int
    draining: bool
    role: Role
    role_epoch: int
    pages_leaked: int = 0  # belong to no task and no hand-off
    drain_reason: str = ""  # if nobody asked for it
    num_stalled_peers: int = 0  # bytes are in flight to them and hardly move
    failed_steps: int = 0  # in a row, the last ones, in which every sequence failed
    pages_wanted: int = 0  # that requests taken in wait for
    parts: Parts = field(default_factory=Parts)


Reported = doors.Result | Report  # what happens to a hand-off, and what routers are to know of it
RouterEvent = Placed | MoveAsked | ShareAsked | RoleGiven | Cancelled | DrainAsked | DrainCancelled
Event = RouterEvent | RouterLost | Ticked | Due | OutgoingEvent | IncomingEvent
Command = Report | RoleTaken | doors.Command
