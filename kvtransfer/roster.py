"""Which processes are attached to this one, and which of a worker's processes have ended. Decides; does no I/O.

Invariant: a process is reported as gone only if a later process of the same worker attaches, the earlier one has no
stream, and nothing was received from it since the later one started. It is not attached again.
"""

from math import inf
from typing import NewType

from pdserve.errors import ProtocolError, Refusal
from pdserve.kvtransfer.doors import Forget, PeerGone, SenderAlive, SenderAttached, SenderLost, SenderMessage
from pdserve.kvtransfer.greeting import Hello, Introduction, check_hello
from pdserve.kvtransfer.session import FromSender, HandoffKey, Peer
from pdserve.processes import KnownProcesses
from pdserve.values import value

MAX_ENDED = 4096  # processes that are remembered, and refused

StreamId = NewType("StreamId", int)


@value
class Greeted:
    """A stream was opened, and this is its first message."""

    stream: StreamId
    hello: Hello


@value
class Alive:
    """A heartbeat arrived on a stream: the engine loop of its process goes on."""

    stream: StreamId


@value
class Received:
    """A message about one hand-off arrived on a stream."""

    stream: StreamId
    key: HandoffKey
    message: FromSender


@value
class Malformed:
    """A message that is refused arrived on a stream. It shows that the process lives."""

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
Report = SenderAttached | SenderAlive | SenderMessage | SenderLost | PeerGone
Command = Welcome | Refuse | Close | Report


class Roster:
    """One stream to each process, the latest; one process of each worker, the latest."""

    def __init__(self, me: Introduction, mover: str) -> None:
        self._me = me
        self._mover = mover
        self._streams: dict[Peer, StreamId] = {}
        self._peers: dict[StreamId, Peer] = {}  # the same, the other way round
        self._processes = KnownProcesses(MAX_ENDED)

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
                return () if peer is None else (SenderMessage(peer, key, message),)
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
                self._processes.note_ended(peer)
                return self._detach(peer, "its process has ended")

    def _greet(self, stream: StreamId, hello: Hello, now_s: float) -> tuple[Command, ...]:
        """Attach a stream in place of an earlier one of the same process, or of an earlier process."""
        peer = hello.me.peer
        try:
            check_hello(hello, self._me, self._mover)
            if reason := self._processes.refusal(peer):
                raise ProtocolError(f"incarnation: {reason}", Refusal.INCARNATION)
        except ProtocolError as error:
            return (Refuse(stream, error),)
        commands: list[Command] = []
        for attached in [each for each in self._streams if each.worker_id == peer.worker_id]:
            self._processes.note_heard(attached, inf)  # it is there
            commands += self._detach(attached, "it attached anew" if attached == peer else "it has a successor")
        predecessor = self._processes.note_attached(peer, now_s - hello.age_s, now_s)
        if predecessor is not None:
            self._processes.note_ended(predecessor)
            commands.append(PeerGone(Peer(*predecessor)))
        self._streams[peer], self._peers[stream] = stream, peer
        return (*commands, Welcome(stream), SenderAttached(peer))

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
            self._processes.note_heard(peer, now_s)
        return peer
