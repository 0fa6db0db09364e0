"""A router's process: the real core, the workers' streams, and the clients that wait."""

from collections import deque
from functools import partial
from math import inf
from typing import Protocol

from faultsim.links import Dismissed
from faultsim.network import End, Network
from faultsim.process import Process
from faultsim.worker import MODEL
from faultsim.world import ViolationError
from pdserve.errors import InvariantError, Refusal
from pdserve.ids import Incarnation, RequestId
from pdserve.proto.v1 import link_pb2 as link
from pdserve.router import wire
from pdserve.router.config import Limits
from pdserve.router.core import RouterCore
from pdserve.router.events import (
    CancelAttempt,
    ClientEvent,
    Command,
    Deliver,
    DropLink,
    Event,
    Finished,
    LinkId,
    LinkLost,
    Place,
    Refused,
    RequestArrived,
    SendDrain,
    SendProcessGone,
    StepReported,
    Tick,
    Warn,
)
from pdserve.router.events import End as EndOfRequest


class Client(Protocol):
    """Who waits for an answer."""

    def deliver(self, command: Deliver) -> ClientEvent | None: ...
    def end(self, outcome: Finished | Refused) -> None: ...
    def lose_router(self) -> None: ...


class RouterProcess(Process):
    """One incarnation of a router: `router.shell` in virtual time."""

    def __init__(self, network: Network, name: str, incarnation: Incarnation, limits: Limits) -> None:
        super().__init__(network.world, name, incarnation)
        self.core = RouterCore(MODEL, limits)
        self.limits = limits
        self.streams: dict[LinkId, End] = {}
        self.clients: dict[RequestId, Client] = {}
        self.recent: deque[tuple[LinkId, link.AttachRequest]] = deque(maxlen=8)  # steps reported last
        self._events: deque[Event] = deque()
        self._is_busy = False
        self._alarm_s: float | None = None
        self._last_link = 0

    def accept(self, end: End) -> None:
        self._last_link += 1
        link_id = LinkId(self._last_link)
        self.streams[link_id] = end
        end.receive, end.lost = partial(self._receive, link_id), partial(self._lost, link_id)
        end.send(link.AttachResponse(welcome=link.Welcome(router_id=self.name, incarnation=self.incarnation)))

    def admit(self, event: RequestArrived, client: Client) -> None:
        self.clients[event.request_id] = client
        self.post(event)

    def post(self, *events: Event) -> None:
        """Handle events now, or right after the one that is being handled."""
        self._events.extend(events)
        if self._is_busy:
            return
        self._is_busy = True
        while self._events:
            self._handle(self._events.popleft())
        self._is_busy = False
        self._set_alarm()

    def link_of(self, worker_id: str, incarnation: Incarnation) -> LinkId | None:
        worker = self.core.workers.named(worker_id)
        if worker is None or worker.registration.incarnation != incarnation:
            return None
        return worker.link

    def check_idle(self) -> None:
        """Raise ViolationError unless nothing is left of any request."""
        try:
            self.core.check_idle()
        except InvariantError as error:
            raise ViolationError("I4", f"{self.name}: {error}") from error
        if self.clients:
            raise ViolationError("I4", f"{self.name} forgot {list(self.clients)}")

    def check(self) -> None:
        """Raise ViolationError unless the core keeps within its limits."""
        max_num_active = self.limits.max_num_requests or inf
        if self.core.num_active > max_num_active or self.core.num_held > self.limits.max_num_held:
            raise ViolationError("I6", f"{self.name}: {self.core.num_active} active, {self.core.num_held} held")

    def _receive(self, link_id: LinkId, message: object) -> None:
        if link_id in self.streams and isinstance(message, link.AttachRequest):
            events = wire.worker_events(link_id, message)
            if isinstance(events[-1], StepReported):
                self.recent.append((link_id, message))
            self.post(*events)

    def take(self, link_id: LinkId, message: link.AttachRequest) -> None:
        self.post(*wire.worker_events(link_id, message))

    def _lost(self, link_id: LinkId, reason: str) -> None:
        if self.streams.pop(link_id, None) is not None:
            self.post(LinkLost(link_id, reason))

    def _handle(self, event: Event) -> None:
        self.world.note(self.name, event)
        try:
            commands = self.core.handle(event, self.world.now)
        except Exception as error:
            raise ViolationError("I7", f"{self.name} broke on {event}: {error!r}") from error
        if commands:
            self.world.note(self.name, commands)
            for command in commands:
                self._perform(command)

    def _perform(self, command: Command) -> None:
        match command:
            case Deliver():
                client = self.clients.get(command.request_id)
                news = None if client is None else client.deliver(command)
                if news is not None:
                    self._events.append(news)
            case EndOfRequest(request_id, outcome):
                client = self.clients.pop(request_id, None)
                if client is None:
                    raise ViolationError("I4", f"{self.name} ended it twice", request_id)
                client.end(outcome)
            case Place():
                wire.send_placement(command, self._send)
            case DropLink(link_id, reason, refusal):
                self._drop(link_id, reason, refusal)
            case CancelAttempt(link_id) | SendDrain(link_id) | SendProcessGone(link_id):
                self._send(link_id, wire.order(command))
            case Warn():
                pass

    def _drop(self, link_id: LinkId, reason: str, refusal: Refusal | None) -> None:
        end = self.streams.pop(link_id, None)
        if end is not None:
            if refusal is Refusal.INCARNATION:
                end.send(Dismissed())
            end.close(reason)

    def _send(self, link_id: LinkId, message: link.AttachResponse) -> None:
        end = self.streams.get(link_id)
        if end is not None:
            end.send(message)

    def _set_alarm(self) -> None:
        due_s = self.core.next_wakeup_s()
        if due_s is not None and (self._alarm_s is None or due_s < self._alarm_s):
            self._alarm_s = due_s
            self.world.at(max(due_s, self.world.now), self, self._ring, due_s)

    def _ring(self, due_s: float) -> None:
        if self._alarm_s == due_s:
            self._alarm_s = None
            self.post(Tick())
