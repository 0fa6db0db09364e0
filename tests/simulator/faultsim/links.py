"""A worker's streams to its routers in virtual time: the machine of `worker.link`, over simulated streams."""

from collections.abc import Callable, Iterable

from faultsim.network import End, Network
from faultsim.world import Process
from pdserve.proto.v1 import link_pb2 as link
from pdserve.worker import attaching, wire
from pdserve.worker.attaching import WELCOME_TIMEOUT_S, Attaching, Dial
from pdserve.worker.messages import Event, RouterLost, RouterRef


class Dismissed:
    """Stands for the status with which a router ends the stream of a process that must end."""


class SimLinks:
    """`worker.link.Links` in virtual time."""

    def __init__(
        self,
        owner: Process,
        network: Network,
        register: link.Register,
        report: Callable[[Event], object],
        on_dismissed: Callable[[], object],
    ) -> None:
        self._owner = owner
        self._network = network
        self._register = register
        self._report = report
        self._on_dismissed = on_dismissed
        self._attaching = Attaching(jitter=lambda: 0.5 + owner.world.rng.random() / 2)
        self._ends: dict[RouterRef, End | None] = {}  # None: being dialled
        self._welcomes: dict[RouterRef, link.Welcome] = {}

    @property
    def attached(self) -> tuple[RouterRef, ...]:
        return self._attaching.attached

    def send(self, router: RouterRef, message: link.AttachRequest) -> None:
        end = self._ends.get(router)
        if end is not None:
            end.send(message.SerializeToString())

    def wants_each_step(self, router: RouterRef) -> bool:
        return router in self._welcomes and self._welcomes[router].wants_each_step

    def broadcast(self, message: link.AttachRequest) -> None:
        for router in self.attached:
            self.send(router, message)

    def update(self) -> None:
        self.broadcast(self._registration())

    def take_role(self, role: "link.Role.ValueType", epoch: int, step_tokens: int) -> None:
        self._register.role, self._register.role_epoch = role, epoch
        self._register.max_num_batched_tokens = step_tokens
        self.update()

    def dial(self, address: str) -> None:
        """Attach to a router, now and whenever the stream is lost."""
        self._perform(self._attaching.note_addresses(address, frozenset((address,))))

    def finish(self) -> None:
        """End every stream after what was sent."""
        self._perform(self._attaching.leave())

    def _redial(self, address: str) -> None:
        self._perform(self._attaching.dial(address))

    def _time_out(self, router: RouterRef) -> None:
        self._perform(self._attaching.time_out(router))

    def _end(self, router: RouterRef) -> None:
        self._perform(self._attaching.end(router))

    def _perform(self, commands: Iterable[attaching.Command]) -> None:
        for command in commands:
            match command:
                case Dial():
                    self._dial(command)
                case attaching.Redial(address, delay_s):
                    self._owner.world.after(delay_s, self._owner, self._redial, address)
                case attaching.Finish(router):
                    self._end(router)
                case attaching.Close(router):
                    self._welcomes.pop(router, None)
                    end = self._ends.pop(router)
                    if end is not None:
                        end.close("closed by the worker")
                case RouterLost():
                    self._report(command)

    def _dial(self, dial: Dial) -> None:
        router, world = dial.router, self._owner.world
        self._ends[router] = None
        world.after(WELCOME_TIMEOUT_S, self._owner, self._time_out, router)
        self._network.dial(
            self._owner,
            dial.address,
            lambda end: self._opened(router, end),
            lambda _: self._end(router),
        )

    def _opened(self, router: RouterRef, end: End) -> None:
        if router not in self._ends:
            end.close("not wanted any more")
            return
        self._ends[router] = end
        end.receive = lambda message: self._receive(router, message)
        end.lost = lambda _: self._end(router)
        self.send(router, self._registration())

    def _receive(self, router: RouterRef, content: object) -> None:
        if not isinstance(content, bytes):
            self._perform(self._attaching.dismiss(router))
            self._on_dismissed()
            return
        message = link.AttachResponse.FromString(content)
        if message.HasField("welcome"):
            self._welcomes[router] = message.welcome
            if self._attaching.attach(router):
                self.send(router, self._registration())
        else:
            for each in (message, *message.more):
                event = wire.event(each, router, self._owner.world.now)
                if event is not None:
                    self._report(event)

    def _registration(self) -> link.AttachRequest:
        self._register.age_ms = round(1000 * (self._owner.world.now - self._owner.started_s))
        return link.AttachRequest(register=self._register)
