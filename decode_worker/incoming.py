"""The incoming door of a worker: KV that arrives. Decides; does no I/O.

Invariant: pages that were granted to a sender become free, or a sequence's, only when the receiver's half of the
hand-off decides so.

A continuation that moves here is decoded at its sender until pages are granted to it, and while most of them are
copied. They are not granted during a long step: the continuation would wait here for the end of that step.
"""

from collections.abc import Iterator
from math import inf

from pdserve.base.errors import PeerFault, ProtocolError
from pdserve.base.ids import AttemptKey, Peer
from pdserve.decode_worker import receiver
from pdserve.decode_worker.granting import Arrival, Expected, Granting, Leases
from pdserve.engine.kvcache import KvCache
from pdserve.engine.scheduler import Scheduler
from pdserve.engine.sequence import Job
from pdserve.kvtransfer import doors
from pdserve.kvtransfer.doors import Result
from pdserve.kvtransfer.session import Capsule, Commit, FromSender, Grant, Quiesced, Taken, Withdrawn
from pdserve.protocol.paging import Paging
from pdserve.protocol.reports import Failure

# Most moves arrive sooner after their grant; those with many pages, or over a slow pair, do not. Not tuned.
CUT_OVER_S = 0.5
_MAY_COME = (receiver.State.GRANTED, receiver.State.LANDING)


