"""The streams of one process to the processes that it dials, from the first need to their end. Decides; does no I/O.

Invariant: each process that is dialled has one stream at most. A stream is closed unless it is answered within
CONNECT_TIMEOUT_S; the time that the mover takes to attach does not count. Each stream ends with exactly one
ReceiverLost.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import NewType

from pdserve.base.ids import AttemptKey, Peer
from pdserve.base.values import value
from pdserve.kvtransfer.doors import ReceiverAttached, ReceiverLost
from pdserve.kvtransfer.session import FromSender, HelloAck, Introduction, check_ack

CONNECT_TIMEOUT_S = 2.0
MAX_QUEUED = 4096  # messages for one stream that is not attached yet

DialId = NewType("DialId", int)


@value
class Dial:
    """Open a stream and send a hello on it; `time_out` is due after CONNECT_TIMEOUT_S."""

    dial: DialId
    peer: Peer
    address: str


@value
class Send:
    dial: DialId
    key: AttemptKey
    message: FromSender


@value
class Finish:
    """End a stream once all that was sent on it has been written."""

    dial: DialId


@value
class Close:
    """End a stream."""

    dial: DialId


Command = Dial | Send | Finish | Close | ReceiverAttached | ReceiverLost


@dataclass(slots=True, eq=False)
class _Stream:
    dial: DialId
    peer: Peer
    address: str
    is_greeted: bool = False
    is_attached: bool = False
    queue: deque[tuple[AttemptKey, FromSender]] = field(default_factory=deque)  # sent once it is attached


class Dialling:
    """Dials on the first need, and again on the next need after a stream was lost."""

    def __init__(self, me: Introduction) -> None:
        self._me = me
        self._streams: dict[Peer, _Stream] = {}
        self._by_dial: dict[DialId, _Stream] = {}  # the same; late news of a stream that was closed finds none here
        self._last_dial = 0
        self._is_leaving = False

    @property
    def attached(self) -> tuple[DialId, ...]:
        return tuple(stream.dial for stream in self._streams.values() if stream.is_attached)

    def connect(self, peer: Peer, address: str) -> list[Command]:
        """Have a stream to a process; nothing if there is one, or this process leaves."""
        if peer in self._streams or self._is_leaving:
            return []
        self._last_dial += 1
        stream = _Stream(DialId(self._last_dial), peer, address)
        self._streams[peer] = self._by_dial[stream.dial] = stream
        return [Dial(stream.dial, peer, address)]

    def send(self, peer: Peer, key: AttemptKey, message: FromSender) -> list[Command]:
        """Send a message on a stream once it is attached; drop the message if the process has no stream."""
        stream = self._streams.get(peer)
        if stream is None:
            return []
        if stream.is_attached:
            return [Send(stream.dial, key, message)]
        if len(stream.queue) >= MAX_QUEUED:
            return self.end(stream.dial, f"it does not answer: {len(stream.queue)} messages wait")
        stream.queue.append((key, message))
        return []

    def answer(self, dial: DialId, ack: HelloAck) -> None:
        """Note that the process that was dialled has answered; ProtocolError if it is another one."""
        stream = self._by_dial.get(dial)
        if stream is not None:
            check_ack(ack, self._me, stream.peer)
            stream.is_greeted = True

    def attach(self, dial: DialId) -> list[Command]:
        """Note that the mover can write into the pages of a process that has answered."""
        stream = self._by_dial.get(dial)
        if stream is None:
            return []
        stream.is_attached = True
        queued = [Send(dial, key, message) for key, message in stream.queue]
        stream.queue.clear()
        return [ReceiverAttached(stream.peer), *queued, *([Finish(dial)] if self._is_leaving else [])]

    def time_out(self, dial: DialId) -> list[Command]:
        """End a stream whose time to be answered has passed, unless it was answered."""
        stream = self._by_dial.get(dial)
        if stream is None or stream.is_greeted:
            return []
        return self.end(dial, f"no answer from {stream.address} within {CONNECT_TIMEOUT_S:g} s")

    def end(self, dial: DialId, reason: str) -> list[Command]:
        """End a stream, or note that it has ended or could not be had."""
        stream = self._by_dial.pop(dial, None)
        if stream is None:
            return []
        del self._streams[stream.peer]
        return [Close(dial), ReceiverLost(stream.peer, reason)]

    def forget(self, peer: Peer) -> list[Command]:
        """End the stream to a process that is known to have ended."""
        stream = self._streams.get(peer)
        return [] if stream is None else self.end(stream.dial, "its process has ended")

    def leave(self) -> list[Command]:
        """Dial no more; queued messages are still sent."""
        self._is_leaving = True
        return [Finish(dial) for dial in self.attached]
