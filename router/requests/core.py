"""The router's decisions: what to do about each thing that happens. Does no I/O.

Invariant: each request that arrives ends exactly once, its tokens are delivered once and in order, and after its
end nothing of it is left in any table.
"""

from collections.abc import Iterator
from math import inf

from pdserve.base.errors import InvariantError
from pdserve.base.ids import RequestId
from pdserve.perfmodel.curve import IDLE
from pdserve.protocol.refusal import CLIENT_GONE, Cause, Refused, reads_too_slowly
from pdserve.router.config import Limits
from pdserve.router.placement.moving import Moving
from pdserve.router.placement.placements import Placements
from pdserve.router.placement.predict import Predictor
from pdserve.router.placement.routing import Policy, Workers
from pdserve.router.placement.view import WorkerView
from pdserve.router.requests import events
from pdserve.router.requests.admission import SHUTTING_DOWN, Admission
from pdserve.router.requests.commands import Command, Warn
from pdserve.router.requests.delivery import Delivery
from pdserve.router.requests.membership import Membership
from pdserve.router.requests.recent import Kind
from pdserve.router.requests.request import Request
from pdserve.router.requests.retry import Retry


class RouterCore:
    def __init__(self, model: str, limits: Limits, policy: Policy, predictor: Predictor | None = None) -> None:
        self.workers = Workers(model, converts_kv=limits.converts_kv)
        self.predictor = predictor or Predictor()
        self.placements = Placements(self.workers, self.predictor, policy, limits)
        self._delivery = Delivery(self.placements)
        self._admission = Admission(self.placements, limits)
        self.moving = Moving(self.placements)
        self._retry = Retry(self.placements, limits)
        self.membership = Membership(self.placements, self._retry, self._admission, limits)

    @property
    def num_active(self) -> int:
        """With preparations of next turns."""
        return len(self.placements.requests)

    @property
    def num_held(self) -> int:
        return len(self._admission.held)

    def requests(self) -> Iterator[Request]:
        """Yield the requests that have not ended: those that are placed, oldest first, then those that are held."""
        yield from self.placements.requests.values()
        yield from self._admission.held

    def find(self, request_id: RequestId) -> Request | None:
        return self.placements.requests.get(request_id) or self._admission.held.find(request_id)

    @property
    def is_ready(self) -> bool:
        """Whether some pair of workers could serve a request now."""
        return not self._admission.is_closed and self.membership.has_pair

    def next_wakeup_s(self) -> float | None:
        """Return when a Tick is due, if nothing else happens before."""
        due_s = min(self.placements.next_alarm_s, self.membership.silence_due_s, self._admission.due_s)
        return None if due_s == inf else due_s

    def handle(self, event: events.Event, now_s: float) -> list[Command]:
        """Advance by one event; return what to do now, in order."""
        self.placements.recent.now_s = now_s
        if isinstance(event, events.WorkerEvent):
            self._handle_worker(event, now_s)
        else:
            self._handle_other(event, now_s)
        if self.placements.shadows.sources:
            self.moving.look_again(now_s)
        self._admission.place_more(now_s)
        return self.placements.take_commands()

    def _handle_worker(self, event: events.WorkerEvent, now_s: float) -> None:  # noqa: C901 - one match
        if isinstance(event, events.Registration):
            self.membership.register(event, now_s)
            return
        worker = self.workers.get(event.link)
        if worker is None:
            return  # late news of a link that was dropped
        if not isinstance(event, events.LinkLost):  # the end of a link is no sign of life
            worker.last_heard_s = now_s
        match event:
            case events.StepReported():
                self._take_step(worker, event, now_s)
            case events.StageReached():
                self._delivery.stage(worker, event, now_s)
            case events.LoadReported():
                self._take_load(worker, event, now_s)
            case events.PairMeasured():
                self._take_pair(worker, event)
            case events.KvChanged():
                self.predictor.prefixes.apply(event)
            case events.AttemptFailed():
                self._retry.take_failure(worker, event, now_s)
            case events.LinkLost():
                self.membership.lose(worker, event.reason, now_s)

    def _handle_other(  # noqa: C901 - one match
        self, event: events.ClientEvent | events.OperatorEvent, now_s: float
    ) -> None:
        match event:
            case events.RequestArrived():
                begun = self._admission.arrive(event, now_s)
                if begun is not None:
                    self._retry.go_on(begun, now_s)
            case events.ClientGone(request_id):
                self._end(request_id, CLIENT_GONE)
            case events.ClientTooSlow(request_id, limit_bytes):
                self._end(request_id, reads_too_slowly(limit_bytes))
            case events.StopStringFound(request_id, index):
                self._stop(request_id, index, now_s)
            case events.Tick():
                self._tick(now_s)
            case events.ProcessEnded():
                self.membership.note_ended(event, now_s)
            case events.DrainAsked():
                self._drain(event, now_s)
            case events.RoleAsked():
                self._ask_for_role(event)
            case events.MovesAsked():
                self.moving.ask(event, now_s)
            case events.ShutdownAsked():
                self._admission.is_closed = True
            case events.ShutdownDue():
                self._end_all()

    # ---- workers

    def _take_step(self, worker: WorkerView, event: events.StepReported, now_s: float) -> None:
        faults = self._delivery.prompts(worker, event.prompts, now_s) if event.prompts else []
        for request, placement, text in [*faults, *self._delivery.step(worker, event.deltas, now_s)]:
            self._retry.take_fault(worker, request, placement, text, now_s)
        if event.step != IDLE:  # else its tokens came without a step, and the one that runs goes on
            worker.stepped(event.step, now_s - event.age_s)
            worker.step_s = event.elapsed_s
            self.predictor.observe_step(worker, event.step, event.elapsed_s, now_s)

    def _take_load(self, worker: WorkerView, event: events.LoadReported, now_s: float) -> None:
        was_draining, role = worker.draining, worker.role
        self.predictor.note_others(worker, worker.report(event.load), now_s)
        has_changed = self.workers.take_role(worker, event.load.role, event.load.role_epoch)
        if has_changed:
            self.placements.recent.note(Kind.ROLE, worker.name, f"from {role} to {worker.role}")
        self._note_drain(worker, was_draining)
        if has_changed or worker.draining is not was_draining:
            self.membership.note_change(now_s)
        self.moving.look(worker, now_s)

    def _take_pair(self, worker: WorkerView, pair: events.PairMeasured) -> None:
        self.predictor.links.begin((worker.name, pair.decode), pair.bytes_per_s)
        if pair.is_slow:
            rate = f"{pair.bytes_per_s / 1e6:.0f} MB/s, carrier: {pair.carrier}"
            self.placements.emit(Warn(f"SLOW: pages of {worker.name} reach {pair.decode} at {rate}"))

    def _drain(self, asked: events.DrainAsked, now_s: float) -> None:
        worker = self.workers.get(asked.link)
        if worker is None:
            return
        was_draining = worker.draining
        worker.is_drain_asked = not asked.cancel
        worker.draining |= not asked.cancel  # until it reports that it takes work again
        self._note_drain(worker, was_draining)
        self.placements.emit(asked)
        self.membership.note_change(now_s)
        self.moving.look(worker, now_s)

    def _note_drain(self, worker: WorkerView, was_draining: bool) -> None:
        if worker.draining is not was_draining:
            text = "drains: takes no more requests" if worker.draining else "takes requests again"
            self.placements.recent.note(Kind.DRAIN, worker.name, text)

    def _ask_for_role(self, asked: events.RoleAsked) -> None:
        worker = self.workers.get(asked.link)
        if worker is not None:
            worker.asked = asked.role, asked.epoch
            self.placements.emit(asked)

    # ---- ends

    def _end(self, request_id: RequestId, why: Refused) -> None:
        """End a request, whether it is placed or waits; one that has ended already is late news."""
        request = self.placements.requests.get(request_id)
        if request is not None:
            self.placements.end_request(request, why)
        else:
            self._admission.end_held(request_id, why)

    def _end_all(self) -> None:
        self._admission.end_all()
        for request in tuple(self.placements.requests.values()):
            self.placements.end_request(request, SHUTTING_DOWN)

    def _stop(self, request_id: RequestId, index: int, now_s: float) -> None:
        """End a continuation whose text has reached a stop string."""
        request = self.placements.requests.get(request_id)
        if request is not None and not request.sequences[index].ended:
            self.placements.end_sequence(request, index, stop_workers=True)
            if not request.running:
                self.placements.finish(request, now_s)

    def _miss_deadline(self, request: Request) -> None:
        text = f"the deadline passed after {request.num_delivered} tokens"
        if request.waits_for is not None:
            text = f"the deadline passed before the request was placed: {request.waits_for.message}"
        self._end(request.request_id, Refused(Cause.DEADLINE, text))

    def _tick(self, now_s: float) -> None:
        self.membership.drop_silent(now_s)
        for request in self.placements.take_due(now_s):
            if request.has_ended:
                continue
            if now_s >= request.deadline_s:
                self._miss_deadline(request)
            elif request.is_admitted:
                self._retry.retry(request, now_s)
            else:
                self._admission.look_at(request, now_s)

    def check_idle(self) -> None:
        """Raise InvariantError unless nothing is left of any request."""
        if self.placements.requests or self.num_held:
            raise InvariantError(f"{self.num_active} requests are active and {self.num_held} held")
        self.placements.shadows.check_idle()
        for worker in self.workers:
            worker.check_idle()
