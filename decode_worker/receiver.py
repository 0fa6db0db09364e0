"""The receiver's half of one hand-off. It decides and does no I/O.

Invariant: reserved pages become free, or a sequence's, only when no write to them can be outstanding: they were never
granted, or the sender has committed or quiesced, or the sender's process has ended.
"""

import hmac
from enum import Enum, auto

from pdserve.base.errors import PeerFault, ProtocolError
from pdserve.base.ids import AttemptKey
from pdserve.base.values import value
from pdserve.kvtransfer.doors import (
    CheckDigests,
    DigestsChecked,
    NotAdmitted,
    PeerGone,
    RequestEnded,
    SenderAttached,
    SenderLost,
)
from pdserve.kvtransfer.session import (
    Capsule,
    Commit,
    FromReceiver,
    FromSender,
    Grant,
    PagesLanded,
    Quiesced,
    Taken,
    Withdrawn,
)
from pdserve.protocol.paging import PageOrder
from pdserve.protocol.reports import Failure


class State(Enum):
    RESERVED = auto()  # pages are set aside; the sender does not know them yet
    GRANTED = auto()  # the sender may write
    LANDING = auto()  # the sender has committed; the last digests are being checked
    COMMITTED = auto()  # the pages are a sequence's
    QUARANTINED = auto()  # given up, but the sender may still write
    FREE = auto()  # given up, and the pages are back in the pool


@value
class LeaseLapsed:
    """The sender was silent for longer than its lease. This proves nothing about writes under way."""

    reason: str


@value
class Admit:
    """The first `num_pages` of the grant's pages are the worker's; nothing was written to the others."""

    capsule: Capsule
    num_pages: int


@value
class QuarantinePages:
    pass


@value
class FreePages:
    """Give the grant's pages back. The first `num_checked` are written whole, and nothing will write to them again."""

    num_checked: int


Event = SenderAttached | DigestsChecked | RequestEnded | SenderLost | LeaseLapsed | PeerGone | FromSender
Command = CheckDigests | Admit | QuarantinePages | FreePages | NotAdmitted | FromReceiver


