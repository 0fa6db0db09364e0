"""A cluster under virtual time: cores of a router and of workers, and the links between them.

Workers report how full they are where answers may move.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import permutations
from math import inf, isfinite

from pdserve.capacity.leaping import END
from pdserve.capacity.shape import USUAL, Run, Shape, Ways
from pdserve.capacity.wires import (
    LEDGER_ONLY,
    Delta,
    Wires,
    close,
    delta,
    job_of,
    kv_changed,
    load_report,
    news,
    stage,
)
from pdserve.capacity.worker import MAX_TASKS, MODEL, Builder, SimWorker, Steps
from pdserve.ids import RequestId
from pdserve.kvtransfer.doors import PeerGone
from pdserve.kvtransfer.session import HandoffKey, Peer
from pdserve.measure.outcomes import Objective, Outcome
from pdserve.measure.workload import Arrival, Workload
from pdserve.perfmodel.profile import Profile
from pdserve.reports import Failure
from pdserve.roles import Role
from pdserve.router import events as router_events
from pdserve.router.commands import (
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
from pdserve.router.config import Limits
from pdserve.router.core import RouterCore
from pdserve.router.events import DrainAsked, Event, LinkId, PairMeasured, RoleAsked, StepReported
from pdserve.router.policies import POLICIES
from pdserve.router.predict import Predictor
from pdserve.sampling import SamplingParams
from pdserve.virtual_time import VirtualClock, garbage_left
from pdserve.worker import messages
from pdserve.worker.messages import RouterRef
from pdserve.worker.reporting import LOAD_EVERY_S

DEADLINE_S = 600.0
_ROUTER = RouterRef(0)


class SimCluster:
    """Carries messages between the core of the router and those of the workers."""

    def __init__(
        self,
        profile: Profile,
        shape: Shape,
        policy: str,
        workload: Workload,
        objective: Objective,
        ways: Ways = USUAL,
    ) -> None:
        self._clock = VirtualClock()
        self._profile = profile
        self._workload = workload
        self._objective = objective
        self._builder = builder = Builder(profile, shape, workload)
        self._moves = ways.moves
        self._coming: Iterator[Arrival] = iter(())
        self._num_awaited = self._num_attached = 0
        self._outcomes: dict[bytes, Outcome] = {}
        self._lengths: dict[bytes, int] = {}
        self._workers: dict[LinkId, SimWorker] = {}
        self._wires = Wires(self._clock, profile.link, builder.page_bytes)
        limits = Limits(
            max_num_requests=MAX_TASKS,
            max_num_held=4096,
            worker_silence_s=1e12,
            local_prefill=shape.prefill == 0 or (shape.local_prefill and policy == "goodput"),
        )
        predictor = Predictor(builder.costs, builder.hasher, may_fetch=ways.fetches)
        self.router = RouterCore(MODEL, limits, POLICIES[policy](predictor), predictor)
        self._alarm_s = inf  # when the router is to be woken
        for index in range(shape.prefill):
            self._attach(f"p{index}", Role.PREFILL)
        for index in range(shape.decode):
            self._attach(f"d{index}", Role.DECODE)
        for source, target in permutations(self._workers.values(), 2):
            self._measure_pair(source, target)

    @property
    def workers(self) -> Iterable[SimWorker]:
        return self._workers.values()

    def run(self) -> Run:
        """Serve the whole workload, each request to its end."""
        self.expect(iter(self._workload.arrivals))
        with garbage_left():
            self._clock.run()
        self.router.check_idle()
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
            self._clock.run()
        return self._so_far(self._clock.now_s())

    def _so_far(self, now_s: float) -> Run:
        outcomes, workers = tuple(self._outcomes.values()), self._workers.values()
        span_s = max(1e-9, now_s - outcomes[0].sent_s)
        busy = {str(worker.peer.worker_id): worker.busy_s / span_s for worker in workers}
        return Run(outcomes, span_s, busy, sum(worker.num_steps for worker in workers))

    # ---- the router

    def _expect_next(self) -> None:
        arrival = next(self._coming, None)
        if arrival is not None:
            self._clock.at(arrival.at_s, self._arrive, len(self._outcomes) + 1, arrival)

    def _arrive(self, number: int, arrival: Arrival) -> None:
        if number == self._num_awaited:
            self._clock.stop()
        request_id = RequestId((number * 0x9E3779B97F4A7C15 % 2**64).to_bytes(8, "little") + number.to_bytes(8, "big"))
        self._outcomes[request_id] = Outcome(arrival.at_s, arrival.prompt_tokens, arrival.output_tokens, number)
        self._expect_next()
        self._lengths[request_id] = arrival.output_tokens
        now_s = self._clock.now_s()
        event = router_events.RequestArrived(
            request_id=request_id,
            token_ids=self._workload.token_ids(number, arrival),
            params=SamplingParams(max_tokens=self._workload.max_tokens(arrival), stop_token_ids=(END,)),
            received_s=now_s,
            deadline_s=now_s + DEADLINE_S,
            ttft_slo_s=self._objective.ttft_s if isfinite(self._objective.ttft_s) else None,
            tpot_slo_s=self._objective.tpot_s if isfinite(self._objective.tpot_s) else None,
        )
        self._post(event)

    def _post(self, event: Event) -> None:
        for command in self.router.handle(event, self._clock.now_s()):
            self._carry_out(command)
        due_s = self.router.next_wakeup_s()
        if due_s is not None and due_s < self._alarm_s and due_s < self._clock.now_s() + DEADLINE_S / 2:
            self._alarm_s = due_s
            self._clock.at(max(due_s, self._clock.now_s()), self._wake, due_s)

    def _wake(self, due_s: float) -> None:
        if self._alarm_s == due_s:
            self._alarm_s = inf
            self._post(router_events.Tick())

    def _carry_out(self, command: Command) -> None:
        match command:
            case Place():
                self._place(command)
            case Deliver(request_id, _, token_ids):
                self._outcomes[request_id].take(len(token_ids), self._clock.now_s())
            case End(request_id, end):
                close(self._outcomes[request_id], end, self._clock.now_s())
            case Move():
                self._move(command)
            case CancelAttempt(link, request_id, attempt, indices):
                self._offer(link, messages.Cancelled(request_id, attempt, indices))
            case DrainAsked(link):
                self._offer(link, messages.DrainAsked())
            case RoleAsked(link, role, epoch):
                self._offer(link, messages.RoleGiven(role, epoch))
            case SendProcessGone(link, worker_id, incarnation):
                self._offer(link, PeerGone(Peer(worker_id, incarnation)))
            case _:
                pass

    def _offer(self, link: LinkId, message: messages.Event) -> None:
        """Send a worker something, unless it has left."""
        worker = self._workers.get(link)
        if worker is not None:
            worker.offer(message)

    def _place(self, place: Place) -> None:
        spec = place.spec
        self._outcomes[spec.request_id].placed_s = self._clock.now_s()
        job = job_of(spec)
        prefill = None if place.prefill is None else self._workers[place.prefill.link]
        decode = None if place.decode is None else self._workers[place.decode.link]
        deadline_s = self._clock.now_s() + spec.remaining_s
        if decode is not None:
            peer = None if prefill is None else prefill.peer
            decode.reported[spec.request_id, spec.attempt] = 0 if prefill is None else 1
            decode.offer(messages.Placed(_ROUTER, job, deadline_s, source=peer))
        if prefill is not None:
            peer = None if decode is None else decode.peer
            prefill.reported[spec.request_id, spec.attempt] = 0
            fetch = None if place.fetch is None else self._share(spec, place.fetch, prefill.peer)
            placed = messages.Placed(_ROUTER, job, deadline_s, target=peer, target_address="simulated", fetch=fetch)
            prefill.offer(placed)

    def _move(self, move: Move) -> None:
        source, target, spec = self._workers[move.source.link], self._workers[move.target.link], move.spec
        if not source.reports:  # the router does not know the tokens of its answers so far
            refused = (Failure.OVERLOADED, "moves are left out")
            failed = router_events.AttemptFailed(target.link, spec.request_id, spec.attempt, *refused)
            self._clock.soon(self._post, failed)
            return
        present = HandoffKey(spec.request_id, move.attempt)
        target.reported[spec.request_id, spec.attempt] = num_known = len(spec.token_ids) - spec.num_prompt_tokens
        deadline_s = self._clock.now_s() + spec.remaining_s
        job = job_of(spec)
        target.offer(messages.Placed(_ROUTER, job, deadline_s, source.peer, extra_tokens=move.extra_tokens))
        (index,), num_tokens = spec.indices, spec.num_prompt_tokens + num_known
        asked = (present, index, spec.attempt, target.peer, "simulated", num_tokens)
        source.offer(messages.MoveAsked(_ROUTER, *asked))

    def _share(self, spec: SequenceSpec, fetch: Fetch, target: Peer) -> messages.Fetch:
        """Ask the holder of a prompt's leading pages to send them; return what their receiver is told."""
        holder, deadline_s = self._workers[fetch.holder.link], self._clock.now_s() + fetch.within_s
        key, token_ids = HandoffKey(spec.request_id, spec.attempt), spec.token_ids[: fetch.num_tokens]
        asked = (key, token_ids, spec.cache_salt, target, "simulated", deadline_s)
        holder.offer(messages.ShareAsked(*asked))
        return messages.Fetch(holder.peer, fetch.num_tokens, deadline_s)

    # ---- workers

    def _attach(self, name: str, role: Role) -> SimWorker:
        self._num_attached += 1
        link = LinkId(self._num_attached)
        worker, registration = self._builder.build(self._clock, name, link, role, self._lengths.__getitem__)
        worker.perform = self._perform
        if self._moves:
            worker.step_singly()
        self._workers[link] = worker
        self._wires.add(worker)
        self._post(registration)
        return worker

    def _measure_pair(self, source: SimWorker, target: SimWorker) -> None:
        """Report how fast a link is, as workers do when they meet."""
        bytes_per_s = self._profile.link.bytes_per_s
        self._post(PairMeasured(source.link, target.peer.worker_id, bytes_per_s, "simulated", is_slow=False))

    def _take_role(self, worker: SimWorker, taken: messages.RoleTaken) -> None:
        """Register a worker again, as it does once it has another role."""
        before = self.router.workers.known(worker.link).registration
        self._post(replace(before, role=taken.role, role_epoch=taken.epoch, max_num_batched_tokens=taken.step_tokens))

    def _perform(self, worker: SimWorker, commands: Sequence[object], steps: Steps | None) -> None:
        deltas: list[Delta] = []
        for command in commands:
            match command:
                case messages.Tokens():
                    deltas.append(delta(worker.reported, command))
                case messages.Progress() if command.stage not in LEDGER_ONLY:
                    self._post(stage(worker.link, command, self._clock.now_s()))
                case messages.Progress():
                    pass
                case messages.RoleTaken():
                    self._take_role(worker, command)
                case messages.Failed(_, key, code, reason):
                    self._post(router_events.AttemptFailed(worker.link, key.request_id, key.attempt, code, reason))
                case _:
                    self._wires.carry(worker, command)
        changed = kv_changed(worker.link, worker.scheduler.cache)
        if changed is not None:
            self._post(changed)
        self._report_step(worker, deltas, steps)

    def _report_step(self, worker: SimWorker, deltas: Sequence[Delta], steps: Steps | None) -> None:
        """Report tokens, and the steps that they came of; without steps they came with a move."""
        if steps is not None:
            self._post(StepReported(worker.link, deltas, steps.each, steps.each_s))
            if worker.reports and self._clock.now_s() - worker.reported_s >= LOAD_EVERY_S:
                self._report_load(worker)
        elif any(each.token_ids for each in deltas):
            self._post(StepReported(worker.link, deltas))

    def _report_load(self, worker: SimWorker) -> None:
        """Report how full a worker is, and what its answers have gained."""
        worker.reported_s = self._clock.now_s()
        gained = news(worker.reported, worker.scheduler.running)
        if gained:
            self._post(StepReported(worker.link, gained))
        self._post(load_report(worker.link, worker.core.load()))


def simulate(
    profile: Profile, shape: Shape, policy: str, workload: Workload, objective: Objective, ways: Ways = USUAL
) -> Run:
    """Serve a workload on a cluster of this shape; return what its clients saw."""
    return SimCluster(profile, shape, policy, workload, objective, ways).run()
