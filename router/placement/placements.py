"""The admitted requests and their placements: each change keeps requests, workers and commands in agreement."""

from collections import Counter
from heapq import heapify, heappop, heappush
from math import inf

from pdserve.base.errors import InvariantError
from pdserve.base.ids import AttemptKey
from pdserve.perfmodel.curve import attention_work
from pdserve.protocol.refusal import Cause, Refused
from pdserve.protocol.reports import Stage
from pdserve.router.config import Limits
from pdserve.router.placement.learnt import Fading
from pdserve.router.placement.predict import Predictor
from pdserve.router.placement.routing import Decision, Held, Placed, Policy, Workers, choose
from pdserve.router.placement.sessions import Home, Sessions
from pdserve.router.placement.view import Share, WorkerView
from pdserve.router.requests.commands import CancelAttempt, Command, End, Finished, Move, Place
from pdserve.router.requests.events import LinkId, Registration
from pdserve.router.requests.recent import DemandCounts, Kind, Recent
from pdserve.router.requests.request import Placement, Request, Sequence

DONE = "done"
_MOVE_S = 0.1  # that a move takes beside its bytes, before one was seen


class Shadows:
    """Moves under way: placements of continuations that still run elsewhere.

    Invariant: a placement is among them from when its worker is asked until it takes charge or is closed.
    """

    def __init__(self, recent: Recent) -> None:
        self._recent = recent
        self._placements: dict[AttemptKey, Placement] = {}
        self.ended: Counter[str] = Counter()  # moves since start: "done", or what they failed of
        self._takes_s = Fading(_MOVE_S, 0.0)
        self.sources: set[LinkId] = set()  # of moves that are over, until somebody has looked for further ones

    def num_leaving(self, worker: WorkerView) -> int:
        return sum([shadow.source is worker for shadow in self._placements.values()])

    def num_coming(self, worker: WorkerView) -> int:
        return sum([shadow.decode is worker for shadow in self._placements.values()])

    def add(self, shadow: Placement) -> None:
        self._placements[shadow.key] = shadow

    def remove(self, shadow: Placement) -> None:
        del self._placements[shadow.key]
        if shadow.source is not None:
            self.sources.add(shadow.source.link)

    def takes_s(self, now_s: float) -> float:
        """Return how long a move probably takes, beside its bytes."""
        return self._takes_s.value(now_s)

    def note_end(self, shadow: Placement, how: str, now_s: float) -> None:
        """Note how a move ended: "done", or what it failed of. How long a failed one would have taken nobody knows."""
        self.ended[how] += 1
        if shadow.source is not None and shadow.decode is not None:
            self._recent.note(Kind.MOVE, shadow.source.name, f"a sequence moves to {shadow.decode.name}: {how}")
        elapsed_s = max(0.0, now_s - shadow.placed_s - shadow.copy_s)
        if how == DONE or elapsed_s > self.takes_s(now_s):
            self._takes_s.observe(elapsed_s, now_s)

    def check_idle(self) -> None:
        """Raise InvariantError unless nothing is on its way."""
        if self._placements:
            raise InvariantError(f"these still move: {list(self._placements)}")