class Incoming:
    def __init__(
        self, scheduler: Scheduler, granting: Granting, lease_s: float, vocab_size: int, page_bytes: int
    ) -> None:
        self._scheduler = scheduler
        self._granting = granting
        self._leases = Leases(lease_s)
        self._vocab_size = vocab_size
        self._page_bytes = page_bytes
        self._ungranted: dict[AttemptKey, Expected] = {}  # wait for pages, most urgent first
        self._arrivals: dict[AttemptKey, Arrival] = {}
        self._moves: dict[AttemptKey, Arrival] = {}  # those of the arrivals that are running continuations
        self._has_come = False  # a running continuation was admitted since the last step was planned
        self.num_digest_mismatches = 0

    @property
    def _cache(self) -> KvCache:
        return self._scheduler.cache

    @property
    def num_open(self) -> int:
        """Return how many hand-offs have pages set aside."""
        return len(self._arrivals)

    @property
    def num_ungranted(self) -> int:
        return len(self._ungranted)

    @property
    def pages_wanted(self) -> int:
        return sum(expected.num_pages(self._cache.paging) for expected in self._ungranted.values())

    @property
    def states(self) -> list[receiver.State]:
        return [arrival.receiver.state for arrival in self._arrivals.values()]

    def claims(self) -> Iterator[doors.Claim]:
        return (arrival.claim for arrival in self._arrivals.values())

    def is_open(self, key: AttemptKey) -> bool:
        return key in self._arrivals

    def is_ungranted(self, key: AttemptKey) -> bool:
        return key in self._ungranted

    @property
    def is_stuck(self) -> bool:
        """Whether no hand-off goes on that could give pages back. Quarantined ones wait for others."""
        return all(arrival.is_quarantined for arrival in self._arrivals.values())

    def expect(self, expected: Expected) -> None:
        """Set pages aside for a hand-off as soon as there are some."""
        waiting = [*self._ungranted.values(), expected]
        self._ungranted = {each.key: each for each in sorted(waiting, key=lambda each: each.urgency)}

    def awaits_move(self, since_s: float = -inf) -> bool:
        """Whether a continuation may arrive at any moment, of those that were granted pages after `since_s`."""
        return any(move.receiver.state in _MAY_COME and move.offered_s > since_s for move in self._moves.values())

    def wants_brief_step(self, now_s: float) -> bool:
        """Whether the next step is to be short: a continuation may arrive during it, or has just arrived."""
        return self._has_come or self.awaits_move(now_s - CUT_OVER_S)

    def note_step(self) -> None:
        """Note that a step was planned: it includes the continuations that have arrived."""
        self._has_come = False

    def grant_waiting(self, now_s: float) -> list[Result]:
        """Reserve pages for hand-offs in their order, while there is room beside what runs."""
        results = self._offer_moves(now_s)
        while self._ungranted:
            key, expected = next(iter(self._ungranted.items()))
            granted = self._grant(expected)
            if not granted:
                break
            del self._ungranted[key]
            results += granted
        return results

    def expect_now(self, expected: Expected) -> list[Result]:
        """Set pages aside for a hand-off, unless others wait for pages or there is no room: then return nothing."""
        return [] if self._ungranted else self._grant(expected)

    def _grant(self, expected: Expected) -> list[Result]:
        num_coming = sum([a.expected.num_sequences for a in self._arrivals.values() if not a.is_quarantined])
        arrival = self._granting.reserve(expected, num_coming)
        if arrival is None:
            return []
        self._arrivals[expected.key] = arrival
        if expected.is_move:
            self._moves[expected.key] = arrival
        is_offered = not expected.is_move and self._leases.holds(expected.peer)
        offered = self._advance(arrival, doors.SenderAttached(expected.peer)) if is_offered else []
        return [doors.Reserved(expected.key, arrival.reused.num_spans), *offered]

    def _offer_moves(self, now_s: float) -> list[Result]:
        """Grant continuations that move here the pages set aside for them, unless a long step is under way."""
        if not self._moves or any(
            step.num_prompt_tokens > self._cache.paging.few_tokens for step in self._scheduler.steps
        ):
            return []
        waiting = [move for move in self._moves.values() if move.receiver.state is receiver.State.RESERVED]
        results: list[Result] = []
        for move in waiting:
            if self._leases.holds(move.expected.peer):
                move.offered_s = now_s
                results += self._advance(move, doors.SenderAttached(move.expected.peer))
        return results

    def give_up(self, key: AttemptKey, reason: str) -> list[Result]:
        """End a hand-off, if there is one: its request has ended here. Its pages are free once they are safe."""
        self._ungranted.pop(key, None)
        arrival = self._arrivals.get(key)
        return [] if arrival is None else self._advance(arrival, doors.RequestEnded(reason))

    def handle(self, event: doors.IncomingEvent, now_s: float) -> list[Result]:
        """Take in one event. ProtocolError is the peer's and changes nothing."""
        match event:
            case doors.SenderMessage(peer, key, message):
                return self._take(peer, key, message)
            case doors.DigestsChecked(key):
                arrival = self._arrivals.get(key)
                return [] if arrival is None else self._advance(arrival, event)
            case doors.SenderAttached(peer):
                self._leases.begin(peer, now_s)
                return self._attach(peer)
            case doors.SenderAlive(peer):
                is_back = self._leases.renew(peer, now_s)
                return self._attach(peer) if is_back else []
            case doors.SenderLost(peer):
                self._leases.end(peer)
                return self._advance_all(peer, event)
            case doors.PeerGone(peer):
                self._leases.end(peer)
                lost = [key for key, expected in self._ungranted.items() if expected.peer == peer]
                reason = "the sender's process ended"
                failed = [self._drop(key, Failure.PEER_LOST, reason) for key in lost]
                return [*failed, *self._advance_all(peer, event)]

    def tick(self, silent_s: float, now_s: float) -> list[Result]:
        """Give up grants to senders whose leases have lapsed. Time in which this process was frozen does not count."""
        self._leases.excuse(max(0.0, silent_s - 2 * doors.HEARTBEAT_S), now_s)
        results: list[Result] = []
        for peer, reason in self._leases.take_lapsed(now_s):
            results += self._advance_all(peer, receiver.LeaseLapsed(reason))
        return results

    def _take(self, peer: Peer, key: AttemptKey, message: FromSender) -> list[Result]:
        arrival = self._arrivals.get(key)
        if arrival is None:
            expected = self._ungranted.get(key)
            if expected is None or expected.peer != peer or not isinstance(message, Quiesced):
                return []  # late news of a hand-off that is over
            return [self._drop(key, Failure.SENDER_GAVE_UP, message.reason)]
        expected = arrival.expected
        if expected.peer != peer:
            raise ProtocolError(f"{peer} speaks for a hand-off of {expected.peer}", PeerFault.INCARNATION)
        if not isinstance(message, Commit):
            return self._advance(arrival, message)
        if expected.is_prefix:
            check_prefix(expected.num_tokens, message.capsule, self._cache.paging)
        else:
            check_capsule(expected.job, message.capsule, self._vocab_size)
        results = self._advance(arrival, message)
        if arrival.receiver.state not in (receiver.State.LANDING, receiver.State.COMMITTED):
            return results  # sent before the sender knew that we gave up
        return [doors.Landed(key, arrival.receiver.num_landed * self._page_bytes, message.handoff_s), *results]

    def _drop(self, key: AttemptKey, failure: Failure, reason: str) -> Result:
        """Set no pages aside for a hand-off that has failed before it was granted any."""
        del self._ungranted[key]
        return doors.NotAdmitted(key, failure, reason)

    def _attach(self, peer: Peer) -> list[Result]:
        """Send a sender that can be reached its grants, except those of moves: `_offer_moves` sends these."""
        unoffered = receiver.State.RESERVED
        arrivals = [a for a in self._arrivals_of(peer) if not a.expected.is_move or a.receiver.state is not unoffered]
        return [result for arrival in arrivals for result in self._advance(arrival, doors.SenderAttached(peer))]

    def _advance_all(self, peer: Peer, event: receiver.Event) -> list[Result]:
        return [result for arrival in self._arrivals_of(peer) for result in self._advance(arrival, event)]

    def _arrivals_of(self, peer: Peer) -> list[Arrival]:
        return [arrival for arrival in self._arrivals.values() if arrival.expected.peer == peer]

    def _advance(self, arrival: Arrival, event: receiver.Event) -> list[Result]:
        commands = arrival.receiver.handle(event)
        return [result for command in commands for result in self._perform(arrival, command)]

    def _perform(self, arrival: Arrival, command: receiver.Command) -> Iterator[Result]:
        pool, key, pages = self._cache.pool, arrival.expected.key, arrival.receiver.grant.pages
        match command:
            case Grant() | Taken() | Withdrawn():
                yield doors.ToSender(arrival.expected.peer, key, command)
            case receiver.Admit(capsule, num_pages):
                self._settle(arrival)
                self._has_come |= arrival.expected.is_move
                pool.adopt(pages[:num_pages])
                pool.ungrant(pages[num_pages:])
                tables = arrival.tables(self._cache, arrival.reused, capsule.num_tokens)
                yield doors.Admitted(key, tables, arrival.reused.num_spans, capsule)
            case receiver.QuarantinePages():
                self._granting.quarantine(arrival)
            case receiver.FreePages(num_checked):
                self._free(arrival, num_checked)
            case doors.NotAdmitted(_, failure):
                self.num_digest_mismatches += failure is Failure.DIGEST_MISMATCH
                yield command
            case doors.CheckDigests():
                yield command

    def _settle(self, arrival: Arrival) -> None:
        del self._arrivals[arrival.expected.key]
        self._moves.pop(arrival.expected.key, None)
        self._granting.settle(arrival)

    def _free(self, arrival: Arrival, num_checked: int) -> None:
        """Give back the pages of a hand-off that has failed. The full ones that were checked can be found."""
        self._settle(arrival)
        cache, prefix, order = self._cache, arrival.expected.prefix, arrival.order
        grant = arrival.receiver.grant
        num_before = order.num_tokens(grant.first_page) // cache.page_size
        reused = cache.reuse(prefix, num_before) if arrival.is_quarantined else arrival.reused
        (cache.pool.unquarantine if arrival.is_quarantined else cache.pool.ungrant)(grant.pages)
        num_tokens = min(order.num_tokens(grant.first_page + num_checked), len(arrival.expected.job.token_ids))
        # What comes for pages that have left a window since a move began is not what they held.
        if reused.num_spans == num_before and not (arrival.expected.is_move and cache.paging.has_windows):
            num_full = num_tokens // cache.page_size
            tables = arrival.tables(cache, reused, num_full * cache.page_size)
            cache.publish(prefix, tables, range(num_before, num_full))
        cache.pool.release(reused.pages.held)


