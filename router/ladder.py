"""Where a request's time went: when it reached each rung of its life, and the ledger made of that.

Invariant: the steps are in time order, start at "received" with 0, and the parts up to "first_token" add up to
the time to first token.
"""

from enum import StrEnum
from math import inf

from pdserve.values import value


class Rung(StrEnum):
    RECEIVED = "received"
    TOKENIZED = "tokenized"
    ADMITTED = "admitted"
    PLACED = "placed"
    PREFILL_QUEUED = "prefill_queued"
    PREFILL_STARTED = "prefill_started"
    PREFILL_DONE = "prefill_done"
    FIRST_TOKEN = "first_token"
    GRANTED = "granted"
    LANDED = "landed"
    COMMITTED = "committed"
    DECODE_JOINED = "decode_joined"
    FINISHED = "finished"


LADDER = tuple(Rung.__members__.values())  # the order told for rungs reached at the same moment
# What happens on workers is known a message's way late, so of two rungs in one line the later bounds the earlier.
_PREFILL = (Rung.PREFILL_QUEUED, Rung.PREFILL_STARTED, Rung.PREFILL_DONE, Rung.FIRST_TOKEN)
_HANDOFF = (Rung.GRANTED, Rung.LANDED, Rung.COMMITTED, Rung.DECODE_JOINED)
_FIRST_TOKEN = Rung.FIRST_TOKEN
_BEFORE_FIRST_TOKEN = frozenset(LADDER[: LADDER.index(_FIRST_TOKEN)])


@value
class Usage:
    prompt_tokens: int
    completion_tokens: int  # over all continuations
    cached_tokens: int


@value
class Ledger:
    steps: tuple[tuple[Rung, float], ...]  # milliseconds after "received"
    prefill_worker: str
    decode_worker: str
    attempts: int
    decision: str
    handoff_bytes: int
    handoff_ms: float
    handoff_pages_reused: int
    ttft_ms: float
    tpot_ms: float
    predicted_ttft_ms: float | None = None  # None: the policy does not predict
    predicted_tpot_ms: float | None = None


class Ladder:
    """Moments at which one request reached its rungs."""

    def __init__(self, received_s: float) -> None:
        self._received_s = received_s
        self._reached_s = {Rung.RECEIVED: received_s}

    def reach(self, rung: Rung, at_s: float) -> None:
        """Note that `rung` was reached.

        A later attempt overwrites an earlier one's rungs, except those that led to the first token: that one is
        with the client and is not drawn again.
        """
        at_s, reached_s = max(at_s, self._received_s), self._reached_s
        if rung is _FIRST_TOKEN:
            reached_s.setdefault(rung, at_s)
            for earlier in _BEFORE_FIRST_TOKEN & reached_s.keys():
                reached_s[earlier] = min(reached_s[earlier], at_s)
        elif rung in _BEFORE_FIRST_TOKEN and _FIRST_TOKEN in reached_s:
            reached_s.setdefault(rung, min(at_s, reached_s[_FIRST_TOKEN]))
        else:
            reached_s[rung] = at_s

    def start_over(self) -> None:
        """Forget the hand-off of an attempt that has failed."""
        for rung in _HANDOFF:
            self._reached_s.pop(rung, None)

    def ms(self, rung: Rung) -> float:
        """Return milliseconds from "received" to `rung`; 0 where it was not reached."""
        return (self._reached_s.get(rung, self._received_s) - self._received_s) * 1e3

    def steps(self) -> tuple[tuple[Rung, float], ...]:
        """Return the rungs reached, in time order."""
        for line in (_PREFILL, _HANDOFF):
            self._order(line)
        reached, received_s = [rung for rung in LADDER if rung in self._reached_s], self._received_s
        reached.sort(key=self._reached_s.__getitem__)
        return tuple([(rung, (self._reached_s[rung] - received_s) * 1e3) for rung in reached])

    def _order(self, line: tuple[Rung, ...]) -> None:
        bound_s = inf
        reached_s = self._reached_s
        for rung in reversed(line):
            if rung in reached_s:
                bound_s = reached_s[rung] = min(reached_s[rung], bound_s)
