"""A router's process: the real core, the workers' streams, and the clients that wait."""

from collections import deque
from collections.abc import Iterable
from functools import partial
from math import inf
from typing import Protocol

from faultsim.links import Dismissed
from faultsim.network import End, Network
from faultsim.registration import MODEL
from faultsim.witness import RouterWitness
from faultsim.world import Process, ViolationError
from pdserve.base.errors import InvariantError
from pdserve.base.ids import Incarnation, Peer
from pdserve.proto.v1 import link_pb2 as link
from pdserve.protocol.refusal import Refused
from pdserve.router import wire
from pdserve.router.config import Limits
from pdserve.router.dispatcher import Command, Dispatcher, Rang, Send, SetAlarm
from pdserve.router.placement.routing import Policy
from pdserve.router.requests.commands import Command as CoreCommand
from pdserve.router.requests.commands import Deliver, DropLink, Finished, Warn
from pdserve.router.requests.core import RouterCore
from pdserve.router.requests.events import ClientEvent, Event, LinkId, LinkLost, RequestArrived, StepReported


class Client(Protocol):
    def deliver(self, command: Deliver) -> ClientEvent | None: ...
    def end(self, outcome: Finished | Refused) -> None: ...
    def lose_router(self) -> None: ...


class RouterProcess(Process):
    """One incarnation of a router: `router.shell.Shell` in virtual time."""

    def __init__(self, network: Network, name: str, incarnation: Incarnation, limits: Limits, policy: Policy) -> None:
        super().__init__(network.world, name, incarnation)
        self.core = RouterCore(MODEL, limits, policy)
        self.witness = RouterWitness(name, self.core.placements.requests)
        self.dispatcher: Dispatcher[Client] = Dispatcher(self)
        self.limits = limits
        self.streams: dict[LinkId, End] = {}
        self.recent: deque[tuple[LinkId, link.AttachRequest]] = deque(maxlen=8)  # steps reported last

    def accept(self, end: End) -> None:
        link_id = self.dispatcher.open_link()
        self.streams[link_id] = end
        end.receive, end.lost = partial(self._receive, link_id), partial(self._lost, link_id)
        each_step = self.incarnation % 4 == 0  # another router gets several short steps together
        welcome = link.Welcome(router_id=self.name, incarnation=self.incarnation, wants_each_step=each_step)
        end.send(link.AttachResponse(welcome=welcome).SerializeToString())

    def admit(self, event: RequestArrived, client: Client) -> None:
        self._carry_out(self.dispatcher.handle_arrival(event, client, self.world.now))

    def post(self, *events: Event | Rang) -> None:
        """Handle events now, or right after the one that is being handled."""
        for event in events:
            self._carry_out(self.dispatcher.handle(event, self.world.now))

    def handle(self, event: Event, now_s: float) -> list[CoreCommand]:
        """Let the core handle an event, as the dispatcher asks for it."""
        self.world.note(self.name, event)
        stale = self.witness.sees(event)
        try:
            commands = self.core.handle(event, now_s)
        except Exception as error:
            raise ViolationError("I7", f"{self.name} broke on {event}: {error!r}") from error
        self.witness.check(stale)
        if commands:
            self.world.note(self.name, commands)
        return commands

    def next_wakeup_s(self) -> float | None:
        return self.core.next_wakeup_s()

    def link_of(self, peer: Peer) -> LinkId | None:
        """Return this router's link to a worker's process, if it has one."""
        worker = self.core.workers.named(peer.worker_id)
        if worker is None or worker.registration.incarnation != peer.incarnation:
            return None
        return worker.link

    def check_idle(self) -> None:
        """Raise ViolationError unless nothing is left of any request."""
        try:
            self.core.check_idle()
        except InvariantError as error:
            raise ViolationError("I4", f"{self.name}: {error}") from error
        if self.dispatcher.answers:
            raise ViolationError("I4", f"{self.name} forgot {list(self.dispatcher.answers)}")

    def check(self) -> None:
        """Raise ViolationError unless the core keeps within its limits."""
        max_num_active = self.limits.max_num_requests or inf
        if self.core.num_active > max_num_active or self.core.num_held > self.limits.max_num_held:
            raise ViolationError("I6", f"{self.name}: {self.core.num_active} active, {self.core.num_held} held")

    def _receive(self, link_id: LinkId, content: object) -> None:
        if link_id in self.streams and isinstance(content, bytes):
            message = link.AttachRequest.FromString(content)
            events = wire.worker_events(link_id, message)
            if any(isinstance(event, StepReported) for event in events):
                self.recent.append((link_id, message))
            self.post(*events)

    def take(self, link_id: LinkId, message: link.AttachRequest) -> None:
        self.post(*wire.worker_events(link_id, message))

    def _lost(self, link_id: LinkId, reason: str) -> None:
        self.streams.pop(link_id, None)
        self.post(LinkLost(link_id, reason))

    def _carry_out(self, commands: Iterable[Command]) -> None:
        try:
            for command in commands:
                self._perform(command)
        except InvariantError as error:
            raise ViolationError("I4", f"{self.name}: {error}") from error

    def _perform(self, command: Command) -> None:
        match command:
            case Send(link_id, message):
                if link_id in self.streams:
                    self.streams[link_id].send(message.SerializeToString())
            case DropLink(link_id, reason):
                end = self.streams.pop(link_id, None)
                if end is None:
                    return
                if command.is_dismissal:
                    end.send(Dismissed())
                end.close(reason)
            case SetAlarm(at_s):
                self.world.at(max(at_s, self.world.now), self, self.post, Rang(at_s))
            case Warn():
                pass
