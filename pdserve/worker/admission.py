"""What a worker accepts: rules of the operator, its role, jobs that it can never compute, and when it drains.

Invariant: the epoch of the role only grows; and a worker takes a role whose prompts are handed off only while there is
the room that these need (`engine.kvcache.Room`). Decides; does no I/O.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from pdserve.base.errors import PeerFault, ProtocolError
from pdserve.base.roles import Role, lacks_pages
from pdserve.engine.kvcache import Room
from pdserve.engine.scheduler import Limits, Scheduler
from pdserve.engine.sequence import Job
from pdserve.protocol.adapters import AdapterDigest
from pdserve.protocol.paging import PageOrder
from pdserve.protocol.sampling import MAX_SEQUENCES
from pdserve.protocol.token_ids import ALL_IDS, largest
from pdserve.worker.messages import DrainAsked, DrainCancelled, Placed, RoleGiven, RoleTaken

NUM_STILL_LOOKS = 30  # more than it takes until stuck copies make a worker drain
NUM_LOOKS = 8  # one each half second: 4 s, the default of routers' `worker_silence_s`
_INDICES = frozenset(range(MAX_SEQUENCES))


@dataclass(frozen=True, slots=True)
class Rules:
    """What a worker's decisions depend on beside its engine. The defaults are the configuration's."""

    max_tasks: int
    checks_digests: bool
    max_quarantined_share: float  # of all pages; above it the worker drains, since its next process has all pages
    lease_s: float  # a sender that is silent for so long has lost its grants
    role: Role  # at the start
    step_tokens: Mapping[Role, int] = field(default_factory=dict)  # in each role; where none are named, the engine's
    fills_steps_ahead: bool = False  # with prompts, while one runs: else a GPU, or a first stage, would wait
    num_parts: int = 1  # of a page, one for each rank of the executor
    adapters: frozenset[AdapterDigest] = frozenset()  # that are loaded
    has_stages: bool = False  # prompts that wait fill steps ahead, too: else all pipeline stages but one would wait


def longest(scheduler: Scheduler, job: Job) -> int:
    return min(job.num_prompt_tokens + job.params.max_tokens, scheduler.limits.max_model_len)


def refusal(scheduler: Scheduler, job: Job, vocab_size: int, adapters: Collection[AdapterDigest]) -> str | None:
    """Return why this worker can never compute a job, or None. Routers have checked what clients may ask."""
    limits, num_tokens = scheduler.limits, len(job.token_ids)
    last = longest(scheduler, job)
    needed = scheduler.most_pages(last)
    if not 0 < job.num_prompt_tokens <= num_tokens:
        return f"num_prompt_tokens: {job.num_prompt_tokens} of {num_tokens} tokens"
    if num_tokens >= last:
        return f"token_ids: {num_tokens} leave no room for another: {last} are the most, with the answer"
    if needed > scheduler.cache.pool.num_pages:
        return f"token_ids: {last} tokens need {needed} pages of {scheduler.cache.pool.num_pages}"
    if vocab_size < ALL_IDS and (token_id := largest(job.token_ids)) >= vocab_size:
        return f"token_ids: {token_id} is not below the vocabulary size {vocab_size}"
    if job.params.structured_output is not None and job.new_matcher is None:
        return "structured_output: nothing here makes its token masks"
    if (why := _cannot_pool(job, limits)) is not None:
        return why
    adapter = job.scope.adapter
    if adapter and adapter not in adapters:
        return f"adapter: {adapter.hex()} is not loaded here"
    if not job.indices or not _INDICES.issuperset(job.indices):
        return f"indices: {job.indices} are not of {MAX_SEQUENCES} continuations"
    if len(set(job.indices)) > limits.max_num_seqs:
        return f"indices: {len(job.indices)} continuations, {limits.max_num_seqs} sequences run at once"
    return None


def _cannot_pool(job: Job, limits: Limits) -> str | None:
    if job.params.pooling is None:
        return None
    if not limits.can_pool:
        return "pooling: what computes here makes no vectors of prompts"
    if job.indices != (0,) or job.num_prompt_tokens != len(job.token_ids):
        return f"pooling: continuations {job.indices} of {job.num_prompt_tokens} prompt tokens are no prompt alone"
    return None


class Draining:
    """Whether a worker drains (accepts nothing more), and why.

    Invariant: a worker drains from when it is asked to, once more than `max_quarantined_share` of its pages have been
    quarantined at NUM_LOOKS looks in a row, or once something waits in vain for pages that are. The next process has
    all of its pages free, since the end of this one ends what kept them in quarantine. After a burst of cancels, peers
    that live give most pages back within a moment.
    """

    def __init__(self, max_quarantined_share: float) -> None:
        self._max_quarantined_share = max_quarantined_share
        self.is_on = False
        self.reason = ""  # if nobody asked for it
        self._is_final = False
        self._num_above = 0  # looks in a row
        self._num_still = 0  # the same

    def take(self, event: DrainAsked | DrainCancelled) -> None:
        """Drain as asked; or accept work again, unless the drain is final or was begun here."""
        match event:
            case DrainAsked(is_final):
                self.is_on = True
                self._is_final |= is_final
            case DrainCancelled():
                self.is_on = self._is_final or bool(self.reason)

    def look(self, num_quarantined: int, num_pages: int) -> bool:
        """Return whether the worker begins to drain because too few of its pages are usable."""
        is_above = num_quarantined > self._max_quarantined_share * num_pages
        self._num_above = self._num_above + 1 if is_above else 0
        if self.is_on or self._num_above < NUM_LOOKS:
            return False
        self.is_on = True
        self.reason = f"{num_quarantined} of {num_pages} pages are quarantined"
        return True

    def in_vain(self, num_lost: int, *, is_still: bool) -> str:
        """Return why requests wait in vain for pages, or an empty text: nothing has run for many looks in a row.

        If `num_lost` pages are quarantined, this worker drains too: only its next process has those pages.
        """
        self._num_still = self._num_still + 1 if is_still else 0
        if self._num_still < (NUM_LOOKS if self.is_on else NUM_STILL_LOOKS):
            return ""
        if not num_lost:
            return "hand-offs hold the pages that it needs"
        reason = f"{num_lost} pages that it may need are quarantined"
        if not self.is_on:
            self.is_on, self.reason = True, reason
        return reason


class Roles:
    """What routers place on this worker, and how many tokens a step computes at most."""

    def __init__(self, role: Role, scheduler: Scheduler, room: Room, step_tokens: Mapping[Role, int]) -> None:
        """`step_tokens`: of a step in each role; where it names none, the engine's limit."""
        self._scheduler = scheduler
        self._room = room
        self._step_tokens = step_tokens
        scheduler.step_tokens_beside = min(step_tokens.values(), default=scheduler.limits.max_num_batched_tokens)
        self._given: RoleGiven | None = None  # to be taken once there is room
        self.role, self.epoch = role, 0
        self._take(role)

    def num_kept(self, num_awaited: int) -> int:
        """Return how many pages prompts to hand off leave for grants, beside the room for the longest prompt.

        `num_awaited`: pages that hand-offs that are to arrive wait for.
        """
        return max(0, self._room.longest - self._room.num_granted) if self.role is Role.MIXED else num_awaited

    def give(self, given: RoleGiven) -> None:
        """Note the role that a router gives; ProtocolError where this worker cannot take it.

        An epoch that is not greater is late news, or another router's was first.
        """
        newest = self.epoch if self._given is None else self._given.epoch
        if given.epoch <= newest:
            return
        if why := lacks_pages(given.role, self._scheduler.cache.pool.num_pages, self._room.longest):
            raise ProtocolError(f"set_role.role: {why}", PeerFault.ORDER)
        self._given = given
        if given.role.is_in(Role.PREFILL):
            self._room.is_kept_by_role = True  # grants leave it from now on

    def settle(self) -> list[RoleTaken]:
        """Take the role that was given, once it can be taken; return what is to be reported then."""
        given = self._given
        if given is None or (given.role.is_in(Role.PREFILL) and self._room.left < 0):
            return []
        self._given = None
        self.role, self.epoch = given.role, given.epoch
        self._take(given.role)
        return [RoleTaken(given.role, given.epoch, self._scheduler.step_tokens)]

    def refusal(self, placed: Placed, num_awaited: int) -> str:
        """Return why there is no room for a job of another role, or "". `num_awaited`: pages hand-offs wait for."""
        if placed.target is not None and self.role is Role.DECODE and self._room.left < 0:
            return "it decodes, and has no room for prompts to hand off"
        num_known = len(placed.job.token_ids)
        num_pages = PageOrder(self._scheduler.cache.paging, num_known).count(num_known + placed.extra_tokens)
        room = self._room.left + self._room.num_granted - num_awaited  # granted pages turn into sequences' pages
        if placed.source is not None and self.role is Role.PREFILL and num_pages > room:
            return "it computes prompts, and has no room for those of others"
        return ""

    def _take(self, role: Role) -> None:
        self._room.is_kept_by_role = role.is_in(Role.PREFILL)
        limit = self._scheduler.limits.max_num_batched_tokens
        self._scheduler.step_tokens = self._step_tokens.get(role, limit)
