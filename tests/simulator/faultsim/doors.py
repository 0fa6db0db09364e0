"""The shells of a worker's two doors in virtual time, with what the simulator strikes at and checks there."""

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Concatenate, ParamSpec

from faultsim.handoffs import ReceiverStreams, SenderStreams
from faultsim.mover import Host, Mover
from faultsim.other_ranks import OtherRanks
from faultsim.ranks import digest
from faultsim.world import Process, ViolationError
from pdserve.base.ids import AttemptKey, Peer
from pdserve.decode_worker.incoming import Incoming
from pdserve.decode_worker.receiver import State
from pdserve.kvtransfer.doors import (
    CancelCopies,
    CheckDigests,
    Command,
    Connect,
    DigestsChecked,
    Forget,
    IncomingEvent,
    OutgoingEvent,
    Probe,
    ReceiverMessage,
    SenderAlive,
    SenderAttached,
    SenderLost,
    SenderMessage,
    StartCopy,
    ToReceiver,
    ToSender,
)
from pdserve.kvtransfer.session import Commit, Grant, Quiesced, Taken, Withdrawn
from pdserve.worker.messages import Placed

if TYPE_CHECKING:
    from faultsim.worker import WorkerProcess

DIGEST_S = 0.0003
LAPSE_S = 1.1  # from a lease's end until it is noticed: a tick, and one that was late

P = ParamSpec("P")
FindPeer = Callable[[Peer], Host | None]


class Doors:
    """One worker's streams to and from others, its copies and its checks of digests."""

    def __init__(self, owner: "WorkerProcess", find_peer: FindPeer) -> None:
        self._owner = owner
        self._world = owner.world
        world = owner, owner.memory, owner.network, find_peer, owner.offer
        self.movers = [Mover(*world, part) for part in range(len(owner.memory.shares))]
        self.other_ranks = OtherRanks(owner, [mover.process for mover in self.movers[1:]])
        for mover in self.movers:
            mover.site = self._site
            mover.faults = owner.copy_faults
        self._receivers = SenderStreams(owner, owner.introduction, owner.network, self._from_receiver)
        self._senders = ReceiverStreams(owner, owner.introduction, self._from_sender)
        self.accept = self._senders.accept
        self.placed: deque[tuple[Peer, AttemptKey]] = deque(maxlen=8)  # the latest hand-offs that leave
        self.granted: deque[tuple[Peer, AttemptKey, Grant, int]] = deque(maxlen=4)  # the latest, with tokens of each
        self._grants: dict[AttemptKey, Grant] = {}  # as last received
        self._num_tokens: dict[AttemptKey, int] = {}
        self._sent: set[tuple[AttemptKey, type]] = set()
        self._received_s: dict[Peer, float] = {}  # when something was received last from each attached sender

    def note(self, placed: Placed) -> None:
        """Remember what a placement says of a hand-off."""
        key = AttemptKey(placed.job.request_id, placed.job.attempt)
        if placed.target is not None:
            self.placed.append((placed.target, key))
        if placed.source is not None:
            self._num_tokens[key] = len(placed.job.token_ids)
        elif placed.fetch is not None:
            self._num_tokens[key] = placed.fetch.num_tokens

    def beat(self) -> None:
        self._receivers.beat()

    def perform(self, command: Command) -> None:
        match command:
            case Connect(peer, address):
                self._receivers.connect(peer, address)
            case StartCopy(key=key):
                self._each(Mover.copy, command, self._grants[key])
            case CancelCopies(peer, key):
                self._each(Mover.cancel, peer, key)
            case ToReceiver():
                self._to_receiver(command)
            case ToSender(peer, key, message):
                self._to_sender(peer, key, message)
            case CheckDigests():
                delay_s = DIGEST_S * (0.5 + self._world.rng.random())
                self._world.after(delay_s, self._owner, self._check_digests, command)
            case Forget(peer):
                self._each(Mover.forget, peer)
                self._receivers.forget(peer)
                self._senders.forget(peer)
            case Probe():
                pass  # no copy waits for it

    def check(self) -> None:
        """Raise ViolationError where a copy has lost its pages, or a grant outlives its lease."""
        for mover in self.movers:
            mover.check()
        owner = self._owner
        if owner.frozen:
            return  # it hears nobody, and cannot end a lease before it thaws
        for peer, received_s in self._received_s.items():
            silent_s = self._world.now - max(received_s, owner.thawed_s)
            if silent_s > owner.lease_s + LAPSE_S and _has_granted(owner.core.incoming, peer):
                text = f"{owner.name} keeps grants open to {peer}, silent for {silent_s:.2f} s"
                raise ViolationError("I4", text)

    def _each(self, act: Callable[Concatenate[Mover, P], None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Order something of the mover of each rank."""
        for mover in self.movers:
            mover.order(act, *args, **kwargs)

    def _site(self, name: str, process: Process) -> None:
        self._owner.site(name, process)

    def _from_receiver(self, report: OutgoingEvent) -> None:
        if isinstance(report, ReceiverMessage) and isinstance(report.event, Grant):
            self._grants[report.key] = report.event
        self._owner.offer(report)

    def _from_sender(self, report: IncomingEvent) -> None:
        match report:
            case SenderAttached(peer) | SenderAlive(peer) | SenderMessage(peer):
                self._received_s[peer] = self._world.now
            case SenderLost(peer):
                self._received_s.pop(peer, None)
            case _:
                pass
        self._owner.offer(report)

    def _to_receiver(self, command: ToReceiver) -> None:
        key, message = command.key, command.message
        self._receivers.send(command.peer, key, message)
        if isinstance(message, Commit):
            self._owner.witness.handed_over(key, [tail.index for tail in message.capsule.tails])
            self._site("committed", self._owner)
        elif isinstance(message, Quiesced):
            self._grants.pop(key, None)

    def _to_sender(self, peer: Peer, key: AttemptKey, message: Grant | Taken | Withdrawn) -> None:
        if not isinstance(message, Withdrawn):
            if (key, type(message)) in self._sent:
                raise ViolationError("I1", f"{self._owner.name} said {message} twice", key.request_id)
            self._sent.add((key, type(message)))
        if isinstance(message, Grant):
            self.granted.append((peer, key, message, self._num_tokens[key]))
            self._site("granted", self._owner)
        self._senders.send(peer, key, message)

    def _check_digests(self, command: CheckDigests) -> None:
        memory = self._owner.memory
        found = (digest(memory.content(page), memory.shares) for page in command.pages)
        pairs = enumerate(zip(found, command.digests, strict=True))
        mismatch = next((place for place, (mine, theirs) in pairs if mine != theirs), None)
        self._owner.offer(DigestsChecked(command.key, mismatch))


def _has_granted(incoming: Incoming, peer: Peer) -> bool:
    """Return whether a sender may write into pages here."""
    arrivals = [arrival for arrival in incoming._arrivals.values() if arrival.expected.peer == peer]
    return any(arrival.receiver.state is State.GRANTED for arrival in arrivals)
