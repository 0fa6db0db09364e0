"""A worker's streams to its routers: when each is dialled, given up and dialled again. Decides; does no I/O.

Invariant: each address that a name leads to has just one stream or one redial under way, until its router dismisses
this process or the worker leaves. An address that no name leads to any more keeps the stream that it has, and gets no
other one. A stream that is not welcomed within WELCOME_TIMEOUT_S is closed; each one ends with exactly one RouterLost.
"""

from collections.abc import Callable
from dataclasses import dataclass

from pdserve.values import value
from pdserve.worker.messages import RouterLost, RouterRef

WELCOME_TIMEOUT_S = 5.0
MIN_BACKOFF_S, MAX_BACKOFF_S = 0.1, 0.5  # a router that starts has its workers within half a second


@value
class Found:
    """A name of routers leads to these addresses now, host:port."""

    name: str
    addresses: frozenset[str]


@value
class Due:
    """The time of a Redial has come."""

    address: str


@value
class Welcomed:
    """A router lets this worker attach."""

    router: RouterRef


@value
class TimedOut:
    router: RouterRef


@value
class Ended:
    """A stream has ended, or could not be had."""

    router: RouterRef
    reason: str
    is_dismissal: bool = False  # the router says that this process must end


@value
class Left:
    """This worker has drained; queued messages are still sent."""


@value
class Dial:
    """Open a stream and register on it; TimedOut is due after `timeout_s`."""

    router: RouterRef
    address: str
    timeout_s: float


@value
class Redial:
    """Let Due follow after a while, and look names up meanwhile: a lost router may have a successor elsewhere."""

    address: str
    delay_s: float


@value
class Register:
    """Say again who this worker is: the registration may have changed since the router was dialled."""

    router: RouterRef


@value
class Finish:
    """End a stream once all that was sent on it has been written."""

    router: RouterRef


@value
class Close:
    router: RouterRef


@value
class EndProcess:
    """A router refuses this process, which has a successor."""

    reason: str


Event = Found | Due | Welcomed | TimedOut | Ended | Left
Command = Dial | Redial | Register | Finish | Close | RouterLost | EndProcess


@dataclass(slots=True)
class _Stream:
    address: str
    is_attached: bool = False


class Attaching:
    """Dials each router, and again whenever its stream is lost, more and more slowly until it answers."""

    def __init__(self, jitter: Callable[[], float]) -> None:
        """`jitter` draws the share of a backoff that is waited, so that workers do not dial in step."""
        self._jitter = jitter
        self._streams: dict[RouterRef, _Stream] = {}
        self._found: dict[str, frozenset[str]] = {}  # by name
        self._backoff_s: dict[str, float] = {}  # of each address that has a stream or a redial under way
        self._last_ref = 0
        self._is_leaving = False

    @property
    def attached(self) -> tuple[RouterRef, ...]:
        return tuple([router for router, stream in self._streams.items() if stream.is_attached])

    def handle(self, event: Event) -> tuple[Command, ...]:
        match event:
            case Found(name, addresses):
                self._found[name] = addresses
                added = sorted(addresses - self._backoff_s.keys())
                return tuple([command for address in added for command in self._dial(address)])
            case Due(address):
                return self._dial(address)
            case Left():
                return self._leave()
            case _:
                stream = self._streams.get(event.router)  # None: late news of a stream that was closed
                return () if stream is None else self._go_on(stream, event)

    def _go_on(self, stream: _Stream, event: Welcomed | TimedOut | Ended) -> tuple[Command, ...]:
        match event:
            case Welcomed(router):
                stream.is_attached = True
                self._backoff_s[stream.address] = MIN_BACKOFF_S
                return (Register(router),)
            case TimedOut(router):
                return () if stream.is_attached else self._lose(router, stream)
            case Ended(router, reason, is_dismissal):
                if is_dismissal:
                    del self._streams[router]
                    return Close(router), EndProcess(f"router {stream.address} refuses this process: {reason}")
                return self._lose(router, stream)

    def _dial(self, address: str) -> tuple[Command, ...]:
        if self._is_leaving or not any(address in addresses for addresses in self._found.values()):
            self._backoff_s.pop(address, None)
            return ()
        self._last_ref += 1
        router = RouterRef(self._last_ref)
        self._streams[router] = _Stream(address)
        self._backoff_s.setdefault(address, MIN_BACKOFF_S)
        return (Dial(router, address, WELCOME_TIMEOUT_S),)

    def _lose(self, router: RouterRef, stream: _Stream) -> tuple[Command, ...]:
        del self._streams[router]
        lost = Close(router), RouterLost(router)
        if self._is_leaving:
            return lost
        backoff_s = self._backoff_s[stream.address]
        self._backoff_s[stream.address] = min(2 * backoff_s, MAX_BACKOFF_S)
        return (*lost, Redial(stream.address, backoff_s * self._jitter()))

    def _leave(self) -> tuple[Command, ...]:
        self._is_leaving = True
        commands: list[Command] = []
        for router, stream in list(self._streams.items()):
            if stream.is_attached:
                commands.append(Finish(router))
            else:
                commands += self._lose(router, stream)
        return tuple(commands)
