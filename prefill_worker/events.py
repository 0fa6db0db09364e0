"""What happens to a prefill worker, and what it does about it. Pure values."""

from pdserve.kvtransfer import sender
from pdserve.kvtransfer.session import HandoffKey, Pages, Peer
from pdserve.values import value
from pdserve.worker.messages import Cancelled, DrainAsked, PeerGone, Placed, Report, RouterLost, Ticked


@value
class FromPeer:
    """News of one hand-off, from its decode worker or from the mover."""

    peer: Peer
    key: HandoffKey
    event: sender.Event


@value
class PeerAttached:
    """The stream to a decode worker stands."""

    peer: Peer


@value
class PeerLost:
    """The stream to a decode worker has ended, or could not be had."""

    peer: Peer
    reason: str


@value
class Connect:
    """Have a stream to this decode worker; nothing if it stands. PeerLost follows if it cannot be had."""

    peer: Peer
    address: str


@value
class Copy:
    """Write pages into the peer's; CopyStopped follows, whatever happens."""

    peer: Peer
    key: HandoffKey
    src: Pages
    dst: Pages


@value
class CancelCopies:
    """Write nothing more of a hand-off than is on its way; CopyStopped follows for each of its copies all the same."""

    peer: Peer
    key: HandoffKey


@value
class ToPeer:
    peer: Peer
    key: HandoffKey
    message: sender.SendCommit | sender.SendQuiesced


@value
class Forget:
    """The peer's process has ended: report every copy to it stopped, and drop what was prepared for it."""

    peer: Peer


Event = Placed | Cancelled | RouterLost | PeerGone | DrainAsked | Ticked | FromPeer | PeerAttached | PeerLost
Command = Report | Connect | Copy | CancelCopies | ToPeer | Forget
