"""Which processes are attached to this one, and which of a worker's processes have ended. Decides; does no I/O.

Invariant: a process is reported as gone only if a later process of the same worker attaches, the earlier one has no
stream, and nothing was received from it since the later one started. It is not attached again.
"""

from math import inf
from typing import NewType

from pdserve.base.errors import PeerFault, ProtocolError
from pdserve.base.ids import Peer
from pdserve.base.processes import KnownProcesses
from pdserve.base.values import value
from pdserve.kvtransfer.doors import PeerGone, SenderAttached, SenderLost
from pdserve.kvtransfer.session import Hello, Introduction, check_hello

MAX_ENDED = 4096  # processes that are remembered, and refused

StreamId = NewType("StreamId", int)


@value
class Close:
    """End a stream; its process has been reported as lost where that has to be."""

    stream: StreamId
    reason: str


Command = Close | SenderAttached | SenderLost | PeerGone


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

    def attach(self, stream: StreamId, hello: Hello, now_s: float) -> list[Command]:
        """Attach a stream in place of an earlier one of the same process, or of an earlier process.

        ProtocolError if its process is not let in.
        """
        peer = hello.me.peer
        check_hello(hello, self._me, self._mover)
        if reason := self._processes.refusal(peer):
            raise ProtocolError(f"incarnation: {reason}", PeerFault.INCARNATION)
        commands: list[Command] = []
        for attached in [each for each in self._streams if each.worker_id == peer.worker_id]:
            self._processes.note_heard(attached, inf)  # it is there
            commands += self._detach(attached, "it attached anew" if attached == peer else "it has a successor")
        predecessor = self._processes.note_attached(peer, now_s - hello.age_s, now_s)
        if predecessor is not None:
            self._processes.note_ended(predecessor)
            commands.append(PeerGone(Peer(*predecessor)))
        self._streams[peer], self._peers[stream] = stream, peer
        return [*commands, SenderAttached(peer)]

    def receive(self, stream: StreamId, now_s: float) -> Peer | None:
        """Return from which process a message has arrived, which shows that the process lives; None: not attached."""
        peer = self._peers.get(stream)
        if peer is not None:
            self._processes.note_heard(peer, now_s)
        return peer

    def end(self, stream: StreamId, reason: str) -> list[Command]:
        """Note that a stream has ended."""
        peer = self._peers.pop(stream, None)
        if peer is None:
            return []
        del self._streams[peer]
        return [SenderLost(peer, reason)]

    def forget(self, peer: Peer) -> list[Command]:
        """Note that a process is known to have ended, and end its stream."""
        self._processes.note_ended(peer)
        return self._detach(peer, "its process has ended")

    def _detach(self, peer: Peer, reason: str) -> list[Command]:
        stream = self._streams.get(peer)
        return [] if stream is None else [Close(stream, reason), *self.end(stream, reason)]
