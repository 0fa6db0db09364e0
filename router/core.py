"""The router's decisions: what to do about each thing that happens. Does no I/O.

Invariant: each request that arrives ends exactly once, its tokens are delivered once and in order, and after its
end nothing of it is left in any table.
"""

from math import inf

from pdserve.errors import InvariantError, Status
from pdserve.ids import RequestId
from pdserve.router.admission import Admission
from pdserve.router.alarms import Alarms, DeadlineDue, LookDue, RetryDue
from pdserve.router.delivery import Delivery
from pdserve.router.events import (
    AttemptFailed,
    ClientEvent,
    ClientGone,
    ClientTooSlow,
    Command,
    DrainAsked,
    Event,
    KvChanged,
    Limits,
    LinkId,
    LinkLost,
    LoadReported,
    OperatorEvent,
    PairMeasured,
    ProcessEnded,
    Refused,
    RequestArrived,
    SendDrain,
    ShutdownAsked,
    ShutdownDue,
    StageReached,
    StepReported,
    StopStringFound,
    Tick,
    Warn,
    WorkerEvent,
    WorkerRegistered,
)
from pdserve.router.forecast import Forecast
from pdserve.router.grace import PoolGrace
from pdserve.router.membership import Membership
from pdserve.router.placement import Decision, Policy, decide, least_loaded
from pdserve.router.placements import Placements
from pdserve.router.recovery import Recovery
from pdserve.router.request import Request
from pdserve.router.view import Workers, WorkerView

_CANCELLED = Refused(Status.CANCELLED, "the client has gone")


