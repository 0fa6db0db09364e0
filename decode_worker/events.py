"""What happens to a decode worker, and what it does about it. Pure values."""

from pdserve.kvtransfer import receiver
from pdserve.kvtransfer.session import HandoffKey, Pages, Peer
from pdserve.values import value
from pdserve.worker.messages import Cancelled, DrainAsked, PeerGone, Placed, Report, RouterLost, Ticked


@value
class FromPeer:
    """News of one hand-off from its prefill worker."""

    peer: Peer
    key: HandoffKey
    event: receiver.Event


@value
class PeerAttached:
    peer: Peer


@value
class PeerAlive:
    """An attached prefill worker's engine loop goes on."""

    peer: Peer


@value
class PeerLost:
    """The stream from a prefill worker has ended; its writes may go on."""

    peer: Peer
    reason: str


@value
class DigestsChecked:
    key: HandoffKey
    mismatch: int | None


@value
class ToPeer:
    peer: Peer
    key: HandoffKey
    message: receiver.SendGrant | receiver.SendTaken | receiver.SendWithdrawn


@value
class CheckDigests:
    """Compare pages with digests; DigestsChecked follows."""

    key: HandoffKey
    pages: Pages
    digests: tuple[int, ...]


@value
class Forget:
    """The peer's process has ended: drop its stream and let it attach no more."""

    peer: Peer


Event = (
    Placed
    | Cancelled
    | RouterLost
    | DrainAsked
    | Ticked
    | FromPeer
    | PeerAttached
    | PeerAlive
    | PeerLost
    | PeerGone
    | DigestsChecked
)
Command = Report | ToPeer | CheckDigests | Forget
