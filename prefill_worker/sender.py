"""The sender's half of one hand-off. It decides and does no I/O.

Invariant: the source pages are released exactly once, and never while a copy may still read them. The sender sends
Quiesced only when no copy is or will be under way, and none has ended in doubt.

Each rank of this worker writes its part of a copy. The copy has landed when all parts have. The first part that fails
fails the hand-off.
"""

from enum import Enum, auto
from typing import TypeVar

from pdserve.base.errors import PeerFault, ProtocolError
from pdserve.base.ids import AttemptKey, Peer
from pdserve.base.values import value
from pdserve.kvtransfer.doors import CancelCopies, CopyStopped, ReceiverLost, RequestEnded, StartCopy, Unsent
from pdserve.kvtransfer.session import (
    Capsule,
    Commit,
    Digests,
    FromReceiver,
    FromSender,
    Grant,
    PagesLanded,
    Quiesced,
    Taken,
    Withdrawn,
    of_parts,
)
from pdserve.protocol.page_tables import Pages
from pdserve.protocol.reports import Failure

ValueT = TypeVar("ValueT")


class State(Enum):
    COMPUTING = auto()  # not all pages are final, and none are granted yet
    OFFERED = auto()  # all pages are final, and none are granted yet
    SENDING = auto()  # pages are granted; those that are final are copied
    LANDED = auto()  # everything is copied and committed; the receiver has yet to take it
    DRAINING = auto()  # given up, but copies may still be under way
    CLOSED = auto()  # the source pages are released
    IN_DOUBT = auto()  # the source pages are released, but bytes may still land until one of the processes ends


@value
class PagesReady:
    """The next pages are final, in order."""

    pages: Pages


@value
class PrefillDone:
    """Every page has been announced by PagesReady."""

    capsule: Capsule


@value
class FellSilent:
    """This process sent nothing for a time, because it was frozen or too busy."""

    silent_s: float


@value
class ReleasePages:
    """Give the source pages back: the hand-off no longer needs them."""


Event = PagesReady | PrefillDone | CopyStopped | RequestEnded | ReceiverLost | FellSilent | FromReceiver
Command = StartCopy | CancelCopies | ReleasePages | Unsent | FromSender


