"""Which processes are attached to this one, and which of a worker's processes have ended. Decides; does no I/O.

Invariant: a process is reported as gone only if a later process of the same worker attaches, the earlier one has no
stream, and nothing was received from it since the later one started. It is not attached again.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import NewType

from pdserve.errors import ProtocolError, Refusal
from pdserve.ids import Incarnation, WorkerId
from pdserve.kvtransfer.doors import Forget, PeerGone, SenderAlive, SenderAttached, SenderLost, SenderSaid
from pdserve.kvtransfer.greeting import Hello, Introduction, check_hello
from pdserve.kvtransfer.session import FromSender, HandoffKey, Peer
from pdserve.values import value

MAX_GONE = 4096  # ended processes that are remembered, and refused
MAX_KNOWN = 4096  # workers whose last process is remembered: those from which something was received last

StreamId = NewType("StreamId", int)


@value
class Greeted:
    """A stream was opened, and this is its first message."""

    stream: StreamId
    hello: Hello


@value
class Alive:
    """The process at the other end of a stream says that its engine loop goes on."""

    stream: StreamId


@value
class Received:
    """The process at the other end of a stream says something about one hand-off."""

    stream: StreamId
    key: HandoffKey
    message: FromSender


@value
class Malformed:
    """The process at the other end of a stream says something that is refused. It lives all the same."""

    stream: StreamId


@value
class Ended:
    stream: StreamId
    reason: str


@value
class Welcome:
    """Answer on a stream that it is attached now."""

    stream: StreamId


@value
class Refuse:
    """End a stream that is not let in."""

    stream: StreamId
    error: ProtocolError


@value
class Close:
    """End a stream; its process has been reported as lost where that has to be."""

    stream: StreamId
    reason: str


Event = Greeted | Alive | Received | Malformed | Ended | Forget
Report = SenderAttached | SenderAlive | SenderSaid | SenderLost | PeerGone
Command = Welcome | Refuse | Close | Report


@dataclass(slots=True)
class _Latest:
    """The last process of a worker that has attached."""

    incarnation: Incarnation
    received_s: float  # when something was received from it last


class Roster:
    """One stream to each process, the latest; one process of each worker, the latest."""

    def __init__(self, me: Introduction, mover: str) -> None:
        self._me = me
        self._mover = mover
        self._streams: dict[Peer, StreamId] = {}
        self._peers: dict[StreamId, Peer] = {}  # the same, the other way round
        # Of each worker that has attached, unless the end of its process is known; the last received from is last.
        self._latest: OrderedDict[WorkerId, _Latest] = OrderedDict()
        self._gone: OrderedDict[Peer, None] = OrderedDict()

    @property
    def attached(self) -> tuple[Peer, ...]:
        return tuple(self._streams)

    def stream_of(self, peer: Peer) -> StreamId | None:
        return self._streams.get(peer)

    def handle(self, event: Event, now_s: float) -> tuple[Command, ...]:
        match event:
            case Greeted(stream, hello):
                return self._greet(stream, hello, now_s)
            case Alive(stream):
                peer = self._receive(stream, now_s)
                return () if peer is None else (SenderAlive(peer),)
            case Received(stream, key, message):
                peer = self._receive(stream, now_s)
                return () if peer is None else (SenderSaid(peer, key, message),)
            case Malformed(stream):
                self._receive(stream, now_s)
                return ()
            case Ended(stream, reason):
                peer = self._peers.pop(stream, None)
                if peer is None:
                    return ()
                del self._streams[peer]
                return (SenderLost(peer, reason),)
            case Forget(peer):
                return self._forget(peer, "its process has ended")

    def _greet(self, stream: StreamId, hello: Hello, now_s: float) -> tuple[Command, ...]:
        """Attach a stream in place of an earlier one of the same process, or of an earlier process."""
        peer = hello.me.peer
        try:
            check_hello(hello, self._me, self._mover)
            self._check_order(peer)
        except ProtocolError as error:
            return (Refuse(stream, error),)
        earlier = self._latest.get(peer.worker_id)
        self._note_received(peer, now_s)
        commands: list[Command] = []
        if earlier is not None and earlier.incarnation != peer.incarnation:
            commands += self._succeed(
                Peer(peer.worker_id, earlier.incarnation), has_spoken=earlier.received_s > now_s - hello.age_s
            )
        commands += self._detach(peer, "it attached anew")
        self._streams[peer], self._peers[stream] = stream, peer
        return (*commands, Welcome(stream), SenderAttached(peer))

    def _check_order(self, peer: Peer) -> None:
        """Raise ProtocolError if a process has ended, or a later one of its worker has attached."""
        if peer in self._gone:
            text = f"incarnation: {peer.incarnation:016x} of {peer.worker_id} has ended, or has a successor"
            raise ProtocolError(text, Refusal.INCARNATION)
        latest = self._latest.get(peer.worker_id)
        if latest is not None and latest.incarnation > peer.incarnation:
            text = f"incarnation: {peer.incarnation:016x} of {peer.worker_id} started before {latest.incarnation:016x}"
            raise ProtocolError(text, Refusal.INCARNATION)

    def _succeed(self, earlier: Peer, *, has_spoken: bool) -> tuple[Command, ...]:
        """Let an earlier process attach no more; it lives if it is attached, or has spoken since the later started."""
        is_attached = earlier in self._streams
        commands = self._forget(earlier, "it has a successor")
        return commands if is_attached or has_spoken else (*commands, PeerGone(earlier))

    def _forget(self, peer: Peer, reason: str) -> tuple[Command, ...]:
        self._gone[peer] = None
        if len(self._gone) > MAX_GONE:
            self._gone.popitem(last=False)
        latest = self._latest.get(peer.worker_id)
        if latest is not None and latest.incarnation == peer.incarnation:
            del self._latest[peer.worker_id]
        return self._detach(peer, reason)

    def _detach(self, peer: Peer, reason: str) -> tuple[Command, ...]:
        stream = self._streams.pop(peer, None)
        if stream is None:
            return ()
        del self._peers[stream]
        return Close(stream, reason), SenderLost(peer, reason)

    def _receive(self, stream: StreamId, now_s: float) -> Peer | None:
        """Return whose stream this is, and note that something was received from that process."""
        peer = self._peers.get(stream)
        if peer is not None:
            latest = self._latest.get(peer.worker_id)
            if latest is None or latest.incarnation == peer.incarnation:
                self._note_received(peer, now_s)
        return peer

    def _note_received(self, peer: Peer, now_s: float) -> None:
        self._latest[peer.worker_id] = _Latest(peer.incarnation, now_s)
        self._latest.move_to_end(peer.worker_id)
        if len(self._latest) > MAX_KNOWN:
            self._latest.popitem(last=False)
