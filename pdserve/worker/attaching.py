"""A worker's streams to its routers: when each is dialled, given up and dialled again. Decides; does no I/O.

Invariant: each address that a name leads to has just one stream or one redial under way, until its router dismisses
this process or the worker leaves. An address that no name leads to any more keeps the stream that it has, and gets no
other one. A stream that is not welcomed within WELCOME_TIMEOUT_S is closed; each one ends with exactly one RouterLost.
"""

from collections.abc import Callable
from dataclasses import dataclass

from pdserve.base.values import value
from pdserve.worker.messages import RouterLost, RouterRef

WELCOME_TIMEOUT_S = 5.0
MIN_BACKOFF_S, MAX_BACKOFF_S = 0.1, 0.5  # a router that starts has its workers within half a second


@value
class Dial:
    """Open a stream and register on it; `time_out` is due after WELCOME_TIMEOUT_S."""

    router: RouterRef
    address: str


@value
class Redial:
    """Call `dial` after a while, and look names up meanwhile: a lost router may have a successor elsewhere."""

    address: str
    delay_s: float


@value
class Finish:
    """End a stream once all that was sent on it has been written."""

    router: RouterRef


@value
class Close:
    router: RouterRef


Command = Dial | Redial | Finish | Close | RouterLost


@dataclass(slots=True)
class _Stream:
    address: str
    is_attached: bool = False


class Attaching:
    """Dials each router, and again whenever its stream is lost, more and more slowly until it answers."""

    def __init__(self, jitter: Callable[[], float]) -> None:
        """`jitter` draws the share of a backoff that is waited, so that workers do not dial in step."""
        self._jitter = jitter
        self._streams: dict[RouterRef, _Stream] = {}  # late news of a stream that was closed finds none here
        self._found: dict[str, frozenset[str]] = {}  # by name
        self._backoff_s: dict[str, float] = {}  # of each address that has a stream or a redial under way
        self._last_ref = 0
        self._is_leaving = False

    @property
    def attached(self) -> tuple[RouterRef, ...]:
        return tuple([router for router, stream in self._streams.items() if stream.is_attached])

    def note_addresses(self, name: str, addresses: frozenset[str]) -> list[Command]:
        """Note which addresses, host:port, a name of routers leads to now."""
        self._found[name] = addresses
        return [command for address in sorted(addresses - self._backoff_s.keys()) for command in self.dial(address)]

    def dial(self, address: str) -> list[Command]:
        """Dial a router for the first time, or when its Redial is due; nothing if it is not wanted any more."""
        if self._is_leaving or not any(address in addresses for addresses in self._found.values()):
            self._backoff_s.pop(address, None)
            return []
        self._last_ref += 1
        router = RouterRef(self._last_ref)
        self._streams[router] = _Stream(address)
        self._backoff_s.setdefault(address, MIN_BACKOFF_S)
        return [Dial(router, address)]

    def attach(self, router: RouterRef) -> bool:
        """Note that a router lets this worker attach; return whether its stream is still wanted."""
        stream = self._streams.get(router)
        if stream is None:
            return False
        stream.is_attached = True
        self._backoff_s[stream.address] = MIN_BACKOFF_S
        return True

    def time_out(self, router: RouterRef) -> list[Command]:
        """End a stream whose time to be welcomed has passed, unless it was welcomed."""
        return [] if router in self.attached else self.end(router)

    def end(self, router: RouterRef) -> list[Command]:
        """End a stream, or note that it has ended or could not be had; its router is dialled again."""
        stream = self._streams.pop(router, None)
        if stream is None:
            return []
        lost: list[Command] = [Close(router), RouterLost(router)]
        if self._is_leaving:
            return lost
        backoff_s = self._backoff_s[stream.address]
        self._backoff_s[stream.address] = min(2 * backoff_s, MAX_BACKOFF_S)
        return [*lost, Redial(stream.address, backoff_s * self._jitter())]

    def dismiss(self, router: RouterRef) -> list[Command]:
        """End the stream of a router that refuses this process: it has a successor. The process is to end."""
        return [] if self._streams.pop(router, None) is None else [Close(router)]

    def leave(self) -> list[Command]:
        """Dial no more: this worker has drained. What is queued for attached routers is still sent."""
        self._is_leaving = True
        commands: list[Command] = []
        for router, stream in list(self._streams.items()):
            commands += [Finish(router)] if stream.is_attached else self.end(router)
        return commands
