"""Counts of what clients asked for and what became of it, and the latest events for the live page. Pure.

Invariant: each list holds its newest entries up to its limit; of a request it holds lengths, times and names, and never
a token or a text.
"""

from collections import Counter, deque
from dataclasses import dataclass
from enum import StrEnum

from pdserve.base.ids import RequestId
from pdserve.base.values import value
from pdserve.protocol import drafts
from pdserve.protocol.refusal import Refused, Status
from pdserve.protocol.reports import NUM_BANDS, Demand, band_of
from pdserve.router.requests.commands import Finished
from pdserve.router.requests.request import Request
from pdserve.router.requests.timeline import Ledger, Timeline, Usage

MAX_ENDED = 256
MAX_HAPPENINGS = 256
MAX_SECONDS = 300
MAX_TEXT = 1000  # characters of a happening
_TOGETHER_S = 5.0  # in which a happening that repeats itself is one with a count


@value
class Verdict:
    """Which objectives a request met. One that was not asked for is met unless the request was refused."""

    ttft: bool
    tpot: bool


_MISSED = Verdict(ttft=False, tpot=False)


def judge(slo_s: tuple[float | None, float | None], outcome: Finished | Refused) -> Verdict | None:
    """Judge an end by the objectives for TTFT and TPOT; None without objectives, or where the client left."""
    ttft_s, tpot_s = slo_s
    if ttft_s is None and tpot_s is None:
        return None
    if isinstance(outcome, Refused):
        return None if outcome.status is Status.CANCELLED else _MISSED
    ledger = outcome.ledger
    return Verdict(
        ttft=ttft_s is None or ledger.ttft_ms <= ttft_s * 1e3, tpot=tpot_s is None or ledger.tpot_ms <= tpot_s * 1e3
    )


class DemandCounts:
    """Demand since the router's start.

    Invariant: each request, but for preparations of next turns, is counted once when it arrives, once in `prompts` when
    it is first placed or ends unplaced, and once when it ends.
    """

    def __init__(self) -> None:
        self._sums = Counter[str]()  # by the fields of Demand
        self._prompts, self._answers = [0] * NUM_BANDS, [0] * NUM_BANDS

    def count_arrival(self, request: Request) -> None:
        if request.is_preparation:
            return
        self._sums["num_requests"] += 1
        self._sums["prompt_tokens"] += request.num_tokens
        if request.params.pooling is not None:
            self._sums["num_pooled"] += 1
            self._sums["pooled_tokens"] += request.num_tokens

    def count_placed(self, request: Request, cached_tokens: int) -> None:
        """Count a request that is placed for the first time, and so many tokens of its prompt as not computed."""
        if request.is_preparation:
            return
        self._sums["cached_tokens"] += cached_tokens
        self._prompts[band_of(request.num_tokens - cached_tokens)] += 1

    def count_end(self, request: Request, outcome: Finished | Refused) -> None:
        if not request.is_admitted:
            self._prompts[band_of(request.num_tokens)] += 1
        for sequence in request.sequences:
            num_tokens = len(sequence.token_ids)
            self._sums["answer_tokens"] += num_tokens
            if isinstance(outcome, Finished) and request.params.pooling is None:
                self._answers[band_of(num_tokens)] += 1
        verdict = judge(request.slo_s, outcome)
        if verdict is not None:
            self._sums["num_judged"] += 1
            self._sums["num_within_ttft"] += verdict.ttft
            self._sums["num_within_tpot"] += verdict.tpot
            self._sums["num_within_both"] += verdict.ttft and verdict.tpot

    def counted(self) -> Demand:
        return Demand(prompts=tuple(self._prompts), answers=tuple(self._answers), **self._sums)


class Kind(StrEnum):
    ATTACHED = "attached"
    READY = "ready"
    ROLE = "role"
    DRAIN = "drain"
    MOVE = "move"
    SCALING = "scaling"
    WARNING = "warning"


@value
class Happening:
    key: int  # stays while the count grows
    at_s: float
    kind: Kind
    subject: str  # a worker, or empty
    text: str
    count: int


@value
class Ended:
    number: int
    at_s: float
    request_id: RequestId
    tenant: str
    usage: Usage
    slo_s: tuple[float | None, float | None]  # asked for TTFT and TPOT
    outcome: Finished | Refused
    ledger: Ledger
    timeline: Timeline


@dataclass(slots=True)
class Second:
    at: int  # whole seconds of the core's clock
    num_ended: int = 0  # requests; a client that left counts for nothing
    num_missed: int = 0  # of these, those that missed an objective or have no answer
    num_judged: int = 0  # requests with objectives
    num_met: int = 0  # those that met theirs
    num_answer_tokens: int = 0  # of all requests that ended


class Recent:
    def __init__(self) -> None:
        self.now_s = 0.0  # of the event that the core handles
        self._number = 0  # of the newest entry
        self.ended: deque[Ended] = deque(maxlen=MAX_ENDED)
        self.happenings: deque[Happening] = deque(maxlen=MAX_HAPPENINGS)
        self.seconds: deque[Second] = deque(maxlen=MAX_SECONDS)
        self.drafts: drafts.BySource = {}  # how guesses turned out, of all requests that ended

    def note(self, kind: Kind, subject: str, text: str) -> None:
        """Add a happening. The same one again within _TOGETHER_S only raises the count of the last."""
        self._number += 1
        text, key, count = text[:MAX_TEXT], self._number, 1
        last = self.happenings[-1] if self.happenings else None
        is_same = last is not None and (last.kind, last.subject, last.text) == (kind, subject, text)
        if last is not None and is_same and self.now_s < last.at_s + _TOGETHER_S:
            key, count = last.key, last.count + 1
            self.happenings.pop()
        self.happenings.append(Happening(key, self.now_s, kind, subject, text, count))

    def keep_end(self, request: Request, outcome: Finished | Refused) -> None:
        self._number += 1
        drafts.add(self.drafts, request.ledger.drafts)
        self.ended.append(
            Ended(
                number=self._number,
                at_s=self.now_s,
                request_id=request.request_id,
                tenant=request.tenant,
                usage=request.usage(),
                slo_s=request.slo_s,
                outcome=outcome,
                ledger=request.ledger,
                timeline=request.timeline,
            )
        )
        self._count(request, outcome)

    def _count(self, request: Request, outcome: Finished | Refused) -> None:
        at = int(self.now_s)
        if not self.seconds or self.seconds[-1].at != at:
            self.seconds.append(Second(at))
        second, verdict = self.seconds[-1], judge(request.slo_s, outcome)
        second.num_answer_tokens += request.num_delivered
        if isinstance(outcome, Refused) and outcome.status is Status.CANCELLED:
            return
        is_met = not isinstance(outcome, Refused) if verdict is None else verdict.ttft and verdict.tpot
        second.num_ended += 1
        second.num_missed += not is_met
        if verdict is not None:
            second.num_judged += 1
            second.num_met += is_met
