"""Where a request's time went: when it reached each stage of its life, and the ledger made of that.

Invariant: the steps are in time order, start at "received" with 0, and the parts up to "first_token" add up to
the time to first token.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf

from pdserve.base.values import value
from pdserve.protocol.drafts import BySource
from pdserve.protocol.reports import Stage

STAGES = tuple(Stage.__members__.values())  # the order reported for stages reached at the same moment
# A stage on a worker is dated by when its message arrives, less the age that it names. How long the message was on its
# way is not known: so a stage is never shown later than the next one of its line.
_PREFILL = (Stage.PREFILL_QUEUED, Stage.FETCHED, Stage.PREFILL_STARTED, Stage.PREFILL_DONE, Stage.FIRST_TOKEN)
_HANDOFF = (Stage.GRANTED, Stage.LANDED, Stage.COMMITTED, Stage.DECODE_JOINED)
_FIRST_TOKEN = Stage.FIRST_TOKEN
# What a request goes through until it reaches a stage from the one before. The two lines go on at the same time.
_MAIN_LINE = {
    Stage.RECEIVED: "",
    Stage.TOKENIZED: "tokenize",
    Stage.ADMITTED: "admit",
    Stage.PLACED: "place",
    Stage.PREFILL_QUEUED: "send",
    Stage.FETCHED: "fetch",
    Stage.PREFILL_STARTED: "prefill.queue",
    Stage.PREFILL_DONE: "prefill",
    Stage.FIRST_TOKEN: "first_token",
    Stage.FINISHED: "decode",
}
_HANDOFF_LINE = {
    Stage.GRANTED: "",
    Stage.LANDED: "handoff.copy",
    Stage.COMMITTED: "handoff.check",
    Stage.DECODE_JOINED: "decode.queue",
}
_BEFORE_FIRST_TOKEN = frozenset(STAGES[: STAGES.index(_FIRST_TOKEN)])


@value
class Usage:
    prompt_tokens: int
    completion_tokens: int  # over all continuations
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Moved:
    """A continuation that went on on another worker; fields as in LedgerMove."""

    index: int
    num_tokens: int
    source: str
    target: str
    handoff_bytes: int
    handoff_ms: float


@dataclass(slots=True)
class Ledger:
    """Where a request was computed and where its time went. Filled while the request runs; complete at its end."""

    steps: tuple[tuple[Stage, float], ...] = ()  # milliseconds after "received"
    prefill_worker: str = ""
    decode_worker: str = ""
    attempts: int = 0
    decision: str = ""
    handoff_bytes: int = 0
    handoff_ms: float = 0.0
    handoff_pages_reused: int = 0
    ttft_ms: float = 0.0
    tpot_ms: float = 0.0
    predicted_ttft_ms: float | None = None  # None: the policy does not predict
    predicted_tpot_ms: float | None = None
    fetched_tokens: int = 0
    fetched_from: str = ""
    moves: tuple[Moved, ...] = ()
    drafts: BySource = field(default_factory=dict)


class Timeline:
    """Moments at which one request reached its stages."""

    def __init__(self, received_s: float) -> None:
        self._received_s = received_s
        self._reached_s = {Stage.RECEIVED: received_s}

    def reach(self, stage: Stage, at_s: float) -> None:
        """Note that `stage` was reached.

        A later attempt overwrites an earlier one's stages, except those that led to the first token: that one is
        with the client and is not drawn again.
        """
        at_s, reached_s = max(at_s, self._received_s), self._reached_s
        if stage is _FIRST_TOKEN:
            reached_s.setdefault(stage, at_s)
            for earlier in _BEFORE_FIRST_TOKEN & reached_s.keys():
                reached_s[earlier] = min(reached_s[earlier], at_s)
        elif stage in _BEFORE_FIRST_TOKEN and _FIRST_TOKEN in reached_s:
            reached_s.setdefault(stage, min(at_s, reached_s[_FIRST_TOKEN]))
        else:
            reached_s[stage] = at_s

    def start_over(self) -> None:
        """Forget the hand-off of an attempt that has failed, and its fetch, unless the first token followed it."""
        for stage in _HANDOFF if _FIRST_TOKEN in self._reached_s else (*_HANDOFF, Stage.FETCHED):
            self._reached_s.pop(stage, None)

    def __contains__(self, stage: Stage) -> bool:
        return stage in self._reached_s

    def ms(self, stage: Stage) -> float:
        """Return milliseconds from "received" to `stage`; 0 where it was not reached."""
        return (self._reached_s.get(stage, self._received_s) - self._received_s) * 1e3

    def steps(self) -> tuple[tuple[Stage, float], ...]:
        reached_s, received_s = self._reached_s.copy(), self._received_s
        for line in (_PREFILL, _HANDOFF):
            _order(reached_s, line)
        reached = [stage for stage in STAGES if stage in reached_s]
        reached.sort(key=reached_s.__getitem__)
        return tuple([(stage, (reached_s[stage] - received_s) * 1e3) for stage in reached])


def _order(reached_s: dict[Stage, float], line: tuple[Stage, ...]) -> None:
    bound_s = inf
    for stage in reversed(line):
        if stage in reached_s:
            bound_s = reached_s[stage] = min(reached_s[stage], bound_s)


def parts(steps: Iterable[tuple[Stage, float]]) -> Iterator[tuple[str, float, float]]:
    """Yield name, start and end of each part of a timeline, in the unit of `steps`.

    The parts from "received" to "finished" follow each other without a gap: those up to the first token add up to the
    time to first token. Those of the hand-off lie beside them.
    """
    reached = tuple(steps)
    for line in (_MAIN_LINE, _HANDOFF_LINE):
        for (_, start), (stage, end) in pairwise((stage, at) for stage, at in reached if stage in line):
            yield line[stage], start, end
