"""What the two ends of a hand-off stream report to the process around them, and what they know of it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from pdserve.kvlayout import KvLayout
from pdserve.kvtransfer import receiver, sender
from pdserve.kvtransfer.session import HandoffKey, Peer

if TYPE_CHECKING:  # the machines that use these events are pure; a mover is not
    from pdserve.kvtransfer.mover import Mover

EventT_co = TypeVar("EventT_co", covariant=True)
EventT_contra = TypeVar("EventT_contra", contravariant=True)


@dataclass(frozen=True, slots=True)
class Party:
    """This process as a peer sees it."""

    peer: Peer
    layout: KvLayout
    mover: "Mover"


@dataclass(frozen=True, slots=True)
class PeerAttached:
    """A stream to the peer stands."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class PeerAlive:
    """The peer's engine loop goes on."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class PeerMessage(Generic[EventT_co]):
    """The peer spoke of one hand-off."""

    peer: Peer
    key: HandoffKey
    event: EventT_co


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The stream to the peer has ended, or could not be had. Its process, and its writes, may go on."""

    peer: Peer
    reason: str


@dataclass(frozen=True, slots=True)
class PeerGone:
    """The peer's process has ended: another incarnation of the same worker attached."""

    peer: Peer


FromSenders = PeerAttached | PeerAlive | PeerMessage[receiver.Event] | PeerLost | PeerGone
FromReceivers = PeerAttached | PeerMessage[sender.Event] | PeerLost


class Sink(Protocol[EventT_contra]):
    """Takes what the streams report, in order."""

    def put(self, report: EventT_contra) -> None:
        """Take a report on a stream itself; there are only so many."""

    async def offer(self, report: EventT_contra) -> None:
        """Take a message of a peer; waits while the process has too much to do."""