class Sender:
    """One hand-off to `peer`. Each rank's parts of copies are reported stopped in the order they were started."""

    def __init__(self, peer: Peer, key: AttemptKey, num_parts: int = 1) -> None:
        self.peer = peer
        self.key = key
        self.state = State.COMPUTING
        self._ready: Pages = ()
        self._sent = 0  # pages handed to a copy, or skipped because the receiver holds them
        self._copying = (0,) * num_parts  # copies that are under way, by part
        self._landed: tuple[tuple[Digests, ...], ...] = ((),) * num_parts  # parts that other parts have yet to follow
        self._in_doubt = False
        self._grant: Grant | None = None
        self._capsule: Capsule | None = None

    @property
    def num_granted(self) -> int:
        """Return how many leading pages of the prompt the receiver has room for; 0 before it has granted any."""
        return 0 if self._grant is None else self._grant.first_page + len(self._grant.pages)

    @property
    def is_abreast(self) -> bool:
        """Whether pages are granted and every page that is ready has been copied."""
        return self.state is State.SENDING and not any(self._copying) and self._sent >= len(self._ready)

    def handle(self, event: Event) -> tuple[Command, ...]:  # noqa: C901, PLR0912 - one match
        """Advance by one event; return what to do now, in order. ProtocolError changes nothing."""
        match self.state, event:
            case ((State.COMPUTING | State.SENDING), PagesReady(pages)):
                self._ready += pages
                return self._progress()
            case ((State.COMPUTING | State.SENDING), PrefillDone(capsule)):
                self._capsule = capsule
                if self.state is State.COMPUTING:
                    self.state = State.OFFERED
                return self._progress()
            case ((State.COMPUTING | State.OFFERED), Grant()):
                self._grant = event
                self._sent = event.first_page
                self.state = State.SENDING
                return self._progress()
            case ((State.SENDING | State.DRAINING), CopyStopped()):
                return self._copy_stopped(event)
            case State.LANDED, Taken():
                return self._close()
            case ((State.COMPUTING | State.OFFERED | State.SENDING | State.LANDED), RequestEnded(reason)):
                return self._give_up(reason)
            case ((State.COMPUTING | State.OFFERED | State.SENDING), (Withdrawn(reason) | ReceiverLost(_, reason))):
                return self._fail(Failure.PEER_LOST, reason)
            case State.LANDED, (Withdrawn(reason) | ReceiverLost(_, reason)):
                return self._fail(Failure.PEER_LOST, reason, may_resume=isinstance(event, Withdrawn))
            case State.SENDING, FellSilent(silent_s) if self._grant is not None and silent_s >= self._grant.lease_s:
                reason = f"silent for {silent_s:.1f} s under a lease of {self._grant.lease_s:g} s"
                return self._fail(Failure.PEER_LOST, reason)
            case _, FellSilent():
                return ()  # there was no lease, or it has held
            case State.CLOSED, Withdrawn(reason):
                return (Quiesced(reason),)  # it granted pages before it knew that we gave up
            case (
                (State.DRAINING | State.CLOSED | State.IN_DOUBT),
                (PagesReady() | PrefillDone() | Grant() | Taken() | Withdrawn() | RequestEnded() | ReceiverLost()),
            ):
                return ()  # late news of a hand-off that is over
            case _:
                raise ProtocolError(f"{type(event).__name__} while {self.state.name}", PeerFault.ORDER)

    def _progress(self) -> tuple[Command, ...]:
        """Copy the final pages; commit when all of them have landed."""
        grant = self._grant
        if self.state is not State.SENDING or grant is None:
            return ()
        src = self._ready[self._sent :]
        if src:
            start = self._sent - grant.first_page
            dst = grant.pages[start : start + len(src)]
            if len(dst) != len(src):
                return self._fail(Failure.TRANSFER_FAILED, f"{len(grant.pages)} pages granted, more to send")
            self._sent += len(src)
            self._copying = tuple([count + 1 for count in self._copying])
            return (StartCopy(self.peer, self.key, src, dst),)
        if any(self._copying) or self._capsule is None:
            return ()
        self.state = State.LANDED
        return (Commit(grant.capability, self._capsule),)

    def _copy_stopped(self, stopped: CopyStopped) -> tuple[Command, ...]:
        part = stopped.part
        if not any(self._copying[part : part + 1]):
            raise ProtocolError(f"part {part} of a copy stopped that was never started")
        self._copying = _replaced(self._copying, part, self._copying[part] - 1)
        self._in_doubt |= stopped.in_doubt
        if self.state is State.DRAINING:
            return () if any(self._copying) else self._quiesce(stopped.reason)
        if stopped.digests is None:
            return self._fail(Failure.TRANSFER_FAILED, stopped.reason)
        self._landed = _replaced(self._landed, part, (*self._landed[part], stopped.digests))
        if not all(self._landed):
            return ()
        parts = [landed[0] for landed in self._landed]
        self._landed = tuple([landed[1:] for landed in self._landed])
        return (PagesLanded(of_parts(parts)), *self._progress())

    def _fail(self, failure: Failure, reason: str, *, may_resume: bool = True) -> tuple[Command, ...]:
        return (Unsent(self.key, failure, reason, may_resume), *self._give_up(reason))

    def _give_up(self, reason: str) -> tuple[Command, ...]:
        if not any(self._copying):
            return self._quiesce(reason)
        self.state = State.DRAINING
        return (CancelCopies(self.peer, self.key),)

    def _quiesce(self, reason: str) -> tuple[Command, ...]:
        if self._in_doubt:
            self.state = State.IN_DOUBT
            return (ReleasePages(),)
        return (Quiesced(reason), *self._close())

    def _close(self) -> tuple[Command, ...]:
        self.state = State.CLOSED
        return (ReleasePages(),)


def _replaced(values: tuple[ValueT, ...], place: int, value: ValueT) -> tuple[ValueT, ...]:
    return (*values[:place], value, *values[place + 1 :])
