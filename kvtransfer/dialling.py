"""The streams of one process to the processes that it dials, from the first need to their end. Decides; does no I/O.

Invariant: each process that is dialled has one stream at most. A stream is closed unless it is answered within
CONNECT_TIMEOUT_S; the time that the mover takes to attach does not count. Each stream ends with exactly one
ReceiverLost.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import NewType

from pdserve.errors import ProtocolError, Refusal
from pdserve.kvtransfer.doors import Connect, Forget, ReceiverAttached, ReceiverLost, ReceiverMessage, ToReceiver
from pdserve.kvtransfer.greeting import HelloAck, Introduction, check_ack
from pdserve.kvtransfer.session import FromReceiver, FromSender, HandoffKey, Peer
from pdserve.values import value

CONNECT_TIMEOUT_S = 2.0
MAX_QUEUED = 4096  # messages for one stream that is not attached yet

DialId = NewType("DialId", int)


@value
class Answered:
    """The first message of the process that was dialled has arrived."""

    dial: DialId
    ack: HelloAck


@value
class CanWrite:
    """The mover can write into the pages of the process that was dialled."""

    dial: DialId


@value
class Received:
    """A message about one hand-off arrived from a process that was dialled."""

    dial: DialId
    key: HandoffKey
    message: FromReceiver


@value
class TimedOut:
    """The time of a Dial has passed."""

    dial: DialId


@value
class Ended:
    """A stream has ended, or could not be had."""

    dial: DialId
    reason: str


@value
class Left:
    """This process dials no more; queued messages are still sent."""


@value
class Dial:
    """Open a stream and send a hello on it; TimedOut is due after `timeout_s`."""

    dial: DialId
    peer: Peer
    address: str
    timeout_s: float


@value
class AttachMover:
    """Let the mover write into the pages of a process; CanWrite or Ended follows."""

    dial: DialId
    peer: Peer
    metadata: bytes


@value
class Send:
    dial: DialId
    key: HandoffKey
    message: FromSender


@value
class Finish:
    """End a stream once all that was sent on it has been written."""

    dial: DialId


@value
class Close:
    """End a stream; its process has been reported as lost."""

    dial: DialId
    refusal: Refusal | None = None  # what was wrong with the process, if that is why


Event = Connect | ToReceiver | Forget | Answered | CanWrite | Received | TimedOut | Ended | Left
Report = ReceiverAttached | ReceiverMessage | ReceiverLost
Command = Dial | AttachMover | Send | Finish | Close | Report


@dataclass(slots=True, eq=False)
class _Stream:
    dial: DialId
    peer: Peer
    address: str
    is_greeted: bool = False
    is_attached: bool = False
    queue: deque[tuple[HandoffKey, FromSender]] = field(default_factory=deque)  # sent once it is attached


class Dialling:
    """Dials on the first need, and again on the next need after a stream was lost."""

    def __init__(self, me: Introduction) -> None:
        self._me = me
        self._streams: dict[Peer, _Stream] = {}
        self._by_dial: dict[DialId, _Stream] = {}  # the same
        self._last_dial = 0
        self._is_leaving = False

    @property
    def attached(self) -> tuple[DialId, ...]:
        return tuple(stream.dial for stream in self._streams.values() if stream.is_attached)

    def handle(self, event: Event) -> tuple[Command, ...]:
        match event:
            case Connect(peer, address):
                return self._dial(peer, address)
            case ToReceiver(peer, key, message):
                return self._say(self._streams.get(peer), key, message)
            case Forget(peer):
                return self._end(self._streams.get(peer), "its process has ended")
            case Left():
                self._is_leaving = True
                return tuple(map(Finish, self.attached))
            case _:
                stream = self._by_dial.get(event.dial)
                return () if stream is None else self._go_on(stream, event)

    def _go_on(self, stream: _Stream, event: Answered | CanWrite | Received | TimedOut | Ended) -> tuple[Command, ...]:
        match event:
            case Answered(_, ack):
                return self._check(stream, ack)
            case CanWrite():
                return self._attach(stream)
            case Received(_, key, message):
                return (ReceiverMessage(stream.peer, key, message),)
            case TimedOut():
                if stream.is_greeted:
                    return ()
                return self._end(stream, f"no answer from {stream.address} within {CONNECT_TIMEOUT_S:g} s")
            case Ended(_, reason):
                return self._end(stream, reason)

    def _dial(self, peer: Peer, address: str) -> tuple[Command, ...]:
        if peer in self._streams or self._is_leaving:
            return ()
        self._last_dial += 1
        stream = _Stream(DialId(self._last_dial), peer, address)
        self._streams[peer] = self._by_dial[stream.dial] = stream
        return (Dial(stream.dial, peer, address, CONNECT_TIMEOUT_S),)

    def _check(self, stream: _Stream, ack: HelloAck) -> tuple[Command, ...]:
        try:
            check_ack(ack, self._me, stream.peer)
        except ProtocolError as error:
            return self._end(stream, str(error), error.refusal)
        stream.is_greeted = True
        return (AttachMover(stream.dial, stream.peer, ack.mover_metadata),)

    def _attach(self, stream: _Stream) -> tuple[Command, ...]:
        stream.is_attached = True
        queued = tuple(Send(stream.dial, key, message) for key, message in stream.queue)
        stream.queue.clear()
        finish = (Finish(stream.dial),) if self._is_leaving else ()
        return (ReceiverAttached(stream.peer), *queued, *finish)

    def _say(self, stream: _Stream | None, key: HandoffKey, message: FromSender) -> tuple[Command, ...]:
        """Send a message on a stream once it is attached; drop it if the process has no stream."""
        if stream is None:
            return ()
        if stream.is_attached:
            return (Send(stream.dial, key, message),)
        if len(stream.queue) >= MAX_QUEUED:
            return self._end(stream, f"it does not answer: {len(stream.queue)} messages wait")
        stream.queue.append((key, message))
        return ()

    def _end(self, stream: _Stream | None, reason: str, refusal: Refusal | None = None) -> tuple[Command, ...]:
        if stream is None:
            return ()
        del self._streams[stream.peer], self._by_dial[stream.dial]
        return Close(stream.dial, refusal), ReceiverLost(stream.peer, reason)
