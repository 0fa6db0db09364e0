"""What happens to a decode worker, and what it does about it. Pure values."""

from dataclasses import dataclass

from pdserve.kvtransfer import receiver
from pdserve.kvtransfer.session import HandoffKey, Pages, Peer
from pdserve.worker.words import Cancelled, DrainAsked, PeerGone, Placed, Report, RouterLost, Ticked


@dataclass(frozen=True, slots=True)
class FromPeer:
    """News of one hand-off from its prefill worker."""

    peer: Peer
    key: HandoffKey
    event: receiver.Event


@dataclass(frozen=True, slots=True)
class PeerAttached:
    peer: Peer


@dataclass(frozen=True, slots=True)
class PeerAlive:
    """An attached prefill worker's engine loop goes on."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The stream from a prefill worker has ended; its writes may go on."""

    peer: Peer
    reason: str


@dataclass(frozen=True, slots=True)
class DigestsChecked:
    key: HandoffKey
    mismatch: int | None


@dataclass(frozen=True, slots=True)
class ToPeer:
    peer: Peer
    key: HandoffKey
    message: receiver.SendGrant | receiver.SendTaken | receiver.SendWithdrawn


@dataclass(frozen=True, slots=True)
class CheckDigests:
    """Compare pages with digests; DigestsChecked follows."""

    key: HandoffKey
    pages: Pages
    digests: tuple[int, ...]


@dataclass(frozen=True, slots=True)
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
