"""The events that the router's core handles."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NewType, Protocol

from pdserve.base.ids import Attempt, Incarnation, Peer, RequestId, WorkerId
from pdserve.base.roles import Role
from pdserve.base.values import value
from pdserve.observe.trace_context import TraceContext
from pdserve.perfmodel.curve import IDLE, Step, TimedStep
from pdserve.protocol.adapters import NO_ADAPTER, Adapter, AdapterDigest
from pdserve.protocol.kvlayout import KvLayout, Tier
from pdserve.protocol.reports import Failure, ReportedLoad, Stage
from pdserve.protocol.sampling import PromptLogprobs, SamplingParams

LinkId = NewType("LinkId", int)  # one stream of one worker; never used again after its end


@dataclass(frozen=True, slots=True)
class Registration:
    """Who a worker is and what it can hold: its first message on a link, and again when it has finished loading."""

    link: LinkId
    worker_id: WorkerId
    incarnation: Incarnation
    role: Role
    protocol_version: int
    ready: bool
    model: str
    layout: KvLayout
    num_pages: int
    max_num_seqs: int
    max_model_len: int
    handoff_address: str
    max_num_batched_tokens: int  # in a step
    age_s: float = 0.0  # of its process, when it said this
    device: str = ""  # what it computes on; empty: unknown
    role_epoch: int = 0  # how often its role has changed
    trial: Seq[TimedStep] = ()  # what it computed before it was ready
    adapters: tuple[Adapter, ...] = ()
    most_step_tokens: int = 0  # in a step of whichever role has the longest ones; 0: not told

    @property
    def step_tokens(self) -> int:
        """Tokens of its longest steps: how many pages a sequence holds at most depends on them."""
        return max(self.max_num_batched_tokens, self.most_step_tokens)

    @property
    def peer(self) -> Peer:
        return Peer(self.worker_id, self.incarnation)


@value
class Resumed:
    """What a request's client has already, from a router that was lost."""

    num_routers: int  # that had the request before
    token_ids: Seq[Seq[int]]  # delivered, of each continuation
    ended: Seq[int]  # indices of continuations that have ended
    num_scored: int = 1  # leading tokens of the prompt whose log probabilities were delivered, if asked for
    first_token_s: float | None = None  # when the first token was delivered; None: none was


@value
class RequestArrived:
    """A valid request, tokenized, asks to be placed."""

    request_id: RequestId
    token_ids: Seq[int]
    params: SamplingParams  # seed set
    received_s: float
    deadline_s: float  # a moment on the core's clock
    priority: int = 0
    tenant: str = ""
    ttft_slo_s: float | None = None
    tpot_slo_s: float | None = None
    trace: TraceContext | None = None  # what workers make their spans below
    resumed: Resumed | None = None  # set where another router had the request before
    adapter: AdapterDigest = NO_ADAPTER
    session: str = ""  # the client's name of the conversation; empty: it named none
    output_tokens: int = 0  # that the client expects of each answer; 0: it did not say
    is_preparation: bool = False  # of the next turn: nobody waits for it, and it counts nowhere


@value
class ClientGone:
    request_id: RequestId


@value
class ClientTooSlow:
    """More of the answer waits for the client than a request may buffer."""

    request_id: RequestId
    limit_bytes: int


@value
class StopStringFound:
    """The text of one continuation has reached a stop string."""

    request_id: RequestId
    index: int


@value
class LoadReported:
    link: LinkId
    load: ReportedLoad


class VerifiedDraft(Protocol):
    """How the guesses of a step turned out, as it came off the wire."""

    @property
    def source(self) -> int: ...
    @property
    def num_draft_tokens(self) -> int: ...
    @property
    def num_accepted_tokens(self) -> int: ...


class TokenDelta(Protocol):
    """Tokens of one sequence, as they came off the wire.

    The one place where a protobuf message passes through the core: copying 256 of them a step into values of our
    own would cost a third of the step's budget. `logprobs` is opaque; `finish_reason` is 0 until the sequence ends.
    """

    @property
    def request_id(self) -> bytes: ...
    @property
    def attempt(self) -> int: ...
    @property
    def index(self) -> int: ...
    @property
    def position(self) -> int: ...
    @property
    def token_ids(self) -> Seq[int]: ...
    @property
    def logprobs(self) -> Seq[object]: ...
    @property
    def finish_reason(self) -> int: ...
    @property
    def pooled(self) -> bytes: ...
    @property
    def drafts(self) -> Seq[VerifiedDraft]: ...


@value
class PromptScored:
    """Log probabilities of successive tokens of a prompt, the first of which has that number."""

    request_id: RequestId
    attempt: Attempt
    position: int
    logprobs: PromptLogprobs


@value
class StepReported:
    """The results of an engine step, or under virtual time of several equal ones that only decode."""

    link: LinkId
    deltas: Seq[TokenDelta]
    step: Step = IDLE
    elapsed_s: float = 0.0  # of each
    prompts: Seq[PromptScored] = ()  # before the deltas
    age_s: float = 0.0  # since the step ended


@value
class StageReached:
    """A stage that happens on workers; the figures are set where the stage brings them."""

    link: LinkId
    request_id: RequestId
    attempt: Attempt
    stage: Stage
    age_s: float
    cached_tokens: int = 0
    handoff_bytes: int = 0
    handoff_s: float = 0.0
    pages_reused: int = 0


@value
class KvChanged:
    """Pages of a tier of a worker that were removed, and then pages that were stored, by their hashes."""

    link: LinkId
    stored: Seq[int] = ()
    removed: Seq[int] = ()
    tier: Tier | None = Tier.DEVICE  # None: one that only a later version knows


@value
class PairMeasured:
    """How fast a prefill worker's pages reach a decode worker, as measured when the two met."""

    link: LinkId
    decode: WorkerId
    bytes_per_s: float
    carrier: str
    is_slow: bool


@value
class AttemptFailed:
    link: LinkId
    request_id: RequestId
    attempt: Attempt
    failure: Failure
    detail: str


@value
class LinkLost:
    link: LinkId
    reason: str


@value
class ProcessEnded:
    """A launcher's proof that a process is gone."""

    process: Peer
    from_outside: bool = False  # a signal or a drain ended it, not what it computed


@value
class DrainAsked:
    """An operator wants a worker to drain. As a command it is for that worker."""

    link: LinkId
    cancel: bool = False  # let it take work again, where it has not ended


@value
class RoleAsked:
    """An operator wants a worker to take a role. As a command it is for that worker."""

    link: LinkId
    role: Role
    epoch: int  # greater than that of its present role: a worker takes no role of its own epoch or an earlier one


@value
class MovesAsked:
    """An operator wants running continuations to leave a worker."""

    link: LinkId
    target: LinkId | None = None  # None: where there is most room
    max_sequences: int = 0  # 0: all


@value
class ShutdownAsked:
    """Take no further requests."""


@value
class ShutdownDue:
    """The time to finish is over: end what still runs."""


@value
class Tick:
    """Time has passed; something may be due."""


ClientEvent = RequestArrived | ClientGone | ClientTooSlow | StopStringFound


WorkerEvent = (  # the most frequent first: that is how isinstance looks for them
    StepReported | StageReached | LoadReported | AttemptFailed | KvChanged | PairMeasured | Registration | LinkLost
)
OperatorEvent = ProcessEnded | DrainAsked | RoleAsked | MovesAsked | ShutdownAsked | ShutdownDue | Tick
Event = ClientEvent | WorkerEvent | OperatorEvent