def check_prefix(num_tokens: int, capsule: Capsule, paging: Paging) -> None:
    """Raise ProtocolError unless a capsule is about full spans of a prefix of so many tokens.

    With windows it is about all of them: which pages are sent depends on how many there are.
    """
    if capsule.tails:
        raise ProtocolError("capsule: tails for a prefix that is fetched")
    lacks = capsule.num_tokens < num_tokens and paging.has_windows
    if capsule.num_tokens % paging.span or capsule.num_tokens > num_tokens or lacks:
        raise ProtocolError(f"capsule: {capsule.num_tokens} tokens of a prefix of {num_tokens}")


def check_capsule(job: Job, capsule: Capsule, vocab_size: int) -> None:
    """Raise ProtocolError unless a capsule is about this job, and its pages can hold the tokens of its tails."""
    tails = capsule.tails
    if not tails:
        raise ProtocolError("capsule: no continuation goes on")
    if not {tail.index for tail in tails} <= set(job.indices):
        raise ProtocolError("capsule: not the continuations of this request")
    if any(token.token_id >= vocab_size for tail in tails for token in tail.tokens):
        raise ProtocolError("capsule: a token is not of this model's vocabulary")
    if any(tail.tokens[:-1] != tails[0].tokens[:-1] for tail in tails):
        raise ProtocolError("capsule: continuations that share pages differ in more than their last token")
    num_tokens = len(job.token_ids) + len(tails[0].tokens) - 1
    if capsule.num_tokens != num_tokens:
        raise ProtocolError(f"capsule: {capsule.num_tokens} tokens for {num_tokens}")
