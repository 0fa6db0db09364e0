"""A prefill worker's process: the real core, its hand-off streams and its mover."""

from collections import deque
from collections.abc import Callable

from faultsim.handoffs import SenderStreams
from faultsim.mover import Host, Mover
from faultsim.network import Network
from faultsim.worker import MAX_QUARANTINED_SHARE, Size, WorkerProcess
from faultsim.world import ViolationError
from pdserve.ids import Incarnation
from pdserve.kvtransfer import peers, sender
from pdserve.kvtransfer.peers import FromReceivers, PeerMessage
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
        find: FindPeer,
    ) -> None:
        super().__init__(network, name, incarnation, link.ROLE_PREFILL, size)
        self.core = PrefillCore(
            self.scheduler, size.vocab_size, self.runner.page_bytes, size.max_tasks, MAX_QUARANTINED_SHARE
        )
        self.mover = Mover(self, self.memory, network, find, self.offer)
        self.streams = SenderStreams(self, self.introduction, network, self._receive)
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
        self.streams.beat()

    def perform(self, command: Command) -> None:
        match command:
            case Connect(peer, address):
                self.streams.connect(peer, address)
            case Copy(key=key):
                self.mover.copy(command, self._grants[key])
            case CancelCopies(peer, key):
                self.mover.cancel(peer, key)
            case ToPeer(peer, key, message):
                self._tell(peer, key, message)
            case Forget(peer):
                self.mover.forget(peer)
                self.streams.forget(peer)
            case Tokens() | Progress() | Failed():
                raise AssertionError("reports go to routers")

    def _receive(self, report: FromReceivers) -> None:
        match report:
            case peers.PeerAttached(peer):
                self.offer(PeerAttached(peer))
            case PeerMessage(peer, key, event):
                if isinstance(event, sender.Granted):
                    self._grants[key] = event.grant
                self.offer(FromPeer(peer, key, event))
            case peers.PeerLost(peer, reason):
                self.offer(PeerLost(peer, reason))

    def _tell(self, peer: Peer, key: HandoffKey, message: sender.SendCommit | sender.SendQuiesced) -> None:
        self.streams.send(peer, key, message)
        if isinstance(message, sender.SendCommit):
            self.mover.site("committed", self)
        else:
            self._grants.pop(key, None)

    def check_idle(self) -> None:
        """Raise ViolationError unless nothing is left of any request."""
        self.check()
        pool = self.scheduler.cache.pool
        if not self.core.idle or not self.mover.idle or pool.num_free != pool.num_pages:
            raise ViolationError("I2", f"{self.name} is not idle: {self.core.load()}")
