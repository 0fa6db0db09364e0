"""Events, commands and outcomes of the two doors of a worker. Pure values.

KV leaves through the outgoing door to a *receiver*, and arrives through the incoming door from a *sender*. An outcome
is for the worker whose doors they are: it alone knows which request a hand-off belongs to.
"""

from collections.abc import Sequence
from typing import Protocol, TypeVar

from pdserve.base.ids import AttemptKey, PageId, Peer
from pdserve.base.values import value
from pdserve.kvtransfer.session import Capsule, Digests, FromReceiver, FromSender
from pdserve.protocol.page_tables import Pages, PageTables
from pdserve.protocol.reports import Failure

ReportT_contra = TypeVar("ReportT_contra", contravariant=True)

HEARTBEAT_S = 0.5  # between two heartbeats of a process, and between two ticks of its doors


@value
class Claim:
    """Pages that one task or hand-off uses: held ones, with one reference each, granted ones, and quarantined ones."""

    held: Sequence[PageId] = ()
    granted: Sequence[PageId] = ()
    quarantined: Sequence[PageId] = ()


# ---- events


@value
class RequestEnded:
    """The request has ended here: cancelled, out of time, or finished with its first token."""

    reason: str


@value
class CopyStopped:
    """One rank's part of a copy is over: landed (with a digest for each page), or failed (None). It reads no page."""

    digests: Digests | None
    reason: str = ""
    in_doubt: bool = False  # failed, and bytes that were on their way may still be written into the granted pages
    part: int = 0  # the rank's number


@value
class ReceiverAttached:
    peer: Peer


@value
class ReceiverMessage:
    """A receiver's message about a hand-off, or the end of a copy into its pages."""

    peer: Peer
    key: AttemptKey
    event: FromReceiver | CopyStopped


@value
class ReceiverLost:
    """The stream to a receiver has ended, could not be had, or brings no answer."""

    peer: Peer
    reason: str


@value
class SenderAttached:
    peer: Peer


@value
class SenderAlive:
    """The engine loop of an attached sender goes on."""

    peer: Peer


@value
class SenderMessage:
    peer: Peer
    key: AttemptKey
    event: FromSender


@value
class SenderLost:
    """The stream from a sender has ended. Its process, and its writes, may go on."""

    peer: Peer
    reason: str


@value
class DigestsChecked:
    key: AttemptKey
    mismatch: int | None  # position of the first page whose digest differs


@value
class PeerGone:
    """A process is known to have ended, and nothing that it has sent can reach a page here any more."""

    peer: Peer


# ---- commands


@value
class Connect:
    """Have a stream to a receiver; nothing if it stands. ReceiverLost follows if it cannot be had."""

    peer: Peer
    address: str


@value
class StartCopy:
    """Write pages into the receiver's, each rank its part; CopyStopped follows for each part, whatever happens."""

    peer: Peer
    key: AttemptKey
    src: Pages
    dst: Pages


@value
class CancelCopies:
    """Write nothing more of a hand-off than is on its way; CopyStopped follows for each part of it all the same."""

    peer: Peer
    key: AttemptKey


@value
class Probe:
    """Measure the way to a receiver, unless that has been done."""

    peer: Peer


@value
class ToReceiver:
    peer: Peer
    key: AttemptKey
    message: FromSender


@value
class ToSender:
    peer: Peer
    key: AttemptKey
    message: FromReceiver


@value
class CheckDigests:
    """Compare pages with digests; DigestsChecked follows."""

    key: AttemptKey
    pages: Pages
    digests: tuple[int, ...]


@value
class Forget:
    """A process has ended: end its streams, attach it no more, and report every copy to it stopped."""

    peer: Peer


# ---- outcomes


@value
class Granted:
    """The receiver has set pages aside for a hand-off that leaves."""

    key: AttemptKey


@value
class Sent:
    """The receiver has taken a hand-off over."""

    key: AttemptKey


@value
class Unsent:
    """A hand-off that was to leave has failed: the receiver is not known to have taken it.

    `may_resume`: the receiver surely never goes on with the sequence. It has not been sent a commit, or has withdrawn.
    """

    key: AttemptKey
    failure: Failure
    reason: str
    may_resume: bool = True


@value
class Reserved:
    """Pages are set aside for a hand-off that is to arrive."""

    key: AttemptKey
    num_reused: int  # leading spans whose pages were here before, and are held for it


@value
class Landed:
    """The sender has written every page."""

    key: AttemptKey
    handoff_bytes: int
    handoff_s: float


@value
class Admitted:
    """What was written is what was sent. The pages are the worker's now, which has one hold on each."""

    key: AttemptKey
    pages: PageTables
    num_reused: int  # spans
    capsule: Capsule


@value
class NotAdmitted:
    """A hand-off that was to arrive has failed."""

    key: AttemptKey
    failure: Failure
    reason: str


OutgoingEvent = ReceiverAttached | ReceiverMessage | ReceiverLost | PeerGone
IncomingEvent = SenderAttached | SenderAlive | SenderMessage | SenderLost | DigestsChecked | PeerGone
Command = Connect | StartCopy | CancelCopies | Probe | ToReceiver | ToSender | CheckDigests | Forget
Leaving = Granted | Sent | Unsent
Arriving = Reserved | Landed | Admitted | NotAdmitted
Outcome = Leaving | Arriving
Result = Command | Outcome  # what a door answers an event with, in order


class Sink(Protocol[ReportT_contra]):
    """Takes what streams report, in order."""

    def put(self, report: ReportT_contra) -> None:
        """Take a report about a stream itself. A stream has few of them, so this never waits."""

    async def offer(self, report: ReportT_contra) -> None:
        """Take a message of the other end; waits while too many events are queued."""
