"""The outgoing door of a worker: KV that leaves it. Decides; does no I/O.

Invariant: a page is held here from when it is announced until no copy of its hand-off reads it any more, whatever
becomes of the request meanwhile. Each hand-off is released once.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from pdserve.base.ids import AttemptKey, PageId, Peer
from pdserve.engine.pages import PagePool
from pdserve.kvtransfer import doors
from pdserve.kvtransfer.doors import Connect, ReceiverMessage, Result, ToReceiver
from pdserve.kvtransfer.session import MIN_LEASE_S, Capsule, Commit, Grant, PagesLanded, Quiesced, Taken, Withdrawn
from pdserve.prefill_worker import sender
from pdserve.prefill_worker.sender import Sender, State

REDIAL_S = 600.0
MAX_ADDRESSES = 1024
EARLY_GRANT_S = 5.0  # how long a grant may wait for its placement
MAX_CLOSED = 4096
STUCK_S = 10.0  # after it, copies that do not stop count as copies to a frozen peer; `lease_s` is 4 s by default
ANSWER_S = 10.0  # for the answer to a commit, which a receiver may have refused


class Redialling:
    """Addresses of recent peers, and which of their streams are lost.

    A peer whose stream is lost keeps the pages that it granted in quarantine until this process answers it. Invariant:
    such a peer is dialled again for REDIAL_S at most, however many tries fail. A stream that stands, or a router that
    names the peer again, ends that time.
    """

    def __init__(self) -> None:
        self._addresses: OrderedDict[Peer, str] = OrderedDict()
        self._lost_s: dict[Peer, float] = {}  # since when, until the stream stands again
        self._due: dict[Peer, None] = {}  # to be dialled at the next tick

    def named(self, peer: Peer, address: str) -> Connect:
        """Return how to reach a peer that a router has named: it lives, as far as the router knows."""
        self._addresses[peer] = address
        self._addresses.move_to_end(peer)
        self.stop(peer)
        if len(self._addresses) > MAX_ADDRESSES:
            self.forget(next(iter(self._addresses)))
        return Connect(peer, address)

    def lose(self, peer: Peer, now_s: float) -> None:
        """Note that a stream has ended, or could not be had."""
        if peer in self._addresses:
            self._lost_s.setdefault(peer, now_s)
            self._due[peer] = None

    def forget(self, peer: Peer) -> None:
        self._addresses.pop(peer, None)
        self.stop(peer)

    def dial(self, now_s: float) -> list[Result]:
        due, self._due = self._due, {}
        commands: list[Result] = []
        for peer in due:
            if now_s - self._lost_s[peer] < REDIAL_S:
                commands.append(Connect(peer, self._addresses[peer]))
            else:
                self.forget(peer)
        return commands

    def stop(self, peer: Peer) -> None:
        """Dial a peer no more until its stream is lost again: it stands, or the process of the peer has ended."""
        self._lost_s.pop(peer, None)
        self._due.pop(peer, None)


class EarlyGrants:
    """Grants that arrived before the placement of their hand-off, and the hand-offs that were closed last.

    Invariant: a grant kept here is taken by its placement, or answered with Quiesced after EARLY_GRANT_S, and never
    both. A hand-off that ended in doubt is not answered at all.
    """

    def __init__(self, max_early: int) -> None:
        self._max_early = max_early
        self._early: dict[tuple[Peer, AttemptKey], tuple[float, ReceiverMessage]] = {}
        # The hand-offs that were closed last: late grants of them are answered at once.
        self._closed: OrderedDict[tuple[Peer, AttemptKey], None] = OrderedDict()
        self._in_doubt: dict[Peer, set[AttemptKey]] = {}  # into pages that late bytes may still reach

    def is_closed(self, peer: Peer, key: AttemptKey) -> bool:
        return (peer, key) in self._closed

    def close(self, peer: Peer, key: AttemptKey, *, in_doubt: bool = False) -> None:
        self._closed[peer, key] = None
        if len(self._closed) > MAX_CLOSED:
            self._closed.popitem(last=False)
        if in_doubt:
            self._in_doubt.setdefault(peer, set()).add(key)

    def take(self, peer: Peer, key: AttemptKey) -> ReceiverMessage | None:
        """Return the grant that overtook a placement, if one did; it is no longer kept."""
        _, message = self._early.pop((peer, key), (0.0, None))
        return message

    def handle(self, message: ReceiverMessage, now_s: float) -> list[Result]:
        """Answer a message about a hand-off that is not open."""
        name = (message.peer, message.key)
        if isinstance(message.event, Grant) and name not in self._closed and len(self._early) < self._max_early:
            self._early[name] = (now_s, message)
            return []
        if not isinstance(message.event, Grant | Withdrawn):
            return []
        self._early.pop(name, None)
        if message.key in self._in_doubt.get(message.peer, ()):
            return []  # Quiesced would be a guess: bytes may still land
        return [self._give_back(message, "unknown here")]

    def expire(self, now_s: float) -> list[Result]:
        """Give back early grants whose placement has not come."""
        expired = [message for since_s, message in self._early.values() if now_s - since_s > EARLY_GRANT_S]
        for message in expired:
            del self._early[message.peer, message.key]
        return [self._give_back(message, "never placed here") for message in expired]

    def lose(self, peer: Peer) -> None:
        """Drop the early grants of a peer whose stream has ended: it has withdrawn them."""
        self._early = {name: early for name, early in self._early.items() if name[0] != peer}

    def forget(self, peer: Peer) -> None:
        """Drop what is kept for a peer whose process has ended."""
        self.lose(peer)
        self._in_doubt.pop(peer, None)

    def _give_back(self, message: ReceiverMessage, reason: str) -> Result:
        """Answer for a hand-off that is not here, and will not be from now on."""
        self.close(message.peer, message.key)
        return ToReceiver(message.peer, message.key, Quiesced(reason))


@dataclass(slots=True, eq=False)
class _Handoff:
    """One hand-off, from its placement until its pages are released."""

    sender: Sender
    held: list[PageId] = field(default_factory=list)  # the pages that are announced, in order
    sendable_s: float = 0.0  # when the last page was final, or its room known
    draining_s: float = 0.0  # given up, and waiting for its copies to stop
    landed_s: float = 0.0  # committed, and waiting for the answer

    @property
    def is_stuck(self) -> bool:
        """Whether its copies do not stop. The peer may be frozen; then the pages come back when one process ends."""
        return self.draining_s >= STUCK_S


class Outgoing:
    def __init__(self, pool: PagePool, max_early: int, num_parts: int = 1) -> None:
        """`num_parts`: one for each rank that copies."""
        self._pool = pool
        self._num_parts = num_parts
        self._handoffs: dict[AttemptKey, _Handoff] = {}
        self._early = EarlyGrants(max_early)
        self._redialling = Redialling()
        self._ticked_s = 0.0

    @property
    def num_open(self) -> int:
        return len(self._handoffs)

    @property
    def states(self) -> list[State]:
        return [handoff.sender.state for handoff in self._handoffs.values()]

    @property
    def has_only_stuck(self) -> bool:
        """Whether all open hand-offs have copies that do not stop: their peers may be frozen."""
        return all(handoff.is_stuck for handoff in self._handoffs.values())

    @property
    def num_stuck_pages(self) -> int:
        """Return how many pages stuck copies may still read."""
        return len({page for handoff in self._handoffs.values() if handoff.is_stuck for page in handoff.held})

    def claims(self) -> Iterator[doors.Claim]:
        return (doors.Claim(held=handoff.held) for handoff in self._handoffs.values())

    def is_open(self, key: AttemptKey) -> bool:
        return key in self._handoffs

    def half(self, key: AttemptKey) -> Sender | None:
        """Return this process's half of an open hand-off, for reading."""
        handoff = self._handoffs.get(key)
        return None if handoff is None else handoff.sender

    def is_closed(self, peer: Peer, key: AttemptKey) -> bool:
        return self._early.is_closed(peer, key)

    def open(self, key: AttemptKey, peer: Peer, address: str, now_s: float) -> list[Result]:
        handoff = self._handoffs[key] = _Handoff(Sender(peer, key, self._num_parts))
        connect = self._redialling.named(peer, address)
        early = self._early.take(peer, key)
        return [connect, *(self._advance(handoff, early.event, now_s) if early else ())]

    def announce(self, key: AttemptKey, pages: Sequence[PageId], now_s: float) -> list[Result]:
        """Send the pages that are final, all from the first one on. They are held until they are sent."""
        handoff = self._handoffs[key]
        ready = tuple(pages[len(handoff.held) :])
        self._pool.share(ready)
        handoff.held += ready
        return self._advance(handoff, sender.PagesReady(ready), now_s) if ready else []

    def finish(self, key: AttemptKey, capsule: Capsule, now_s: float) -> list[Result]:
        """Commit a hand-off, all of whose pages are announced, once they have landed."""
        handoff = self._handoffs[key]
        handoff.sendable_s = max(handoff.sendable_s, now_s)
        return self._advance(handoff, sender.PrefillDone(capsule), now_s)

    def give_up(self, key: AttemptKey, reason: str, now_s: float) -> list[Result]:
        """End a hand-off, if it is open: its request has ended here."""
        handoff = self._handoffs.get(key)
        return [] if handoff is None else self._advance(handoff, doors.RequestEnded(reason), now_s)

    def handle(self, event: doors.OutgoingEvent, now_s: float) -> list[Result]:
        """Take in one event. ProtocolError is the peer's and changes nothing."""
        match event:
            case ReceiverMessage(peer, key, message):
                handoff = self._handoffs.get(key)
                if handoff is None or handoff.sender.peer != peer:
                    return self._early.handle(event, now_s)
                return self._advance(handoff, message, now_s)
            case doors.ReceiverAttached(peer):
                self._redialling.stop(peer)
                return [doors.Probe(peer)]
            case doors.ReceiverLost(peer):
                self._redialling.lose(peer, now_s)
                self._early.lose(peer)
                return self._lose(event, now_s)
            case doors.PeerGone(peer):
                self._redialling.forget(peer)
                self._early.forget(peer)
                return self._lose(doors.ReceiverLost(peer, "the peer's process ended"), now_s)

    def tick(self, silent_s: float, now_s: float) -> list[Result]:
        """Let time pass. `silent_s`: how long this process has sent nothing."""
        awake_s = min(now_s - self._ticked_s, 2 * doors.HEARTBEAT_S)  # in a longer gap this process was frozen
        self._ticked_s = now_s
        results: list[Result] = []
        for handoff in list(self._handoffs.values()):
            if silent_s > MIN_LEASE_S:  # it was frozen: it starts no more copies under leases that have lapsed
                results += self._advance(handoff, sender.FellSilent(silent_s), now_s)
            if handoff.sender.state is State.DRAINING:
                handoff.draining_s += awake_s
            elif handoff.sender.state is State.LANDED:
                handoff.landed_s += awake_s
                if handoff.landed_s >= ANSWER_S:
                    lost = doors.ReceiverLost(handoff.sender.peer, f"no answer within {ANSWER_S:g} s")
                    results += self._advance(handoff, lost, now_s)
        return results + self._early.expire(now_s) + self._redialling.dial(now_s)

    def _lose(self, lost: doors.ReceiverLost, now_s: float) -> list[Result]:
        handoffs = [handoff for handoff in self._handoffs.values() if handoff.sender.peer == lost.peer]
        return [result for handoff in handoffs for result in self._advance(handoff, lost, now_s)]

    def _advance(self, handoff: _Handoff, event: sender.Event, now_s: float) -> list[Result]:
        commands = handoff.sender.handle(event)
        results: list[Result] = []
        if isinstance(event, Grant):
            handoff.sendable_s = max(handoff.sendable_s, now_s)
            results.append(doors.Granted(handoff.sender.key))
        for command in commands:
            results += self._perform(handoff, command, now_s)
        if isinstance(event, Taken) and handoff.sender.state is State.CLOSED:
            results.append(doors.Sent(handoff.sender.key))
        return results

    def _perform(self, handoff: _Handoff, command: sender.Command, now_s: float) -> Iterator[Result]:
        peer, key = handoff.sender.peer, handoff.sender.key
        match command:
            case Commit():
                yield ToReceiver(peer, key, replace(command, handoff_s=now_s - handoff.sendable_s))
            case PagesLanded() | Quiesced():
                yield ToReceiver(peer, key, command)
            case sender.ReleasePages():
                del self._handoffs[key]
                self._pool.release(tuple(handoff.held))
                self._early.close(peer, key, in_doubt=handoff.sender.state is State.IN_DOUBT)
            case doors.StartCopy() | doors.CancelCopies() | doors.Unsent():
                yield command
