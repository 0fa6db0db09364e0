"""The receiver's half of one hand-off. It decides and does no I/O.

Invariant: reserved pages become free, or a sequence's, only when no write to them can be outstanding: they were never
granted, or the sender has committed or quiesced, or the sender's process has ended.
"""

import hmac
from enum import Enum, auto

from pdserve.errors import InvariantError, ProtocolError, Refusal
from pdserve.kvtransfer.session import Capsule, Commit, Grant
from pdserve.reports import Failure
from pdserve.values import value


class State(Enum):
    RESERVED = auto()  # pages are set aside; the sender does not know them yet
    GRANTED = auto()  # the sender may write
    LANDING = auto()  # the sender has committed; digests are being checked
    COMMITTED = auto()  # the pages are a sequence's
    QUARANTINED = auto()  # given up, but the sender may still write
    FREE = auto()  # given up, and the pages are back in the pool


@value
class SenderAttached:
    """A stream from the sender is open."""


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
    """The sender says that no copy of it is or will be under way. It has reported to the router why."""


@value
class SenderLost:
    """The stream has ended. This proves nothing about writes under way."""

    reason: str


@value
class LeaseLapsed:
    """The sender was silent for longer than its lease. This proves nothing about writes under way."""

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
    """The pages are the sequence's, which joins the batch."""

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


@value
class Failed:
    """Report to the router that this attempt is over without its answer."""

    failure: Failure
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
                return ()  # crossed our giving up; the sender's answer to that is the proof we wait for
            case _:
                raise ProtocolError(f"{type(event).__name__} while {self.state.name}", Refusal.ORDER)

    def _landed(self, commit: Commit) -> tuple[Command, ...]:
        self._refuse_other_places(commit)
        if len(commit.digests) != len(self.grant.pages):
            raise ProtocolError(f"digests: {len(commit.digests)} for {len(self.grant.pages)} pages")
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
        if self._capsule is None:
            raise InvariantError("digests were compared without a commit")
        if mismatch is not None:
            reason = f"digest of page {mismatch} differs from the commit's"
            return (Failed(Failure.DIGEST_MISMATCH, reason), *self._quarantine(reason))
        self.state = State.COMMITTED
        return (Admit(self._capsule), SendTaken())

    def _quarantine(self, reason: str) -> tuple[Command, ...]:
        self.state = State.QUARANTINED
        return (SendWithdrawn(reason), QuarantinePages())

    def _free(self) -> tuple[Command, ...]:
        self.state = State.FREE
        return (FreePages(),)


def _failures(event: Event) -> tuple[Failed, ...]:
    """Return what to report of an event that ends a hand-off. The router knows of requests that it ended itself."""
    match event:
        case SenderLost(reason):
            return (Failed(Failure.PEER_LOST, reason),)
        case LeaseLapsed(reason):
            return (Failed(Failure.LEASE_LAPSED, reason),)
        case SenderGone():
            return (Failed(Failure.PEER_LOST, "the sender's process ended"),)
        case _:
            return ()
