"""A cluster under virtual time: cores of routers, workers, and the links between them.

Workers report their load only if several routers place requests, or if answers may move.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from math import isfinite

from pdserve.base.clock import VirtualClock
from pdserve.base.collector import garbage_left
from pdserve.base.ids import AttemptKey, Peer, RequestId
from pdserve.base.roles import Role
from pdserve.capacity.answers import END
from pdserve.capacity.wires import (
    LEDGER_ONLY,
    Delta,
    Wires,
    job_of,
    kv_changed,
    load_report,
    note_end,
    report_tokens,
    stage_reached,
    unreported,
)
from pdserve.capacity.worker import MAX_TASKS, MODEL, Builder, Shape, SimWorker
from pdserve.kvtransfer.doors import PeerGone
from pdserve.measure.outcomes import Objective, Outcome
from pdserve.measure.workload import Arrival, Workload, request_id_of
from pdserve.perfmodel.curve import TimedStep
from pdserve.perfmodel.profile import Profile
from pdserve.protocol.reports import Failure
from pdserve.protocol.sampling import SamplingParams
from pdserve.router.config import Limits
from pdserve.router.placement.policies import POLICIES
from pdserve.router.placement.predict import Predictor
from pdserve.router.requests import events as router_events
from pdserve.router.requests.commands import (
    CancelAttempt,
    Command,
    Deliver,
    End,
    Fetch,
    Move,
    Place,
    SendProcessGone,
    SequenceSpec,
)
from pdserve.router.requests.core import RouterCore
from pdserve.router.requests.events import DrainAsked, Event, LinkId, PairMeasured, RoleAsked, StepReported
from pdserve.worker import messages
from pdserve.worker.messages import RouterRef
from pdserve.worker.reporting import LOAD_EVERY_S

DEADLINE_S = 600.0


@dataclass(frozen=True, slots=True)
class Run:
    """What came of a simulation, or of a part of it."""

    outcomes: tuple[Outcome, ...]
    span_s: float  # from the first arrival to the last end, or to where it stopped
    busy: dict[str, float]  # share of the time that each worker computed
    num_steps: int


@dataclass(slots=True)
class _Router:
    """A router as the cluster knows it."""

    ref: RouterRef
    core: RouterCore
    alarm_s: float = float("inf")  # when it is to be woken


class SimCluster:
    """Carries messages between the core of the router and those of the workers."""

    def __init__(
        self,
        profile: Profile,
        shape: Shape,
        policy: str,
        workload: Workload,
        objective: Objective,
    ) -> None:
        self.clock = VirtualClock()
        self._profile = profile
        self._workload = workload
        self.objective = objective  # of requests that come from now on
        self.builder = builder = Builder(profile, shape, workload)
        self._moves = shape.moves
        self._coming: Iterator[Arrival] = iter(())
        self._num_awaited = self._num_attached = 0
        self._outcomes: dict[bytes, Outcome] = {}
        self._lengths: dict[bytes, int] = {}
        self._workers: dict[LinkId, SimWorker] = {}
        self._wires = Wires(self.clock, profile.link, builder.page_bytes, self._workers)
        limits = Limits(
            max_num_requests=MAX_TASKS,
            max_num_held=4096,
            worker_silence_s=1e12,
            local_prefill=shape.prefill == 0 or (shape.local_prefill and policy == "goodput"),
        )
        self._routers: dict[RouterRef, _Router] = {}
        for ref in map(RouterRef, range(shape.routers)):
            predictor = Predictor(builder.costs, builder.hasher, may_fetch=shape.fetches)
            self._routers[ref] = _Router(ref, RouterCore(MODEL, limits, POLICIES[policy](predictor), predictor))
        for index in range(shape.prefill):
            self._attach(f"p{index}", Role.PREFILL)
        for index in range(shape.decode):
            self._attach(f"d{index}", Role.DECODE)
        for source, target in permutations(self._workers.values(), 2):
            self._measure_pair(source, target)

    @property
    def workers(self) -> Iterable[SimWorker]:
        return self._workers.values()

    @property
    def routers(self) -> list[RouterCore]:
        return [router.core for router in self._routers.values()]

    def run(self) -> Run:
        """Serve the whole workload, each request to its end."""
        self.expect(iter(self._workload.arrivals))
        with garbage_left():
            self.clock.run()
        for router in self._routers.values():
            router.core.check_idle()
        outcomes = self._outcomes.values()
        return self._so_far(max(max(outcome.last_s, outcome.sent_s) for outcome in outcomes))

    def expect(self, arrivals: Iterator[Arrival]) -> None:
        """Schedule these arrivals, in order of time; their lengths and blocks are the workload's."""
        self._coming = arrivals
        self._expect_next()

    def advance(self, count: int) -> Run:
        """Serve until `count` requests have come since the start; requests that are not over go on next time."""
        self._num_awaited = count
        with garbage_left():
            self.clock.run()
        return self._so_far(self.clock.now_s())

    def _so_far(self, now_s: float) -> Run:
        outcomes, workers = tuple(self._outcomes.values()), self._workers.values()
        span_s = max(1e-9, now_s - outcomes[0].sent_s)
        busy = {str(worker.peer.worker_id): worker.busy_s / span_s for worker in workers}
        return Run(outcomes, span_s, busy, sum(worker.num_steps for worker in workers))

    # ---- the router

    def _expect_next(self) -> None:
        arrival = next(self._coming, None)
        if arrival is not None:
            self.clock.at(arrival.at_s, self._arrive, len(self._outcomes) + 1, arrival)

    def _arrive(self, number: int, arrival: Arrival) -> None:
        if number == self._num_awaited:
            self.clock.stop()
        self._send(number, arrival, self._workload.token_ids(number, arrival))

    def _send(self, number: int, arrival: Arrival, token_ids: Sequence[int], session: str = "") -> RequestId:
        """Send a request now; return its id. `session`: the conversation that it names."""
        request_id, now_s = request_id_of(number), self.clock.now_s()
        self._outcomes[request_id] = Outcome(arrival.at_s, arrival.prompt_tokens, arrival.output_tokens, number)
        self._expect_next()
        self._lengths[request_id] = arrival.output_tokens
        event = router_events.RequestArrived(
            request_id=request_id,
            token_ids=token_ids,
            params=SamplingParams(max_tokens=self._workload.max_tokens(arrival), stop_token_ids=(END,)),
            received_s=now_s,
            deadline_s=now_s + DEADLINE_S,
            ttft_slo_s=self.objective.ttft_s if isfinite(self.objective.ttft_s) else None,
            tpot_slo_s=self.objective.tpot_s if isfinite(self.objective.tpot_s) else None,
            session=session,
        )
        self._post(self._routers[self._router_of(request_id)], event)
        return request_id

    def _router_of(self, request_id: bytes) -> RouterRef:
        return RouterRef(int.from_bytes(request_id[8:], "big") % len(self._routers))

    def _post(self, router: _Router, event: Event) -> None:
        for command in router.core.handle(event, self.clock.now_s()):
            self._carry_out(router, command)
        due_s = router.core.next_wakeup_s()
        if due_s is not None and due_s < router.alarm_s and due_s < self.clock.now_s() + DEADLINE_S / 2:
            router.alarm_s = due_s
            self.clock.at(max(due_s, self.clock.now_s()), self._wake, router, due_s)

    def _wake(self, router: _Router, due_s: float) -> None:
        if router.alarm_s == due_s:
            router.alarm_s = float("inf")
            self._post(router, router_events.Tick())

    def _carry_out(self, router: _Router, command: Command) -> None:
        match command:
            case Place():
                self._place(router, command)
            case Deliver(request_id, _, token_ids):
                self._outcomes[request_id].take(len(token_ids), self.clock.now_s())
            case End(request_id, end):
                note_end(self._outcomes[request_id], end, self.clock.now_s())
            case Move():
                self._move(router, command)
            case CancelAttempt(link, request_id, attempt, indices):
                self._wires.offer(link, messages.Cancelled(request_id, attempt, indices))
            case DrainAsked(link):
                self._wires.offer(link, messages.DrainAsked())
            case RoleAsked(link, role, epoch):
                self._wires.offer(link, messages.RoleGiven(role, epoch))
            case SendProcessGone(link, process):
                self._wires.offer(link, PeerGone(process))
            case _:
                pass

    def _place(self, router: _Router, place: Place) -> None:
        spec = place.spec
        self._outcomes[spec.request_id].placed_s = self.clock.now_s()
        job = job_of(spec)
        prefill = None if place.prefill is None else self._workers[place.prefill.link]
        decode = None if place.decode is None else self._workers[place.decode.link]
        deadline_s = self.clock.now_s() + spec.remaining_s
        if decode is not None:
            peer = None if prefill is None else prefill.peer
            decode.reported[spec.request_id, spec.attempt] = 0 if prefill is None else 1
            decode.offer(messages.Placed(router.ref, job, deadline_s, source=peer))
        if prefill is not None:
            peer = None if decode is None else decode.peer
            prefill.reported[spec.request_id, spec.attempt] = 0
            fetch = None if place.fetch is None else self._share(spec, place.fetch, prefill.peer)
            placed = messages.Placed(router.ref, job, deadline_s, target=peer, target_address="simulated", fetch=fetch)
            prefill.offer(placed)

    def _move(self, router: _Router, move: Move) -> None:
        source, target, spec = self._workers[move.source.link], self._workers[move.target.link], move.spec
        if not source.reports:  # the router does not know the tokens of its answers so far
            refused = (Failure.OVERLOADED, "moves are left out")
            failed = router_events.AttemptFailed(target.link, spec.request_id, spec.attempt, *refused)
            self.clock.soon(self._post, router, failed)
            return
        present = AttemptKey(spec.request_id, move.attempt)
        target.reported[spec.request_id, spec.attempt] = num_known = len(spec.token_ids) - spec.num_prompt_tokens
        deadline_s = self.clock.now_s() + spec.remaining_s
        job = job_of(spec)
        target.offer(messages.Placed(router.ref, job, deadline_s, source.peer, extra_tokens=move.extra_tokens))
        (index,), num_tokens = spec.indices, spec.num_prompt_tokens + num_known
        asked = (present, index, spec.attempt, target.peer, "simulated", num_tokens)
        source.offer(messages.MoveAsked(router.ref, *asked))

    def _share(self, spec: SequenceSpec, fetch: Fetch, target: Peer) -> messages.Fetch:
        """Ask the holder of a prompt's leading pages to send them; return what the receiver learns of it."""
        holder, deadline_s = self._workers[fetch.holder.link], self.clock.now_s() + fetch.within_s
        key, token_ids = AttemptKey(spec.request_id, spec.attempt), spec.token_ids[: fetch.num_tokens]
        asked = (key, token_ids, spec.scope, target, "simulated", deadline_s)
        holder.offer(messages.ShareAsked(*asked))
        return messages.Fetch(holder.peer, fetch.num_tokens, deadline_s)

    # ---- workers

    def _attach(self, name: str, role: Role) -> SimWorker:
        self._num_attached += 1
        link = LinkId(self._num_attached)
        worker, registration = self.builder.build(self.clock, name, link, role, self._lengths.__getitem__)
        worker.cluster = self
        if self._moves:
            worker.reports = True
        self._workers[link] = worker
        for router in self._routers.values():
            self._post(router, registration)
        return worker

    def _measure_pair(self, source: SimWorker, target: SimWorker) -> None:
        """Report how fast a link is, as workers do when they meet."""
        bytes_per_s = self._profile.link.bytes_per_s
        for router in self._routers.values():
            measured = PairMeasured(source.link, target.peer.worker_id, bytes_per_s, "simulated", is_slow=False)
            self._post(router, measured)

    def _take_role(self, worker: SimWorker, taken: messages.RoleTaken) -> None:
        """Register a worker again, as it does once it has another role."""
        for router in self._routers.values():
            before = router.core.workers.known(worker.link).registration
            registration = replace(
                before, role=taken.role, role_epoch=taken.epoch, max_num_batched_tokens=taken.step_tokens
            )
            self._post(router, registration)

    def perform(self, worker: SimWorker, commands: Sequence[messages.Command], steps: TimedStep | None) -> None:
        """Carry out what a worker has decided. `steps`: that it came of, which are alike."""
        deltas: dict[RouterRef, list[Delta]] = {ref: [] for ref in self._routers}
        for command in commands:
            match command:
                case messages.Tokens():
                    deltas[command.router].append(report_tokens(worker.reported, command))
                case messages.Progress() if command.stage not in LEDGER_ONLY:
                    self._post(self._routers[command.router], stage_reached(worker.link, command, self.clock.now_s()))
                case messages.Progress():
                    pass
                case messages.RoleTaken():
                    self._take_role(worker, command)
                case messages.Failed(ref, key, code, reason):
                    failed = router_events.AttemptFailed(worker.link, key.request_id, key.attempt, code, reason)
                    self._post(self._routers[ref], failed)
                case _:
                    self._wires.carry(worker, command)
        self._report_cache(worker)
        for ref, router in self._routers.items():
            if steps is not None:
                self._post(router, StepReported(worker.link, deltas[ref], steps.step, steps.elapsed_s))
            elif any(each.token_ids for each in deltas[ref]):  # they came with a move
                self._post(router, StepReported(worker.link, deltas[ref]))

    def _report_cache(self, worker: SimWorker) -> None:
        changed = kv_changed(worker.link, worker.scheduler.cache)
        if changed is not None:
            for router in self._routers.values():
                self._post(router, changed)

    def refresh(self, worker: SimWorker, *, at_once: bool) -> None:
        """Report how full a worker is, and what its answers have gained if it does steps singly.

        As in `worker.reporting`, this is for several routers; for one, too, where answers may move.
        """
        now_s, several = self.clock.now_s(), len(self._routers) > 1
        is_due = now_s - worker.reported_s >= LOAD_EVERY_S
        if not (worker.reports and is_due) and not (several and (at_once or is_due)):
            return
        worker.reported_s = now_s
        known = unreported(worker.reported, worker.scheduler.running) if worker.reports else ()
        for ref, router in self._routers.items() if known else ():
            ours = [each for each in known if self._router_of(each.request_id) == ref]
            self._post(router, StepReported(worker.link, ours))
        load = worker.core.load()
        for ref, router in self._routers.items():
            self._post(router, load_report(worker.link, load, ref))


def simulate(profile: Profile, shape: Shape, policy: str, workload: Workload, objective: Objective) -> Run:
    """Serve a workload on a cluster of this shape; return what its clients saw."""
    return SimCluster(profile, shape, policy, workload, objective).run()