class Receiver:
    """One hand-off into the pages of `grant`, which the caller has reserved."""

    def __init__(self, key: AttemptKey, grant: Grant, order: PageOrder, *, checks_digests: bool = True) -> None:
        """Order: of the pages before the grant's, and of these."""
        self.state = State.RESERVED
        self.key = key
        self.grant = grant
        self._order = order
        self._checks_digests = checks_digests
        self._digests: tuple[int, ...] = ()  # of the pages that have landed, the grant's leading ones
        self._num_checking = 0  # of these, after those that are checked
        self._num_checked = 0
        self._capsule: Capsule | None = None

    @property
    def num_landed(self) -> int:
        """Return how many pages of the grant the sender has written."""
        return len(self._digests)

    def handle(self, event: Event) -> tuple[Command, ...]:  # noqa: C901, PLR0912 - one match
        """Advance by one event; return what to do now, in order. ProtocolError changes nothing."""
        match self.state, event:
            case State.RESERVED, SenderAttached():
                self.state = State.GRANTED
                return (self.grant,)
            case State.GRANTED, PagesLanded(digests):
                return self._landed(digests)
            case State.GRANTED, Commit():
                return self._committed(event)
            case ((State.GRANTED | State.LANDING | State.QUARANTINED), DigestsChecked(_, mismatch)):
                return self._checked(mismatch)
            case ((State.RESERVED | State.GRANTED), RequestEnded(reason)):
                return self._give_up(reason)  # the router knows: it has ended the request
            case ((State.RESERVED | State.GRANTED), SenderLost(_, reason)):
                return (NotAdmitted(self.key, Failure.PEER_LOST, reason), *self._give_up(reason))
            case ((State.RESERVED | State.GRANTED), LeaseLapsed(reason)):
                return (NotAdmitted(self.key, Failure.LEASE_LAPSED, reason), *self._give_up(reason))
            case ((State.RESERVED | State.GRANTED), Quiesced(reason)):
                return (NotAdmitted(self.key, Failure.SENDER_GAVE_UP, reason), *self._free())
            case ((State.RESERVED | State.GRANTED), PeerGone()):
                return (NotAdmitted(self.key, Failure.PEER_LOST, "the sender's process ended"), *self._free())
            case State.QUARANTINED, (Quiesced() | PeerGone()):
                return self._free()
            case State.QUARANTINED, SenderAttached():
                return (Withdrawn("given up while the stream was down"),)
            case State.LANDING, RequestEnded(reason):
                return (Withdrawn(reason), *self._free())  # a commit is proof: nothing is under way
            case _, (
                SenderAttached()
                | Quiesced()
                | SenderLost()
                | LeaseLapsed()
                | PeerGone()
                | DigestsChecked()
                | RequestEnded()
            ):
                return ()  # late news of a hand-off that is over, or that no longer needs its sender
            case ((State.QUARANTINED | State.FREE), (PagesLanded() | Commit())):
                return ()  # sent before the sender knew that we gave up; its Quiesced is the proof we wait for
            case _:
                raise ProtocolError(f"{type(event).__name__} while {self.state.name}", PeerFault.ORDER)

    def _landed(self, digests: tuple[int, ...]) -> tuple[Command, ...]:
        num_landed = len(self._digests) + len(digests)
        if num_landed > len(self.grant.pages):
            raise ProtocolError(f"digests: {num_landed} for {len(self.grant.pages)} pages")
        self._digests += digests
        return self._check_next()

    def _check_next(self) -> tuple[Command, ...]:
        """Check what has landed since the last check. One check is under way at a time."""
        first, end = self._num_checked, len(self._digests)
        if self._num_checking or first == end or not self._checks_digests:
            return ()
        self._num_checking = end - first
        return (CheckDigests(self.key, self.grant.pages[first:end], self._digests[first:]),)

    def _committed(self, commit: Commit) -> tuple[Command, ...]:
        if not hmac.compare_digest(commit.capability, self.grant.capability):
            raise ProtocolError("capability: not that of the grant", PeerFault.CAPABILITY)
        num_tokens, num_landed = commit.capsule.num_tokens, len(self._digests)
        num_pages = max(0, self._order.count(num_tokens) - self.grant.first_page)
        if num_pages != num_landed:
            raise ProtocolError(f"capsule: {num_tokens} tokens need {num_pages} pages, {num_landed} have landed")
        self._capsule = commit.capsule
        self.state = State.LANDING
        return self._admit_if_checked(commit.capsule)

    def _checked(self, mismatch: int | None) -> tuple[Command, ...]:
        num_checking, self._num_checking = self._num_checking, 0
        self._num_checked += num_checking if mismatch is None else mismatch
        if mismatch is not None:
            self._digests = self._digests[: self._num_checked]  # what follows cannot be used
            if self.state is State.QUARANTINED:
                return ()
            reason = f"digest of page {self._num_checked} differs from the sender's"
            return (NotAdmitted(self.key, Failure.DIGEST_MISMATCH, reason), *self._quarantine(reason))
        if self.state is State.LANDING and self._capsule is not None:
            return self._check_next() or self._admit_if_checked(self._capsule)
        return self._check_next()

    def _admit_if_checked(self, capsule: Capsule) -> tuple[Command, ...]:
        num_pages = len(self._digests)
        if self._checks_digests and self._num_checked < num_pages:
            return ()
        self.state = State.COMMITTED
        return (Admit(capsule, num_pages), Taken())

    def _give_up(self, reason: str) -> tuple[Command, ...]:
        """Free pages that the sender does not know; quarantine those that it may still write to."""
        return (Withdrawn(reason), *self._free()) if self.state is State.RESERVED else self._quarantine(reason)

    def _quarantine(self, reason: str) -> tuple[Command, ...]:
        self.state = State.QUARANTINED
        return (Withdrawn(reason), QuarantinePages())

    def _free(self) -> tuple[Command, ...]:
        self.state = State.FREE
        return (FreePages(self._num_checked),)
