"""The commands that the router's core returns."""

from collections.abc import Sequence as Seq

from pdserve.base.errors import PeerFault
from pdserve.base.ids import Attempt, Peer, RequestId
from pdserve.base.values import value
from pdserve.observe.trace_context import TraceContext
from pdserve.protocol.prefix_hash import CacheScope
from pdserve.protocol.refusal import Refused
from pdserve.protocol.sampling import PromptLogprobs, SamplingParams
from pdserve.router.requests.events import DrainAsked, LinkId, Registration, RoleAsked
from pdserve.router.requests.timeline import Ledger, Usage

_LEAST_WITHIN_S = 0.02  # for a fetch's messages


@value
class SequenceSpec:
    """What both workers of a placement must know of it."""

    request_id: RequestId
    attempt: Attempt
    token_ids: Seq[int]  # the prompt, then what has been delivered already
    num_prompt_tokens: int
    params: SamplingParams
    indices: tuple[int, ...]
    scope: CacheScope
    remaining_s: float
    priority: int
    trace: TraceContext | None = None


@value
class Fetch:
    """Leading pages of a prompt that a holder sends to the worker which computes the rest."""

    holder: Registration
    num_tokens: int  # leading ones that the worker has after it
    num_sent: int  # of these, what it does not have without it
    transfer_s: float  # predicted, from now on
    compute_s: float  # what computing the same tokens takes there
    wait_s: float  # that the prompt has to wait there anyway
    is_taken: bool  # whether it pays

    @property
    def within_s(self) -> float:
        """How long to wait for it, from now on: computing brings a later one's tokens as soon."""
        return max(_LEAST_WITHIN_S, self.wait_s + self.compute_s)

    def summary(self, num_prompt_tokens: int) -> str:
        """Return what was decided and why, for a request's ledger."""
        verb = "fetches" if self.is_taken else "computes, and does not fetch"
        tokens = f"{self.num_sent:,} of {num_prompt_tokens:,} tokens from {self.holder.worker_id}"
        return f"{verb} {tokens}: {self.transfer_s * 1e3:.0f} ms against {self.compute_s * 1e3:.0f} ms"


@value
class Place:
    """Give a job to the worker that computes the prompt and to the one that decodes. One of them is there."""

    spec: SequenceSpec
    prefill: Registration | None  # None: the decode worker computes the prompt itself
    decode: Registration | None  # None: the first token ends the request
    fetch: Fetch | None = None


@value
class Move:
    """Hand a running continuation over from one worker to another, as a new attempt."""

    spec: SequenceSpec  # of the new attempt, with one index
    attempt: Attempt  # the present one
    source: Registration
    target: Registration
    extra_tokens: int  # that the target is to have room for besides: the source decodes on meanwhile


@value
class CancelAttempt:
    link: LinkId
    request_id: RequestId
    attempt: Attempt
    indices: tuple[int, ...] = ()  # empty: all


@value
class SendProcessGone:
    link: LinkId
    process: Peer


@value
class DropLink:
    """Close a worker's stream; the core has forgotten it already."""

    link: LinkId
    reason: str
    refusal: PeerFault | None = None  # what was wrong with the worker, if that is why

    @property
    def is_dismissal(self) -> bool:
        """Whether the worker's process must end: it has a successor."""
        return self.refusal is PeerFault.INCARNATION


@value
class Deliver:
    """Hand tokens of one continuation to the client."""

    request_id: RequestId
    index: int
    token_ids: Seq[int]
    logprobs: Seq[object]
    finish_reason: int  # 0: goes on
    prompt_logprobs: PromptLogprobs | None = None  # of its next tokens; comes alone, for continuation 0
    pooled: bytes = b""  # the vector that was asked for in place of tokens


@value
class Finished:
    usage: Usage
    ledger: Ledger


@value
class End:
    request_id: RequestId
    outcome: Finished | Refused


@value
class Warn:
    """Tell the operator about a worker's mistake or loss."""

    text: str
    names_request: bool = False  # it is the operator's alone: watchers of other tenants are not shown it


Command = Place | Move | CancelAttempt | DrainAsked | RoleAsked | SendProcessGone | DropLink | Deliver | End | Warn