class Placements:
    """Requests that have been placed and have not ended."""

    def __init__(self, workers: Workers, predictor: Predictor, policy: Policy, limits: Limits) -> None:
        self.workers = workers
        self.workers_changed_s: float | None = None  # when one last came, went, loaded or began to drain
        self.predictor = predictor
        self._policy = policy
        self._limits = limits
        self.requests: dict[bytes, Request] = {}  # by id, as it comes off the wire
        self.num_preparing = 0  # of these, preparations of next turns
        self.num_decoding = 0  # of these, in which decode workers take part
        self.ended: Counter[str] = Counter()  # "OK" or a status name
        self.refused_because: Counter[Cause] = Counter()  # those of clients that have left do not count
        self.demand = DemandCounts()
        self.recent = Recent()
        self.num_placed = 0  # placements made, all requests
        self.num_replaced = 0
        self.num_without_handoff, self.without_handoff_because = 0, ""  # placements since the last with a hand-off
        self.shadows = Shadows(self.recent)
        self.sessions = Sessions()
        self.num_ended = 0
        self._commands: list[Command] = []
        self._alarms: list[tuple[float, int, Request]] = []  # a heap
        self._num_alarms = 0  # set so far: breaks ties, so that requests themselves are never compared
        self._num_kept = 0  # alarms left when those of ended requests were last thrown out

    def emit(self, command: Command) -> None:
        self._commands.append(command)

    def take_commands(self) -> list[Command]:
        commands, self._commands = self._commands, []
        return commands

    # ---- alarms: something about a request may be due; `RouterCore` finds out what

    @property
    def next_alarm_s(self) -> float:
        return self._alarms[0][0] if self._alarms else inf

    def set_alarm(self, at_s: float, request: Request) -> None:
        if len(self._alarms) > 2 * self._num_kept + 64:
            self._alarms = [alarm for alarm in self._alarms if not alarm[2].has_ended]
            heapify(self._alarms)
            self._num_kept = len(self._alarms)
        self._num_alarms += 1
        heappush(self._alarms, (at_s, self._num_alarms, request))

    def take_due(self, now_s: float) -> list[Request]:
        due: list[Request] = []
        while self._alarms and self._alarms[0][0] <= now_s:
            due.append(heappop(self._alarms)[2])
        return due

    # ---- placements

    @property
    def num_asked(self) -> int:
        """How many requests are placed for which a client waits."""
        return len(self.requests) - self.num_preparing

    def enter(self, request: Request) -> None:
        if request.request_id in self.requests:
            raise InvariantError(f"{request} arrived twice")
        self.requests[request.request_id] = request
        self.num_preparing += request.is_preparation
        self.num_decoding += request.needs_decode

    def decide(self, request: Request, indices: tuple[int, ...], now_s: float) -> Decision:
        """Ask the policy where these sequences of a request go now.

        While no pair of workers can serve, a request waits for one for `pool_grace_s` at most, and not at all where no
        worker has come, gone or loaded for that long. Where pools scale to zero, it waits until its deadline.
        """
        if self._limits.scale_to_zero:
            request.excuse_wait(now_s)
        home = self.sessions.home(request.session, now_s)
        demand = request.demand(indices, self.num_placed, now_s, self._limits.max_hold_s, home)
        decision = choose(self.workers, demand, self._policy, local=self._limits.local_prefill)
        if not isinstance(decision, Held) or not decision.lacks_workers:
            return decision
        if self.workers_changed_s is None:
            self.workers_changed_s = now_s  # the first request came before any worker
        until_s = min(self.workers_changed_s, request.wait_for_pair(now_s)) + self._limits.pool_grace_s
        if self._limits.scale_to_zero:
            until_s = inf
        if now_s < until_s:
            return Held(decision.why, until_s)
        return decision.why

    def place(self, request: Request, indices: tuple[int, ...], placed: Placed, now_s: float) -> None:
        prefill, decode = placed.pair.prefill, placed.pair.decode
        placement = request.next_attempt(indices, prefill, decode)
        placement.placed_s, placement.ttft_s, placement.tpot_s = now_s, placed.ttft_s, placed.tpot_s
        placement.ttft_median = self.predictor.ttft_median
        placement.fetch = placed.fetch
        request.ledger.decision = placed.summary
        request.ledger.fetched_from = "" if placed.fetch is None else placed.fetch.holder.worker_id
        if placement.attempt == 0 and placed.ttft_s is not None and placed.tpot_s is not None:
            request.ledger.predicted_ttft_ms = (now_s - request.received_s + placed.ttft_s) * 1e3
            request.ledger.predicted_tpot_ms = placed.tpot_s * 1e3
        request.timeline.reach(Stage.PLACED, now_s)
        spec = request.spec(placement, now_s)
        num_tokens, cached = len(spec.token_ids), placed.cached_tokens
        fresh, work = num_tokens - cached, attention_work(num_tokens - cached, cached)
        if prefill is not None:
            prefill.assign(placement.key, Share(0, fresh, work, priority=request.priority), now_s)
        if decode is not None:
            placement.num_beside = decode.num_sequences
            share = Share(len(indices), 0, 0, num_tokens, True, priority=request.priority)
            if prefill is None:
                share.prefill_tokens, share.prefill_work = fresh, work
            decode.assign(placement.key, share, now_s)
        # A preparation may be cancelled: its pages count once they are there.
        hashes = () if request.is_preparation else request.hashes
        self.predictor.note_placed(prefill, decode, hashes, fresh, now_s)
        self._settle(request, placement, now_s)
        self.num_placed += 1
        self.num_without_handoff += 1
        self.without_handoff_because = placed.summary
        if prefill is not None and decode is not None:
            self.num_without_handoff, self.without_handoff_because = 0, ""
        self.num_replaced += placement.attempt > 0
        self.emit(Place(spec, _registration(prefill), _registration(decode), placed.fetch))

    def _settle(self, request: Request, placement: Placement, now_s: float) -> None:
        """Note where a conversation lives from now on, and whether its turn has kept to where it lived.

        A preparation moves no home: it may arrive after the turn that it is of. Its pages count once they are there.
        """
        first = placement.prefill or placement.decode
        if not request.session or first is None or request.is_preparation:
            return
        before = self.sessions.home(request.session, now_s)
        after = Home(first.link, None if placement.decode is None else placement.decode.link)
        if before is not None and after.decode is None:
            after = Home(first.link, before.decode)
        if placement.attempt == 0:
            links = () if before is None else (before.computes, before.decode)
            there = [self.workers.get(link) for link in links if link is not None]
            is_there = any(worker is not None and not self.workers.unroutable(worker) for worker in there)
            self.sessions.count(before, after, is_there=is_there)
        self.sessions.bind(request.session, after, now_s)

    def release_prefill(self, placement: Placement) -> None:
        """Note that the decode worker goes on without the prefill worker."""
        if placement.prefill is not None:
            placement.prefill.unassign(placement.key)
            placement.prefill = None

    def close(self, request: Request, placement: Placement, *, stop_workers: bool) -> None:
        """Take a placement off its workers; with `stop_workers`, stop what they still do for it."""
        if request.is_shadow(placement):
            request.sequences[placement.indices[0]].shadow = None
            self.shadows.remove(placement)
        for index in placement.running:
            request.sequences[index].placement = None
        del request.placements[placement.attempt]
        for worker in placement.workers():
            worker.unassign(placement.key)
            if stop_workers:
                self._cancel(worker, request, placement, placement.indices)

    def move(
        self, request: Request, sequence: Sequence, target: WorkerView, meanwhile: tuple[int, float], now_s: float
    ) -> None:
        """Let a continuation move to another worker. Where it runs now stays in charge until the other has its KV.

        `meanwhile`: the tokens that it will probably gain, and the seconds that copying its pages will probably take.
        """
        present, shadow = sequence.placement, request.shadow(sequence, target)
        if present is None or shadow.source is None:
            raise InvariantError(f"{request}: sequence {sequence.index} does not decode")
        extra_tokens, shadow.copy_s = meanwhile
        shadow.placed_s = sequence.move_asked_s = now_s
        spec = request.spec(shadow, now_s)
        num_left = request.params.max_tokens - len(sequence.token_ids)
        share = Share(1, 0, 0, len(spec.token_ids), True, priority=request.priority)
        target.assign(shadow.key, share, now_s)
        self.shadows.add(shadow)
        source, extra_tokens = shadow.source.registration, min(extra_tokens, num_left)
        self.emit(Move(spec, present.attempt, source, target.registration, extra_tokens))

    def take_charge(self, request: Request, sequence: Sequence) -> None:
        """Let a continuation's shadow take charge of it, and stop what its present placement still does for it."""
        shadow, present = sequence.shadow, sequence.placement
        if shadow is None or present is None:
            raise InvariantError(f"{request}: sequence {sequence.index} does not move")
        self.shadows.remove(shadow)
        if shadow.decode is not None:
            self.sessions.move(request.session, shadow.decode.link)
        sequence.shadow, sequence.placement = None, shadow
        shadow.running.add(sequence.index)
        self._leave(request, present, sequence.index, stop_workers=True)

    def end_sequence(self, request: Request, index: int, *, stop_workers: bool) -> None:
        """End one continuation; the request goes on while another runs."""
        sequence = request.sequences[index]
        if sequence.shadow is not None:
            self.close(request, sequence.shadow, stop_workers=True)
        placement, sequence.ended, sequence.placement = sequence.placement, True, None
        if placement is not None:
            self._leave(request, placement, index, stop_workers=stop_workers)

    def _leave(self, request: Request, placement: Placement, index: int, *, stop_workers: bool) -> None:
        """Note that a placement runs one continuation fewer; close it with its last one."""
        placement.running.discard(index)
        if placement.decode is not None:
            placement.decode.sequence_ended(placement.key)
        if stop_workers:
            for worker in placement.workers():
                self._cancel(worker, request, placement, (index,))
        if not placement.running:
            self.close(request, placement, stop_workers=False)

    def part(self, request: Request, placement: Placement, indices: list[int]) -> None:
        """Let a placement go on without some of its continuations, which are to be placed again."""
        for index in indices:
            request.sequences[index].placement = None
            self._leave(request, placement, index, stop_workers=True)

    def end_request(self, request: Request, outcome: Finished | Refused) -> None:
        """Give a request its one end and forget it."""
        for placement in tuple(request.placements.values()):
            self.close(request, placement, stop_workers=True)
        if self.requests.pop(request.request_id, None) is None:
            raise InvariantError(f"{request} ended twice")
        self.num_preparing -= request.is_preparation
        self.num_decoding -= request.needs_decode
        self.report_end(request, outcome)

    def report_end(self, request: Request, outcome: Finished | Refused) -> None:
        request.has_ended = True
        if request.is_preparation:
            self.num_ended += 1
            self.emit(End(request.request_id, outcome))
            return
        self.ended["OK" if isinstance(outcome, Finished) else outcome.status.value] += 1
        self.num_ended += 1
        self.demand.count_end(request, outcome)
        self.recent.keep_end(request, outcome)
        if isinstance(outcome, Refused) and outcome.cause is not Cause.CANCELLED:
            waited_in_vain = request.waits_for if outcome.cause in (Cause.DEADLINE, Cause.TURN) else None
            self.refused_because[(waited_in_vain or outcome).cause] += 1
        self.emit(End(request.request_id, outcome))

    def finish(self, request: Request, now_s: float) -> None:
        """End a request whose continuations have all ended."""
        request.timeline.reach(Stage.FINISHED, now_s)
        self.end_request(request, Finished(request.usage(), request.complete_ledger()))

    def placement_of(self, worker: WorkerView, request_id: bytes, attempt: int) -> Placement | None:
        """Return the placement that a worker names, or None where it is over or was never this worker's.

        One that a continuation moves to is also of the worker that it moves from.
        """
        request = self.requests.get(request_id)
        placement = None if request is None else request.placements.get(attempt)
        if placement is None or all(worker is not each for each in (*placement.workers(), placement.source)):
            return None
        return placement

    def _cancel(self, worker: WorkerView, request: Request, placement: Placement, indices: tuple[int, ...]) -> None:
        if self.workers.get(worker.link) is worker:
            is_all = len(indices) == len(request.sequences) and placement.source is None
            named = () if is_all else indices
            self.emit(CancelAttempt(worker.link, request.request_id, placement.attempt, named))


def _registration(worker: WorkerView | None) -> Registration | None:
    return None if worker is None else worker.registration
