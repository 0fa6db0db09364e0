"""The decode worker's half of one hand-off. Decides; does no I/O.

Invariant: granted pages become free, or a sequence's, only when no write to them can be outstanding: because they were
never offered, because the sender committed or quiesced, or because its process is gone.
"""

import hmac
from enum import Enum, auto

from pdserve.errors import ProtocolError, Refusal
from pdserve.kvtransfer.session import Capsule, Commit, Grant
from pdserve.values import value


class State(Enum):
    RESERVED = auto()  # pages set aside, the sender does not know them yet
    GRANTED = auto()  # the sender may write
    LANDING = auto()  # the sender has written everything; digests are being checked
    COMMITTED = auto()  # the pages are a sequence's
    QUARANTINED = auto()  # given up, but the sender may still write
    FREE = auto()  # given up, pages back in the pool


@value
class SenderAttached:
    """A control stream to the sender stands."""


@value
class Committed:
    commit: Commit


@value
class DigestsChecked:
    mismatch: int | None  # position of the first page whose digest differs


@value
class GaveUp:
    """The request ended here: cancelled or out of time."""

    reason: str


@value
class SenderQuiesced:
    """The sender says that nothing of it is or will be under way. It told the router why."""


@value
class SenderLost:
    """The control stream has ended. Proves nothing about writes under way."""

    reason: str


@value
class LeaseLapsed:
    """The sender has said nothing for as long as its lease was. Proves nothing about writes under way."""

    reason: str


@value
class SenderGone:
    """The sender's process is known to have ended."""


@value
class SendGrant:
    grant: Grant


@value
class CheckDigests:
    digests: tuple[int, ...]


@value
class Admit:
    """The pages are the sequence's: let it join the batch."""

    capsule: Capsule


@value
class SendTaken:
    pass


@value
class SendWithdrawn:
    reason: str


@value
class QuarantinePages:
    pass


@value
class FreePages:
    pass


class Cause(Enum):
    """Why an attempt failed here."""

    SENDER_LOST = auto()
    LEASE_LAPSED = auto()
    DIGEST_MISMATCH = auto()


@value
class Failed:
    """Tell the router that this attempt is over without its answer."""

    cause: Cause
    reason: str


Event = SenderAttached | Committed | DigestsChecked | GaveUp | SenderQuiesced | SenderLost | LeaseLapsed | SenderGone
Command = SendGrant | CheckDigests | Admit | SendTaken | SendWithdrawn | QuarantinePages | FreePages | Failed


class Receiver:
    """One hand-off into the pages of `grant`, which the caller has reserved."""

    def __init__(self, grant: Grant, *, checks_digests: bool = True) -> None:
        self.state = State.RESERVED
        self.grant = grant
        self._checks_digests = checks_digests
        self._capsule: Capsule | None = None

    def handle(self, event: Event) -> tuple[Command, ...]:  # noqa: C901, PLR0912 - one match
        """Advance by one event; return what to do now, in order. ProtocolError changes nothing."""
        match self.state, event:
            case State.RESERVED, SenderAttached():
                self.state = State.GRANTED
                return (SendGrant(self.grant),)
            case State.GRANTED, Committed(commit):
                return self._landed(commit)
            case State.LANDING, DigestsChecked(mismatch):
                return self._checked(mismatch)
            case State.RESERVED, (GaveUp(reason) | SenderLost(reason) | LeaseLapsed(reason)):
                return (*_failures(event), SendWithdrawn(reason), *self._free())
            case State.RESERVED, (SenderQuiesced() | SenderGone()):
                return (*_failures(event), *self._free())
            case State.GRANTED, (GaveUp(reason) | SenderLost(reason) | LeaseLapsed(reason)):
                return (*_failures(event), *self._quarantine(reason))
            case State.GRANTED, SenderGone():
                return (*_failures(event), *self._free())
            case ((State.GRANTED | State.QUARANTINED), SenderQuiesced()):
                return self._free()
            case State.QUARANTINED, SenderGone():
                return self._free()
            case State.QUARANTINED, SenderAttached():
                return (SendWithdrawn("given up while the stream was down"),)
            case State.LANDING, GaveUp(reason):
                return (SendWithdrawn(reason), *self._free())  # a commit is proof: nothing is under way
            case _, (SenderAttached() | SenderQuiesced() | SenderLost() | LeaseLapsed() | SenderGone()):
                return ()  # late news of a hand-off that is over, or that no longer needs its sender
            case _, (DigestsChecked() | GaveUp()):
                return ()  # late news of a hand-off that is over
            case ((State.QUARANTINED | State.FREE), Committed()):
                return ()  # crossed our own giving up; the sender's answer to it is the proof we wait for
            case _:
                raise ProtocolError(f"{type(event).__name__} while {self.state.name}", Refusal.ORDER)

    def _landed(self, commit: Commit) -> tuple[Command, ...]:
        self._refuse_other_places(commit)
        if len(commit.digests) != len(self.grant.pages):
            raise ProtocolError(f"digests: {len(commit.digests)} for {len(self.grant.pages)} pages")
        if len(commit.capsule.first_tokens) != len(commit.capsule.indices) or not commit.capsule.indices:
            raise ProtocolError("capsule: first_tokens and indices do not match")
        self._capsule = commit.capsule
        if not self._checks_digests:
            return self._checked(None)
        self.state = State.LANDING
        return (CheckDigests(commit.digests),)

    def _refuse_other_places(self, commit: Commit) -> None:
        """Raise ProtocolError unless a commit is for exactly what was granted, and can prove it."""
        grant = self.grant
        if commit.region != grant.region:
            raise ProtocolError(f"region: {commit.region}, granted was {grant.region}", Refusal.REGION)
        if commit.pages != grant.pages:
            raise ProtocolError("pages: not those of the grant", Refusal.PAGE)
        if commit.generations != grant.generations:
            raise ProtocolError("generations: not those of the grant", Refusal.GENERATION)
        if not hmac.compare_digest(commit.capability, grant.capability):
            raise ProtocolError("capability: not that of the grant", Refusal.CAPABILITY)

    def _checked(self, mismatch: int | None) -> tuple[Command, ...]:
        if mismatch is not None or self._capsule is None:
            reason = f"digest of page {mismatch} differs from the commit's"
            return (Failed(Cause.DIGEST_MISMATCH, reason), *self._quarantine(reason))
        self.state = State.COMMITTED
        return (Admit(self._capsule), SendTaken())

    def _quarantine(self, reason: str) -> tuple[Command, ...]:
        self.state = State.QUARANTINED
        return (SendWithdrawn(reason), QuarantinePages())

    def _free(self) -> tuple[Command, ...]:
        self.state = State.FREE
        return (FreePages(),)


def _failures(event: Event) -> tuple[Failed, ...]:
    """Return what the router must be told of an event that ends a hand-off; it knows of its own giving up."""
    match event:
        case SenderLost(reason):
            return (Failed(Cause.SENDER_LOST, reason),)
        case LeaseLapsed(reason):
            return (Failed(Cause.LEASE_LAPSED, reason),)
        case SenderGone():
            return (Failed(Cause.SENDER_LOST, "the sender's process ended"),)
        case _:
            return ()
