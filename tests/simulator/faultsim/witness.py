"""What tokens cannot show: whether a worker might still compute them, and a router still take them.

The engine never rounds, so two workers that go on with one continuation draw the same tokens, and a client sees
nothing. So each worker is watched: it computes nothing that was cancelled, and nothing of a continuation whose commit
has left, unless the receiver has withdrawn it. What it reports of an attempt has no gap, and no position twice. A move
that ends without its target ends with a report, or with its continuation. And each router is watched: once an attempt
has committed, no token of an earlier one is taken.
"""

from collections.abc import Iterable, Iterator, Mapping

from faultsim.world import ViolationError, World
from pdserve.base.ids import Attempt, AttemptKey, RequestId
from pdserve.engine.scheduler import Scheduler
from pdserve.engine.sequence import Sequence
from pdserve.kvtransfer.doors import ReceiverMessage
from pdserve.kvtransfer.session import Taken, Withdrawn
from pdserve.protocol.reports import Stage
from pdserve.router.requests import events as to_router
from pdserve.router.requests.events import StageReached, StepReported, TokenDelta
from pdserve.router.requests.request import Request
from pdserve.worker.core import WorkerCore
from pdserve.worker.messages import Cancelled, Event, Failed, MoveAsked, Placed, RoleTaken, Tokens

Continuation = tuple[RequestId, int]
Stale = tuple[Request, TokenDelta, int]  # tokens of an attempt that is not in charge, and how many there were before


class WorkerWitness:
    """Remembers what one worker was asked to do, and what it has handed over."""

    def __init__(self, name: str, world: World) -> None:
        self._name = name
        self._world = world
        self.role_epoch = 0
        self._cancelled: dict[RequestId, Attempt] = {}  # attempts up to this one
        self._left: dict[Continuation, Attempt] = {}  # the commit of this attempt has left
        self._moves: dict[AttemptKey, tuple[AttemptKey, int]] = {}  # asked for: which continuation of what runs here
        self._next: dict[tuple[AttemptKey, int], int] = {}  # the position of the token that is due

    def sees(self, event: Event) -> None:
        """Note what an event asks of the worker, or lets it do."""
        match event:
            case Placed(job=job):
                first = len(job.token_ids) - job.num_prompt_tokens
                for index in job.indices:
                    self._next[AttemptKey(*job.key), index] = first
            case Cancelled(request_id, attempt, indices=()):
                self._cancelled[request_id] = max(attempt, self._cancelled.get(request_id, attempt))
            case MoveAsked(key=key, index=index, new_attempt=new_attempt):
                self._moves[AttemptKey(key.request_id, new_attempt)] = key, index
            case ReceiverMessage(key=key, event=Taken()):
                self._moves.pop(key, None)
            case ReceiverMessage(key=key, event=Withdrawn()):
                left = self._left.items()
                self._left = {which: attempt for which, attempt in left if (which[0], attempt) != tuple(key)}
            case _:
                pass

    def handed_over(self, key: AttemptKey, indices: Iterable[int]) -> None:
        """Note that the commit of these continuations leaves."""
        for index in indices:
            self._left[key.request_id, index] = key.attempt

    def computes(self, sequences: Iterable[Sequence]) -> None:
        """Raise ViolationError where a step has a continuation that was handed over."""
        for sequence in sequences if self._left else ():
            request_id, attempt = sequence.job.key
            for index in sequence.indices:
                left = self._left.get((request_id, index))
                if left is not None and attempt <= left:
                    text = f"computes {index} of attempt {attempt}, though the commit of attempt {left} has left"
                    raise ViolationError("I3", f"{self._name} {text}", request_id)

    def fails(self, failed: Failed) -> None:
        self._moves.pop(failed.key, None)

    def check_moves(self, core: WorkerCore, scheduler: Scheduler) -> None:
        """Raise ViolationError where a move has ended, its continuation goes on, and no router can know."""
        for key, (present, index) in [each for each in self._moves.items() if not core.outgoing.is_open(each[0])]:
            del self._moves[key]
            runs = [s for s in (*scheduler.running, *scheduler.waiting) if AttemptKey(*s.job.key) == present]
            if any(index in sequence.indices for sequence in runs):
                text = f"{self._name} goes on with {index} of attempt {present.attempt}, and its move was not reported"
                raise ViolationError("I4", text, key.request_id)

    def takes(self, taken: RoleTaken) -> None:
        """Raise ViolationError where a role is not later than the one before."""
        if taken.epoch <= self.role_epoch:
            text = f"{self._name} took {taken.role} of epoch {taken.epoch} after one of epoch {self.role_epoch}"
            raise ViolationError("I7", text)
        self.role_epoch = taken.epoch

    def reports(self, tokens: Tokens) -> None:
        """Raise ViolationError where a token is not the next one, or nobody wants it any more."""
        world, key = self._world, tokens.key
        request_id, attempt = key
        world.num_messages += 1
        late_s = world.now - world.ended_s.get(request_id, world.now)
        if late_s > world.stop_within_s:
            text = f"{self._name} computes attempt {attempt} {late_s:.3f} s after the request's end"
            raise ViolationError("I4", text, request_id)
        if self._cancelled.get(request_id, -1) >= attempt:
            text = f"{self._name} computes attempt {attempt}, which was cancelled"
            raise ViolationError("I4", text, request_id)
        due = self._next[key, tokens.index]
        if tokens.position != due:
            text = f"{self._name} reports token {tokens.position} of {tokens.index} of attempt {attempt}, due was {due}"
            raise ViolationError("I3", text, request_id)
        self._next[key, tokens.index] += len(tokens.tokens)


class RouterWitness:
    """Remembers which attempt of each continuation is in charge, by what workers have reported."""

    def __init__(self, name: str, requests: Mapping[bytes, Request]) -> None:
        self._name = name
        self._requests = requests
        self._committed: dict[Continuation, Attempt] = {}

    def sees(self, event: to_router.Event) -> list[Stale]:
        """Note what an event is about to do; return the continuations whose tokens it may not add to."""
        match event:
            case StageReached(request_id=request_id, attempt=attempt, stage=Stage.COMMITTED):
                request = self._requests.get(request_id)
                placement = None if request is None else request.placements.get(attempt)
                for index in () if placement is None else placement.indices:
                    which = RequestId(request_id), index
                    self._committed[which] = max(attempt, self._committed.get(which, attempt))
            case StepReported(deltas=deltas):
                return list(self._stale(deltas)) if self._committed else []
            case _:
                pass
        return []

    def check(self, stale: Iterable[Stale]) -> None:
        """Raise ViolationError where a continuation has grown by tokens that it might not gain."""
        for request, delta, num_tokens in stale:
            if len(request.sequences[delta.index].token_ids) != num_tokens:
                text = f"took tokens of {delta.index} from attempt {delta.attempt}, though a later one has committed"
                raise ViolationError("I3", f"{self._name} {text}", request.request_id)

    def _stale(self, deltas: Iterable[TokenDelta]) -> Iterator[Stale]:
        for delta in deltas:
            committed = self._committed.get((RequestId(delta.request_id), delta.index))
            request = self._requests.get(delta.request_id)
            if committed is not None and delta.attempt < committed and request is not None:
                ends = [
                    each.position + len(each.token_ids)
                    for each in deltas  # those of the attempt in charge may come in the same message
                    if (each.request_id, each.attempt, each.index) == (delta.request_id, committed, delta.index)
                ]
                yield request, delta, max([len(request.sequences[delta.index].token_ids), *ends])
