"""One request as the router keeps it: its sequences, and where each is placed.

Invariant: token i of a sequence is accepted once, in order, from a worker of the sequence's present placement.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf

from pdserve.base.errors import InvariantError, ProtocolError
from pdserve.base.ids import Attempt, AttemptKey, Peer
from pdserve.protocol.prefix_hash import CacheScope, PrefixHasher
from pdserve.protocol.refusal import Refused
from pdserve.protocol.reports import Stage
from pdserve.protocol.sampling import PromptLogprobs
from pdserve.protocol.token_ids import pack
from pdserve.router.placement.prefix_index import Hashes, block_hashes
from pdserve.router.placement.routing import Demand
from pdserve.router.placement.sessions import Home, session_key
from pdserve.router.placement.view import WorkerView
from pdserve.router.requests.commands import Fetch, SequenceSpec
from pdserve.router.requests.events import LinkId, PromptScored, RequestArrived, Resumed, TokenDelta
from pdserve.router.requests.timeline import Ledger, Timeline, Usage

ATTEMPTS_OF_A_ROUTER = 2**16  # numbers of attempts that each router has of a request
OUTPUT_WEIGHT = 2  # of a token of an answer beside one of a prompt, as in the paper that `HoldQueue` follows


@dataclass(slots=True)
class Counter:
    served: int = 0  # weighted tokens


@dataclass(slots=True)
class Loss:
    """A worker that was lost while it had the request."""

    process: Peer
    num_tokens: int  # that the request had then
    at_s: float
    is_explained: bool = False  # something else than the request ended the process, or it lives


@dataclass(slots=True, eq=False)
class Placement:
    """One attempt at some of a request's sequences."""

    key: AttemptKey
    indices: tuple[int, ...]
    prefill: WorkerView | None  # None once the decode worker goes on without it, or where there never was one
    decode: WorkerView | None  # None: the first token ends the request
    running: set[int]  # indices that have not ended; none while it is a shadow
    is_local: bool = False  # the decode worker computes the prompt
    placed_s: float = 0.0
    ttft_s: float | None = None  # predicted, from then on
    tpot_s: float | None = None
    num_beside: int = 0  # sequences that the decode worker had then
    ttft_median: float = 1.0  # the predictor's factor that is in it
    fetch: Fetch | None = None  # before its prompt is computed
    committed: bool = False  # the decode worker has all it needs
    source: WorkerView | None = None  # the worker that its one continuation moved from, or is to
    copy_s: float = 0.0  # predicted of that move's bytes
    landed: tuple[int, float] = (0, 0.0)  # bytes and seconds of that move
    commit_due_s: float = inf  # when it is given up, if it took charge of what it has yet to receive

    @property
    def computes_all(self) -> bool:
        """Whether its first token depends on nothing but what a prefill worker computes."""
        return not self.is_local and self.fetch is None

    @property
    def attempt(self) -> Attempt:
        return self.key.attempt

    def workers(self) -> Iterable[WorkerView]:
        return (worker for worker in (self.prefill, self.decode) if worker is not None)


@dataclass(slots=True, eq=False)
class Sequence:
    index: int
    token_ids: list[int] = field(default_factory=list)  # delivered to the client
    placement: Placement | None = None  # whose tokens are taken
    shadow: Placement | None = None  # at the worker that it moves to; takes the place of `placement` there
    move_asked_s: float = -inf  # when it was last asked to move
    refused_s: dict[LinkId, float] = field(default_factory=dict)  # when it last could not move there
    num_before: int = 0  # tokens it had when it was placed
    num_tries: int = 0
    num_failed: int = 0  # tries that failed where they were computed
    num_interrupted: int = 0  # tries that failed because of others
    retry_s: float = inf  # when it is placed again, while it is not
    failure: str = ""  # of its last try, in words
    ended: bool = False
    first_s: float = 0.0
    last_s: float = 0.0

    @property
    def has_come(self) -> bool:
        """Whether a token of its last try is here."""
        return self.ended or len(self.token_ids) > self.num_before

    def num_known(self, delta: TokenDelta) -> int:
        """Return how many of the delta's tokens are here already; ProtocolError for a gap."""
        num_known = len(self.token_ids) - delta.position
        if num_known < 0:
            have = len(self.token_ids)
            raise ProtocolError(f"sequence {self.index}: token {delta.position} came, {have} was due")
        if delta.finish_reason and num_known > len(delta.token_ids):
            raise ProtocolError(f"sequence {self.index}: ended before tokens it has delivered")
        return num_known