class RouterCore:
    """All state of a router that decisions depend on."""

    def __init__(
        self, model: str, limits: Limits, policy: Policy = least_loaded, forecast: Forecast | None = None
    ) -> None:
        """`forecast` is what the policy asks, if it asks one."""
        self.workers = Workers(model)
        self.forecast = forecast or Forecast()
        self.placements = Placements(self.workers, self.forecast)
        self._limits = limits
        self._policy = policy
        self._delivery = Delivery(self.placements, limits.max_deltas_ahead)
        self._alarms = Alarms()
        self._grace = PoolGrace(limits.pool_grace_s)
        self._recovery = Recovery(self.placements, self._alarms, limits, self._grace, self._decide)
        self._membership = Membership(self.placements, self._recovery, self._grace, limits)
        self._admission = Admission(self.placements, self._alarms, limits, self._grace, self._decide)
        self._num_arrived = 0
        self._closing = False
        self._now_s = 0.0

    @property
    def num_active(self) -> int:
        return len(self.placements.requests)

    @property
    def num_held(self) -> int:
        return self._admission.num_held

    @property
    def is_ready(self) -> bool:
        """Whether some pair of workers could serve a request now."""
        return not self._closing and self._membership.has_pair

    def unroutable(self) -> dict[LinkId, str]:
        """Return why nothing is placed on each worker; empty when things are."""
        return self._membership.unroutable()

    def next_wakeup_s(self) -> float | None:
        """Return when a Tick is due, if nothing else happens before."""
        due_s = min(self._alarms.next_s(), self._membership.silence_due_s, self._admission.due_s)
        return None if due_s == inf else due_s

    def handle(self, event: Event, now_s: float) -> list[Command]:
        """Advance by one event; return what to do now, in order."""
        self._now_s = now_s
        if isinstance(event, WorkerEvent):
            self._hear(event, now_s)
        elif isinstance(event, ClientEvent):
            self._serve(event, now_s)
        else:
            self._operate(event, now_s)
        if self._membership.may_serve_more:
            self._membership.may_serve_more = False
            self._admission.look_soon(now_s)
        self._admission.place_more(now_s)
        return self.placements.take_commands()

    # ---- clients

    def _serve(self, event: ClientEvent, now_s: float) -> None:
        if isinstance(event, RequestArrived):
            self._arrive(event, now_s)
            return
        held = self._admission.remove(event.request_id) if isinstance(event, ClientGone) else None
        if held is not None:
            self.placements.report_end(held.request_id, _CANCELLED)
            return
        request = self.placements.requests.get(event.request_id)
        if request is None:
            return  # late news of a request that has ended
        match event:
            case ClientGone():
                self.placements.end(request, _CANCELLED)
            case ClientTooSlow():
                text = f"client reads too slowly: {event.limit_bytes} bytes of its answer wait"
                self.placements.end(request, Refused(Status.RESOURCE_EXHAUSTED, text))
            case StopStringFound():
                self._stop(request, event.index, now_s)

    def _arrive(self, event: RequestArrived, now_s: float) -> None:
        if self._closing:
            self.placements.report_end(event.request_id, Refused(Status.UNAVAILABLE, "this router is shutting down"))
            return
        request = Request(event, self._num_arrived, now_s)
        self._num_arrived += 1
        self._admission.set_alarm(request.deadline_s, DeadlineDue(request.request_id))
        self._admission.arrive(request, now_s)

    def _decide(self, request: Request, indices: tuple[int, ...]) -> Decision:
        return decide(
            self.workers,
            request.demand(indices, self.placements.num_placed, self._now_s, self._limits.max_hold_s),
            self._policy,
            local=self._limits.local_prefill,
        )

    def _stop(self, request: Request, index: int, now_s: float) -> None:
        if not request.sequences[index].ended:
            self.placements.end_sequence(request, index, stop_workers=True)
            if not request.running:
                self.placements.finish(request, now_s)

    # ---- workers

    def _hear(self, event: WorkerEvent, now_s: float) -> None:  # noqa: C901 - one match
        if isinstance(event, WorkerRegistered):
            self._membership.register(event, now_s)
            return
        worker = self.workers.get(event.link)
        if worker is None:
            return  # late news of a link that was dropped
        if not isinstance(event, LinkLost):  # the network's word
            worker.last_heard_s = now_s
        match event:
            case StepReported():
                self._take_step(worker, event, now_s)
            case StageReached():
                self._delivery.stage(worker, event, now_s)
            case LoadReported():
                was_draining = worker.draining
                self.forecast.note_others(worker, worker.report(event.load), now_s)
                if worker.draining is not was_draining:
                    self._membership.note_change(now_s)
            case PairMeasured():
                self._note_pair(worker, event)
            case KvChanged():
                self.forecast.prefixes.tell(worker.link, event.events)
            case AttemptFailed():
                self._recovery.take_failure(worker, event, now_s)
            case LinkLost():
                self._membership.lose(worker, event.reason, now_s)

    def _note_pair(self, worker: WorkerView, pair: PairMeasured) -> None:
        self.forecast.links.begin((worker.name, pair.decode), pair.bytes_per_s)
        if pair.is_slow:
            rate = f"{pair.bytes_per_s / 1e6:.0f} MB/s, carried by {pair.carrier}"
            self.placements.emit(Warn(f"SLOW: pages of {worker.name} reach {pair.decode} at {rate}"))

    def _take_step(self, worker: WorkerView, event: StepReported, now_s: float) -> None:
        for request, placement, text in self._delivery.step(worker, event.deltas, now_s):
            if request.placements.get(placement.attempt) is placement:
                why = Refused(Status.INTERNAL, f"{worker.name} broke the protocol: {text}")
                self._recovery.fail(request, placement, why, {worker.link}, now_s)
        worker.stepped(event, now_s)
        self.forecast.observe_step(worker, event.step, event.elapsed_s, now_s)

    # ---- operator and time

    def _operate(self, event: OperatorEvent, now_s: float) -> None:
        match event:
            case Tick():
                self._tick(now_s)
            case ProcessEnded():
                self._membership.note_ended(event, now_s)
            case DrainAsked():
                worker = self.workers.get(event.link)
                if worker is not None:
                    worker.draining = True
                    self.placements.emit(SendDrain(worker.link))
                    self._membership.note_change(now_s)
            case ShutdownAsked():
                self._closing = True
            case ShutdownDue():
                self._end_all()

    def _end_all(self) -> None:
        why = Refused(Status.UNAVAILABLE, "this router is shutting down")
        for request in self._admission.drain():
            self.placements.report_end(request.request_id, why)
        for request in tuple(self.placements.requests.values()):
            self.placements.end(request, why)

    def _tick(self, now_s: float) -> None:
        if now_s >= self._membership.silence_due_s:
            self._membership.drop_silent(now_s)
        for alarm in self._alarms.due(now_s):
            match alarm:
                case RetryDue():
                    self._recovery.retry(alarm, now_s)
                case DeadlineDue(request_id):
                    self._miss_deadline(request_id)
                case LookDue(request_id):
                    self._admission.look_at(request_id, now_s)

    def _miss_deadline(self, request_id: RequestId) -> None:
        request, held = self.placements.requests.get(request_id), self._admission.remove(request_id)
        if request is not None:
            num_tokens = request.usage().completion_tokens
            text = f"the deadline passed after {num_tokens} tokens"
            self.placements.end(request, Refused(Status.DEADLINE_EXCEEDED, text))
        elif held is not None:
            text = f"the deadline passed before the request was placed: {held.waits_for}"
            self.placements.report_end(held.request_id, Refused(Status.DEADLINE_EXCEEDED, text))

    def check_idle(self) -> None:
        """Raise InvariantError unless nothing is left of any request."""
        if self.placements.requests or self.num_held:
            raise InvariantError(f"{self.num_active} requests are active and {self.num_held} held")
        for worker in self.workers:
            worker.check_idle()
