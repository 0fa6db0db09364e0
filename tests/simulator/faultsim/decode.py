"""A decode worker's process: the real core, and the hand-off streams it is dialled on."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from faultsim.mover import digest
from faultsim.network import End, Network
from faultsim.prefill import Alive, Hello
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
from pdserve.ids import Incarnation, WorkerId
from pdserve.kvtransfer import receiver, sender
from pdserve.kvtransfer.session import DigestPolicy, Grant, HandoffKey, Peer
from pdserve.proto.v1 import link_pb2 as link
from pdserve.worker.messages import Failed, PeerGone, Placed, Progress, Tokens

DIGEST_S = 0.0003
LAPSE_S = 1.1  # from a lease's end until it is noticed: a tick, and one that was late


@dataclass(slots=True, eq=False)
class Inbound:
    """A stream from a prefill worker."""

    end: End
    peer: Peer | None = None
    heard_s: float = 0.0  # when its last word arrived


class DecodeProcess(WorkerProcess[Event, Command]):
    """Grants pages and decodes what lands in them."""

    core: DecodeCore

    def __init__(self, network: Network, name: str, incarnation: Incarnation, size: Size, lease_s: float) -> None:
        super().__init__(network, name, incarnation, link.ROLE_DECODE, size)
        key = self.world.rng.randbytes(16)
        self.lease_s = lease_s
        rules = Rules(size.max_tasks, DigestPolicy.ALWAYS, MAX_QUARANTINED_SHARE, lease_s)
        self.core = DecodeCore(self.scheduler, size.vocab_size, key, rules)
        self._streams: dict[Peer, Inbound] = {}
        self._latest: dict[WorkerId, Inbound] = {}  # of each worker that has attached, unless its end is known
        self._gone: set[Peer] = set()
        self.site: Callable[[str, Process], object] = lambda site, process: None
        self.granted: deque[tuple[Peer, HandoffKey, Grant, int]] = deque(maxlen=4)  # the latest, with tokens of each
        self._num_tokens: dict[HandoffKey, int] = {}
        self._told: dict[tuple[HandoffKey, type], int] = {}

    def accept(self, end: End) -> None:
        inbound = Inbound(end)
        end.receive = lambda message: self._receive(inbound, message)
        end.lost = lambda reason: self._over(inbound, reason)

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
                self._forget(peer)
            case Tokens() | Progress() | Failed():
                raise AssertionError("reports go to routers")

    def check(self) -> None:
        super().check()
        if self.frozen:
            return  # it hears nobody, and cannot end a lease before it thaws
        for peer, inbound in self._streams.items():
            silent_s = self.world.now - max(inbound.heard_s, self.thawed_s)
            if silent_s > self.lease_s + LAPSE_S and self.core.num_granted_to(peer):
                text = f"{self.name} keeps grants open to {peer}, silent for {silent_s:.2f} s"
                raise ViolationError("I4", text)

    def _tell(self, peer: Peer, key: HandoffKey, message: receiver.Command) -> None:
        inbound = self._streams.get(peer)
        if not isinstance(message, receiver.SendWithdrawn):
            self._check_once(key, message)
        if inbound is None:
            return
        match message:
            case receiver.SendGrant(grant):
                self.granted.append((peer, key, grant, self._num_tokens[key]))
                self.site("granted", self)
                inbound.end.send((key, sender.Granted(grant)))
            case receiver.SendTaken():
                inbound.end.send((key, sender.Taken()))
            case receiver.SendWithdrawn(reason):
                inbound.end.send((key, sender.Withdrawn(reason)))
            case _:
                raise AssertionError(f"{message} is not for a peer")

    def _check_once(self, key: HandoffKey, message: receiver.Command) -> None:
        if (key, type(message)) in self._told:
            raise ViolationError("I1", f"{self.name} said {message} twice", key.request_id)
        self._told[key, type(message)] = 1

    def _check_digests(self, command: CheckDigests) -> None:
        found = (digest(self.memory.content(page)) for page in command.pages)
        pairs = enumerate(zip(found, command.digests, strict=True))
        mismatch = next((place for place, (mine, theirs) in pairs if mine != theirs), None)
        self.offer(DigestsChecked(command.key, mismatch))

    def _receive(self, inbound: Inbound, message: object) -> None:
        inbound.heard_s = self.world.now
        if isinstance(message, Hello):
            self._greet(inbound, message)
        elif isinstance(message, Alive) and inbound.peer is not None:
            self.offer(PeerAlive(inbound.peer))
        elif isinstance(message, tuple) and inbound.peer is not None:
            key, event = message
            self.offer(FromPeer(inbound.peer, key, event))

    def _greet(self, inbound: Inbound, hello: Hello) -> None:
        """Put a stream in the place of an earlier one, or of an earlier process, of the same worker."""
        peer = hello.peer
        seen = self._latest.get(peer.worker_id, inbound)
        is_earlier = seen.peer is not None and seen.peer.incarnation > peer.incarnation
        if hello.wanted != self.incarnation or peer in self._gone or is_earlier:
            inbound.end.close("another incarnation was meant, or dials")
            return
        before = self._streams.get(peer)
        self._streams[peer] = inbound
        inbound.peer = peer
        inbound.end.send(Hello(self.peer, peer.incarnation))
        self._latest[peer.worker_id] = inbound
        if seen.peer is not None and seen.peer != peer:
            self._succeed(seen.peer, was_heard=seen.heard_s > self.world.now - hello.age_s)
        if before is not None:
            before.end.close("it attached anew")
            self.offer(PeerLost(peer, "it attached anew"))
        self.offer(PeerAttached(peer))

    def _succeed(self, older: Peer, *, was_heard: bool) -> None:
        """Let an earlier process attach no more. Attached, or heard since the later started, it lives."""
        lives = was_heard or older in self._streams
        self._forget(older)
        if not lives:
            self.offer(PeerGone(older))

    def _forget(self, peer: Peer) -> None:
        """End a peer's stream and attach it no more."""
        self._gone.add(peer)
        seen = self._latest.get(peer.worker_id)
        if seen is not None and seen.peer == peer:
            del self._latest[peer.worker_id]
        inbound = self._streams.get(peer)
        if inbound is not None:
            inbound.end.close("its process has ended")
            self._over(inbound, "its process has ended")

    def _over(self, inbound: Inbound, reason: str) -> None:
        peer = inbound.peer
        if peer is not None and self._streams.get(peer) is inbound:
            del self._streams[peer]
            self.offer(PeerLost(peer, reason))

    def check_idle(self) -> None:
        """Raise ViolationError unless nothing is left of any request."""
        self.check()
        pool = self.scheduler.cache.pool
        if not self.core.idle or pool.num_free != pool.num_pages:
            raise ViolationError("I2", f"{self.name} is not idle: {self.core.load()}")