class Request:
    def __init__(
        self, event: RequestArrived, arrival: int, counter: Counter, hasher: PrefixHasher, now_s: float
    ) -> None:
        self._hasher = hasher
        self.request_id = event.request_id
        self.arrival = arrival  # how many requests came before
        self.prompt_ids = event.token_ids
        self.params = event.params
        self.priority = event.priority
        self.scope = CacheScope(event.tenant, event.adapter)
        self.session = session_key(self.scope, event.session)
        self.output_tokens = min(event.output_tokens, event.params.max_tokens)
        self.is_preparation = event.is_preparation
        self.trace = event.trace
        self.deadline_s = event.deadline_s
        self.slo_s = (event.ttft_slo_s, event.tpot_slo_s)
        self.received_s = event.received_s
        self.first_token_due_s = inf if event.ttft_slo_s is None else event.received_s + event.ttft_slo_s
        self.is_admitted = False
        self.counter = counter  # of its tenant
        self.waits_for: Refused | None = None  # while it is held
        self.num_overtaken = 0  # times that one behind it was placed before it
        self.look_at_s = inf  # while it is held: when it is looked at next
        self.has_ended = False
        self.draw = int.from_bytes(event.request_id[:8], "little")  # as random as the id
        self.timeline = Timeline(event.received_s)
        self.timeline.reach(Stage.TOKENIZED, now_s)
        self.sequences = tuple(Sequence(index) for index in range(event.params.n))
        self.placements: dict[int, Placement] = {}  # by attempt
        self.avoid: frozenset[LinkId] = frozenset()
        self.losses: list[Loss] = []  # since it last gained a token
        self._no_pair_since_s: float | None = None
        self._excused_s = 0.0  # of waiting, that do not count against its objectives
        self.ledger = Ledger()
        self.cached_tokens = 0
        self.awaits_prompt = event.params.prompt_logprobs is not None and len(event.token_ids) > 1  # to be scored
        self.early: list[tuple[WorkerView, TokenDelta]] = []  # tokens that came before the prompt was
        self._num_scored = 1
        self._reads_all = event.params.pooling is not None and event.params.pooling.reads_all
        self._num_attempts = 0
        if event.resumed is not None:
            self._resume(event.resumed)

    def _resume(self, resumed: Resumed) -> None:
        """Go on from what the client has. Attempts of routers that were lost may still run: none has our numbers."""
        self._num_attempts = resumed.num_routers * ATTEMPTS_OF_A_ROUTER
        self._num_scored = resumed.num_scored
        self.awaits_prompt = self.awaits_prompt and resumed.num_scored < len(self.prompt_ids)
        for sequence, token_ids in zip(self.sequences, resumed.token_ids, strict=True):
            sequence.token_ids = list(token_ids)
            sequence.ended = sequence.index in resumed.ended
            sequence.first_s = sequence.last_s = resumed.first_token_s or 0.0
        if resumed.first_token_s is not None:
            self.timeline.reach(Stage.FIRST_TOKEN, resumed.first_token_s)

    def __repr__(self) -> str:
        return f"Request({self.request_id.hex()})"

    @property
    def tenant(self) -> str:
        return self.scope.salt

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids)

    @property
    def needs_decode(self) -> bool:
        """Whether a decode worker has to take part: not where the first token ends the request."""
        return self.params.max_tokens > 1

    @cached_property
    def hashes(self) -> Hashes:
        """Hashes of the prompt's blocks, which name the pages that workers may hold of it."""
        return block_hashes(self._hasher, self.prompt_ids, self.scope)

    @property
    def _reusable(self) -> Hashes:
        """Hashes of the blocks that need not be computed again: at least the last token is."""
        return self.hashes[: (self.num_tokens - 1) // self._hasher.block_tokens]

    @property
    def running(self) -> tuple[int, ...]:
        return tuple([sequence.index for sequence in self.sequences if not sequence.ended])

    @property
    def num_delivered(self) -> int:
        """Tokens of all continuations that the client has."""
        return sum(len(sequence.token_ids) for sequence in self.sequences)

    def take_prompt(self, scored: PromptScored) -> PromptLogprobs | None:
        """Return what is news of the prompt's log probabilities; ProtocolError where they cannot be its own."""
        start, stop = self._num_scored - scored.position, scored.position + len(scored.logprobs)
        if start < 0 or stop > self.num_tokens or scored.logprobs.num_top > (self.params.prompt_logprobs or 0):
            came = f"{scored.logprobs.num_top} log probabilities each of prompt tokens {scored.position} to {stop - 1}"
            raise ProtocolError(f"{came} came, those of {self._num_scored} to {self.num_tokens - 1} were due")
        if start >= len(scored.logprobs):
            return None
        self._num_scored = stop
        self.awaits_prompt = stop < self.num_tokens
        return scored.logprobs.slice(start, len(scored.logprobs))

    def demand(self, indices: Seq[int], turn: int, now_s: float, max_hold_s: float, home: Home | None = None) -> Demand:
        num_delivered = len(self.sequences[indices[0]].token_ids)
        waited_s = now_s - self.received_s - self._excused_s
        return Demand(
            num_tokens=len(self.prompt_ids) + num_delivered,
            num_sequences=len(indices),
            needs_decode=self.params.max_tokens - num_delivered > 1,
            max_tokens=self.params.max_tokens - num_delivered,
            ttft_slo_s=self.slo_s[0],
            tpot_slo_s=self.slo_s[1],
            avoid=self.avoid,
            turn=turn,
            hashes=() if self.awaits_prompt or self._reads_all else self._reusable,
            draw=self.draw,
            now_s=now_s,
            waited_s=waited_s,
            may_wait_s=max_hold_s - waited_s,
            is_admitted=self.is_admitted,
            priority=self.priority,
            adapter=self.scope.adapter,
            home=home,
            output_tokens=max(0, self.output_tokens - num_delivered),
        )

    def wait_for_pair(self, now_s: float) -> float:
        """Note that no pair of workers can serve it; return since when."""
        if self._no_pair_since_s is None:
            self._no_pair_since_s = now_s
        return self._no_pair_since_s

    def excuse_wait(self, now_s: float) -> None:
        """Let the time in which no pair of workers could serve it not count against its objectives."""
        if self._no_pair_since_s is not None:
            excused_s, self._no_pair_since_s = now_s - self._no_pair_since_s, None
            self._excused_s += excused_s
            self.first_token_due_s += excused_s

    def groups(self, indices: Iterable[int]) -> list[tuple[int, ...]]:
        """Split sequences into those that one prefill can serve: all while none has a token, else each alone."""
        indices = tuple(indices)
        if any(self.sequences[index].token_ids for index in indices):
            return [(index,) for index in indices]
        return [indices] if indices else []

    def next_attempt(
        self, indices: tuple[int, ...], prefill: WorkerView | None, decode: WorkerView | None
    ) -> Placement:
        self._no_pair_since_s = None
        self.early.clear()
        placement = self._next_placement(indices, prefill, decode)
        placement.running, placement.is_local = set(indices), prefill is None
        for index in indices:
            sequence = self.sequences[index]
            sequence.placement = placement
            sequence.num_before = len(sequence.token_ids)
            sequence.num_tries += 1
        self.ledger.prefill_worker, self.ledger.decode_worker = ("" if prefill is None else prefill.name), ""
        return placement

    def shadow(self, sequence: Sequence, target: WorkerView) -> Placement:
        """Start the next attempt at a sequence beside the present one, which stays in charge."""
        present = sequence.placement
        if present is None or sequence.shadow is not None:
            raise InvariantError(f"{self}: sequence {sequence.index} does not run, or moves already")
        shadow = self._next_placement((sequence.index,), None, target)
        shadow.source = present.decode
        sequence.shadow = shadow
        return shadow

    def is_shadow(self, placement: Placement) -> bool:
        """Whether a placement is not in charge: the continuation that moves to it still runs elsewhere."""
        return placement.source is not None and self.sequences[placement.indices[0]].shadow is placement

    def _next_placement(
        self, indices: tuple[int, ...], prefill: WorkerView | None, decode: WorkerView | None
    ) -> Placement:
        key = AttemptKey(self.request_id, Attempt(self._num_attempts))
        self._num_attempts += 1
        placement = self.placements[key.attempt] = Placement(key, indices, prefill, decode, set())
        return placement

    def spec(self, placement: Placement, now_s: float) -> SequenceSpec:
        delivered, params = self.sequences[placement.indices[0]].token_ids, self.params
        if params.prompt_logprobs is not None and not self.awaits_prompt:
            params = replace(params, prompt_logprobs=None)  # the client has them
        return SequenceSpec(
            request_id=self.request_id,
            attempt=placement.attempt,
            token_ids=pack(self.prompt_ids) + pack(delivered) if delivered else self.prompt_ids,
            num_prompt_tokens=len(self.prompt_ids),
            params=params,
            indices=placement.indices,
            scope=self.scope,
            remaining_s=max(0.0, self.deadline_s - now_s),
            priority=self.priority,
            trace=self.trace,
        )

    def usage(self) -> Usage:
        return Usage(len(self.prompt_ids), self.num_delivered, self.cached_tokens)

    def complete_ledger(self) -> Ledger:
        """Return the ledger with what is known at the end alone."""
        ledger = self.ledger
        ledger.steps = self.timeline.steps()
        ledger.ttft_ms = self.timeline.ms(Stage.FIRST_TOKEN)
        ledger.attempts = max(sequence.num_tries for sequence in self.sequences)
        elapsed_s = sum(sequence.last_s - sequence.first_s for sequence in self.sequences)
        num_later = sum(max(0, len(sequence.token_ids) - 1) for sequence in self.sequences)
        ledger.tpot_ms = elapsed_s * 1e3 / num_later if num_later else 0.0
        return ledger
