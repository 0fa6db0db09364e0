"""A worker's streams to its routers, dialled and kept as `worker.link` does."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from faultsim.network import End, Network
from faultsim.process import Process
from pdserve.proto.v1 import link_pb2 as link
from pdserve.worker.messages import RouterLost, RouterRef

WELCOME_TIMEOUT_S = 5.0
MIN_BACKOFF_S, MAX_BACKOFF_S = 0.1, 2.0

Find = Callable[[], Process | None]


@dataclass(frozen=True, slots=True)
class Dismissed:
    """Stands for the status with which a router ends the stream of a process that must end."""


@dataclass(slots=True, eq=False)
class Dialled:
    """One try at a router."""

    find: Find
    router: RouterRef
    backoff_s: float
    end: End | None = None
    over: bool = False


class SimLinks:
    """What `worker.reporting.Reporter` needs of a worker's links, over simulated streams."""

    def __init__(
        self,
        owner: Process,
        network: Network,
        register: link.Register,
        hear: Callable[[RouterRef, link.AttachResponse], object],
        lose: Callable[[RouterLost], object],
        on_dismissed: Callable[[], object],
    ) -> None:
        self._owner = owner
        self._network = network
        self._register = register
        self._hear = hear
        self._lose = lose
        self._on_dismissed = on_dismissed
        self._streams: dict[RouterRef, End] = {}
        self._last_ref = 0
        self._closing = False

    @property
    def attached(self) -> tuple[RouterRef, ...]:
        return tuple(self._streams)

    def send(self, router: RouterRef, message: link.AttachRequest) -> None:
        end = self._streams.get(router)
        if end is not None:
            end.send(message)

    def broadcast(self, message: link.AttachRequest) -> None:
        for end in list(self._streams.values()):
            end.send(message)

    def update(self) -> None:
        """Say anew who this worker is."""
        self.broadcast(self._registration())

    def finish(self) -> None:
        """End every stream after what was said."""
        self._closing = True
        for end in list(self._streams.values()):
            end.close("the worker has drained")

    def dial(self, find: Find, backoff_s: float = MIN_BACKOFF_S) -> None:
        """Attach to a router, now and whenever the stream is lost."""
        if self._closing:
            return
        self._last_ref += 1
        dialled = Dialled(find, RouterRef(self._last_ref), backoff_s)
        self._network.dial(
            self._owner, find, lambda end: self._opened(dialled, end), lambda reason: self._over(dialled)
        )

    def _opened(self, dialled: Dialled, end: End) -> None:
        dialled.end = end
        end.receive = partial(self._receive, dialled)
        end.lost = lambda reason: self._over(dialled)
        end.send(self._registration())
        self._owner.world.after(WELCOME_TIMEOUT_S, self._owner, self._check_welcome, dialled)

    def _check_welcome(self, dialled: Dialled) -> None:
        if not dialled.over and dialled.router not in self._streams and dialled.end is not None:
            dialled.end.close("no welcome")
            self._over(dialled)

    def _receive(self, dialled: Dialled, message: object) -> None:
        if isinstance(message, Dismissed):
            self._on_dismissed()
        if not isinstance(message, link.AttachResponse) or dialled.end is None:
            return
        if message.HasField("welcome"):
            dialled.backoff_s = MIN_BACKOFF_S / 2
            self._streams[dialled.router] = dialled.end
            self.send(dialled.router, self._registration())
        else:
            self._hear(dialled.router, message)

    def _registration(self) -> link.AttachRequest:
        self._register.age_ms = round(1000 * (self._owner.world.now - self._owner.started_s))
        return link.AttachRequest(register=self._register)

    def _over(self, dialled: Dialled) -> None:
        if dialled.over:
            return
        dialled.over = True
        self._streams.pop(dialled.router, None)
        self._lose(RouterLost(dialled.router))
        world, backoff_s = self._owner.world, dialled.backoff_s
        delay_s = backoff_s * (0.5 + world.rng.random() / 2)
        world.after(delay_s, self._owner, self.dial, dialled.find, min(2 * backoff_s, MAX_BACKOFF_S))
