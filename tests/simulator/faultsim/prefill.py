"""A prefill worker's process: the real core, its hand-off streams and its mover."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from faultsim.mover import Host, Mover
from faultsim.network import End, Network
from faultsim.process import Process
from faultsim.worker import MAX_QUARANTINED_SHARE, Size, WorkerProcess
from faultsim.world import ViolationError
from pdserve.ids import Incarnation
from pdserve.kvtransfer import receiver, sender
from pdserve.kvtransfer.session import Grant, HandoffKey, Peer
from pdserve.prefill_worker.core import PrefillCore
from pdserve.prefill_worker.events import (
    CancelCopies,
    Command,
    Connect,
    Copy,
    Event,
    Forget,
    FromPeer,
    PeerAttached,
    PeerLost,
    ToPeer,
)
from pdserve.proto.v1 import link_pb2 as link
from pdserve.worker.messages import Failed, Placed, Progress, Tokens

HELLO_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Hello:
    """Opens a hand-off stream; the other end answers with its own name."""

    peer: Peer
    wanted: Incarnation
    age_s: float = 0.0


@dataclass(slots=True, eq=False)
class Dialled:
    """A stream to a decode worker, or a try at one."""

    peer: Peer
    end: End | None = None
    stands: bool = False
    queued: list[object] = field(default_factory=list)  # said before it stands
    over: bool = False


@dataclass(frozen=True, slots=True)
class Alive:
    """Said to every decode worker, as to every router."""


FindPeer = Callable[[Peer], Host | None]


class PrefillProcess(WorkerProcess[Event, Command]):
    """Dials decode workers and writes into their pages."""

    core: PrefillCore

    def __init__(
        self,
        network: Network,
        name: str,
        incarnation: Incarnation,
        size: Size,
        find_decode: Callable[[str], Process | None],
        find: FindPeer,
    ) -> None:
        super().__init__(network, name, incarnation, link.ROLE_PREFILL, size)
        self.core = PrefillCore(
            self.scheduler, size.vocab_size, self.runner.page_bytes, size.max_tasks, MAX_QUARANTINED_SHARE
        )
        self.mover = Mover(self, self.memory, network, find, self.offer)
        self._find_decode = find_decode
        self._streams: dict[Peer, Dialled] = {}
        self.placed: deque[tuple[Peer, HandoffKey]] = deque(maxlen=8)  # the latest hand-offs
        self._grants: dict[HandoffKey, Grant] = {}  # as last told

    def check(self) -> None:
        super().check()
        self.mover.check()

    def handle(self, event: Event) -> None:
        if isinstance(event, Placed) and event.peer is not None:
            self.placed.append((event.peer, HandoffKey(event.job.request_id, event.job.attempt)))
        super().handle(event)

    def beat(self) -> None:
        super().beat()
        for dialled in self._streams.values():
            if dialled.stands and dialled.end is not None:
                dialled.end.send(Alive())

    def perform(self, command: Command) -> None:
        match command:
            case Connect(peer, _):
                self._connect(peer)
            case Copy(key=key):
                self.mover.copy(command, self._grants[key])
            case CancelCopies(peer, key):
                self.mover.cancel(peer, key)
            case ToPeer(peer, key, message):
                self._tell(peer, key, message)
            case Forget(peer):
                self.mover.forget(peer)
                dialled = self._streams.get(peer)
                if dialled is not None and dialled.end is not None:
                    dialled.end.close("its process ended")
                    self._over(dialled, "its process ended")
            case Tokens() | Progress() | Failed():
                raise AssertionError("reports go to routers")

    def _connect(self, peer: Peer) -> None:
        if peer not in self._streams:
            dialled = self._streams[peer] = Dialled(peer)
            self.network.dial(
                self,
                lambda: self._find_decode(peer.worker_id),
                lambda end: self._opened(dialled, end),
                lambda reason: self._over(dialled, reason),
            )

    def _opened(self, dialled: Dialled, end: End) -> None:
        if dialled.over:
            end.close("not wanted any more")
            return
        dialled.end = end
        end.receive = lambda message: self._receive(dialled, message)
        end.lost = lambda reason: self._over(dialled, reason)
        end.send(Hello(self.peer, dialled.peer.incarnation, self.world.now - self.started_s))
        self.world.after(HELLO_TIMEOUT_S, self, self._check_answer, dialled)

    def _check_answer(self, dialled: Dialled) -> None:
        if not dialled.stands and not dialled.over and dialled.end is not None:
            dialled.end.close("no answer in time")
            self._over(dialled, "no answer in time")

    def _receive(self, dialled: Dialled, message: object) -> None:
        if isinstance(message, Hello) and dialled.end is not None:
            dialled.stands = True
            self.offer(PeerAttached(dialled.peer))
            for waiting in dialled.queued:
                dialled.end.send(waiting)
        elif isinstance(message, tuple):
            key, event = message
            if isinstance(event, sender.Granted):
                self._grants[key] = event.grant
            self.offer(FromPeer(dialled.peer, key, event))

    def _over(self, dialled: Dialled, reason: str) -> None:
        if not dialled.over:
            dialled.over = True
            del self._streams[dialled.peer]
            self.offer(PeerLost(dialled.peer, reason))

    def _tell(self, peer: Peer, key: HandoffKey, message: sender.SendCommit | sender.SendQuiesced) -> None:
        dialled = self._streams.get(peer)
        if dialled is None:
            return
        words: object
        match message:
            case sender.SendCommit(commit):
                words = (key, receiver.Committed(commit))
                self.mover.site("committed", self)
            case sender.SendQuiesced():
                words = (key, receiver.SenderQuiesced())
                self._grants.pop(key, None)
        if dialled.stands and dialled.end is not None:
            dialled.end.send(words)
        else:
            dialled.queued.append(words)

    def check_idle(self) -> None:
        """Raise ViolationError unless nothing is left of any request."""
        self.check()
        pool = self.scheduler.cache.pool
        if not self.core.idle or not self.mover.idle or pool.num_free != pool.num_pages:
            raise ViolationError("I2", f"{self.name} is not idle: {self.core.load()}")
