"""A decode worker's process: the real core, and the hand-off streams it is dialled on."""

from collections import deque
from collections.abc import Callable

from faultsim.handoffs import ReceiverStreams
from faultsim.mover import digest
from faultsim.network import End, Network
from faultsim.process import Process
from faultsim.worker import MAX_QUARANTINED_SHARE, Size, WorkerProcess
from faultsim.world import ViolationError
from pdserve.decode_worker.core import DecodeCore
from pdserve.decode_worker.events import (
    CheckDigests,
    Command,
    DigestsChecked,
    Event,
    Forget,
    FromPeer,
    PeerAlive,
    PeerAttached,
    PeerLost,
    ToPeer,
)
from pdserve.decode_worker.rules import Rules
from pdserve.ids import Incarnation
from pdserve.kvtransfer import peers, receiver
from pdserve.kvtransfer.peers import FromSenders, PeerMessage
from pdserve.kvtransfer.session import DigestPolicy, Grant, HandoffKey, Peer
from pdserve.proto.v1 import link_pb2 as link
from pdserve.worker.messages import Failed, PeerGone, Placed, Progress, Tokens

DIGEST_S = 0.0003
LAPSE_S = 1.1  # from a lease's end until it is noticed: a tick, and one that was late


class DecodeProcess(WorkerProcess[Event, Command]):
    """Grants pages and decodes what lands in them."""

    core: DecodeCore

    def __init__(self, network: Network, name: str, incarnation: Incarnation, size: Size, lease_s: float) -> None:
        super().__init__(network, name, incarnation, link.ROLE_DECODE, size)
        key = self.world.rng.randbytes(16)
        self.lease_s = lease_s
        rules = Rules(size.max_tasks, DigestPolicy.ALWAYS, MAX_QUARANTINED_SHARE, lease_s)
        self.core = DecodeCore(self.scheduler, size.vocab_size, key, rules)
        self.streams = ReceiverStreams(self, self.introduction, self._receive)
        self._received_s: dict[Peer, float] = {}  # when something was received last from each attached process
        self.site: Callable[[str, Process], object] = lambda site, process: None
        self.granted: deque[tuple[Peer, HandoffKey, Grant, int]] = deque(maxlen=4)  # the latest, with tokens of each
        self._num_tokens: dict[HandoffKey, int] = {}
        self._told: dict[tuple[HandoffKey, type], int] = {}

    def accept(self, end: End) -> None:
        self.streams.accept(end)

    def handle(self, event: Event) -> None:
        if isinstance(event, Placed):
            self._num_tokens[HandoffKey(event.job.request_id, event.job.attempt)] = len(event.job.token_ids)
        super().handle(event)

    def perform(self, command: Command) -> None:
        match command:
            case ToPeer(peer, key, message):
                self._tell(peer, key, message)
            case CheckDigests():
                self.world.after(DIGEST_S * (0.5 + self.world.rng.random()), self, self._check_digests, command)
            case Forget(peer):
                self.streams.forget(peer)
            case Tokens() | Progress() | Failed():
                raise AssertionError("reports go to routers")

    def check(self) -> None:
        super().check()
        if self.frozen:
            return  # it hears nobody, and cannot end a lease before it thaws
        for peer, received_s in self._received_s.items():
            silent_s = self.world.now - max(received_s, self.thawed_s)
            if silent_s > self.lease_s + LAPSE_S and self.core.num_granted_to(peer):
                text = f"{self.name} keeps grants open to {peer}, silent for {silent_s:.2f} s"
                raise ViolationError("I4", text)

    def _tell(self, peer: Peer, key: HandoffKey, message: receiver.Command) -> None:
        match message:
            case receiver.SendGrant(grant):
                self._check_once(key, message)
                self.granted.append((peer, key, grant, self._num_tokens[key]))
                self.site("granted", self)
            case receiver.SendTaken():
                self._check_once(key, message)
            case receiver.SendWithdrawn():
                pass
            case _:
                raise AssertionError(f"{message} is not for a peer")
        self.streams.send(peer, key, message)

    def _check_once(self, key: HandoffKey, message: receiver.Command) -> None:
        if (key, type(message)) in self._told:
            raise ViolationError("I1", f"{self.name} said {message} twice", key.request_id)
        self._told[key, type(message)] = 1

    def _check_digests(self, command: CheckDigests) -> None:
        found = (digest(self.memory.content(page)) for page in command.pages)
        pairs = enumerate(zip(found, command.digests, strict=True))
        mismatch = next((place for place, (mine, theirs) in pairs if mine != theirs), None)
        self.offer(DigestsChecked(command.key, mismatch))

    def _receive(self, report: FromSenders) -> None:
        now = self.world.now
        match report:
            case peers.PeerAttached(peer):
                self._received_s[peer] = now
                self.offer(PeerAttached(peer))
            case peers.PeerAlive(peer):
                self._received_s[peer] = now
                self.offer(PeerAlive(peer))
            case PeerMessage(peer, key, event):
                self._received_s[peer] = now
                self.offer(FromPeer(peer, key, event))
            case peers.PeerLost(peer, reason):
                self._received_s.pop(peer, None)
                self.offer(PeerLost(peer, reason))
            case peers.PeerGone(peer):
                self.offer(PeerGone(peer))

    def check_idle(self) -> None:
        """Raise ViolationError unless nothing is left of any request."""
        self.check()
        pool = self.scheduler.cache.pool
        if not self.core.idle or pool.num_free != pool.num_pages:
            raise ViolationError("I2", f"{self.name} is not idle: {self.core.load()}")
