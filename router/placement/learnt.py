"""What a router learns of its cluster beside links: costs of steps, lengths of answers, arrivals, fetches. Pure."""

from math import exp
from typing import NamedTuple

from pdserve.base.roles import Role
from pdserve.perfmodel.curve import StepCosts
from pdserve.perfmodel.model import LATELY_S, LATEST, MEMORY, LearntCosts, costs_of_trial
from pdserve.protocol.kvlayout import KvLayout
from pdserve.router.placement.view import WorkerView
from pdserve.router.requests.events import LinkId, Registration

MAX_KINDS = 64  # remembered without a worker of theirs
_START_TOKENS = 128.0  # of an answer, before one was seen
PairName = tuple[str, str]  # of a fetch: holder and receiver
_LIFE_S = 60.0  # in which what was seen of fetches and moves fades to 1/e


class Kind(NamedTuple):
    """Workers whose steps cost the same."""

    role: Role  # PREFILL or DECODE
    device: str  # empty: unknown
    layout: KvLayout


class CostsByKind:
    """One model of steps for each kind of worker: an A100 among H100s has a curve of its own.

    Invariant: workers of one role, device and layout share what is learnt, and no others do. Mixed workers count as
    decode workers: both compute prompts beside what they decode. With one kind for all roles the predictions of four
    simulated routers are worse: the median error of a time to first token is 7.1 % in place of 5.8.
    """

    def __init__(self, start: dict[Role, StepCosts]) -> None:
        """`start`: what a kind of which nothing was seen is taken to cost; else what its first worker has measured."""
        self._start = start
        self._by_kind: dict[Kind, LearntCosts] = {}  # the kind whose first worker came last comes last
        self._by_link: dict[LinkId, tuple[Registration, LearntCosts]] = {}

    def of(self, worker: WorkerView) -> LearntCosts:
        known = self._by_link.get(worker.link)
        if known is not None and known[0] is worker.registration:
            return known[1]
        registration = worker.registration
        role = Role.DECODE if registration.role.is_in(Role.DECODE) else Role.PREFILL
        kind = Kind(role, registration.device, registration.layout)
        costs = self._by_kind.get(kind)
        if costs is None:
            start = self._start.get(kind.role) or costs_of_trial(registration.trial)
            costs = self._by_kind[kind] = LearntCosts(start)
        self._by_link[worker.link] = registration, costs
        return costs

    def forget(self, worker: WorkerView) -> None:
        """Take note that a worker has left. What was learnt of its kind stays for the next one."""
        self._by_link.pop(worker.link, None)
        if len(self._by_kind) > MAX_KINDS:
            used = {id(costs) for _, costs in self._by_link.values()}
            unused = [kind for kind, costs in self._by_kind.items() if id(costs) not in used]
            for kind in unused[: len(self._by_kind) - MAX_KINDS]:
                del self._by_kind[kind]

    def kinds(self) -> list[tuple[Kind, LearntCosts]]:
        return list(self._by_kind.items())


class Mean:
    """A mean of the last MEMORY observations or so: an older one weighs less, and the start value no more than one."""

    def __init__(self, start: float) -> None:
        self.value = start
        self._num_observed = 1

    def observe(self, seen: float) -> None:
        self._num_observed = min(MEMORY, self._num_observed + 1)
        self.value += (seen - self.value) / self._num_observed


class AnswerLengths:
    """Learns how long answers get, and guesses how long the next one will be.

    Two guesses compete: the mean of the answers so far, and the mean share of what requests allowed. Where clients ask
    for what they need, the second is right; where they ask for more than they need, the first. Whichever was nearer
    lately is believed. Where a client says how long its answer will be, that is believed while such words were nearer
    lately than the guess.
    """

    def __init__(self) -> None:
        self.tokens, self._share = Mean(_START_TOKENS), Mean(1.0)
        self._errors = Mean(0.0), Mean(0.0)  # of |guess - tokens|: by the mean, by the share
        self._overdue_tokens = Mean(_START_TOKENS)
        self._hint_errors = Mean(0.0), Mean(0.0)  # of answers with hints: by the hint, by the guess

    @property
    def mean_tokens(self) -> float:
        return self.tokens.value

    def observe(self, num_tokens: int, max_tokens: int, hinted: int = 0) -> None:
        """Learn from an answer that has ended. `hinted`: the tokens that its client expected; 0: it did not say."""
        # What a client said does not count here: a false word of one would make others' answers seem long.
        excess = num_tokens - self.expected(max_tokens)
        if hinted:
            for error, guess in zip(self._hint_errors, (hinted, self.expected(max_tokens)), strict=True):
                error.observe(abs(guess - num_tokens))
        if excess >= 0:
            self._overdue_tokens.observe(excess)
        for error, guess in zip(self._errors, self._guesses(max_tokens), strict=True):
            error.observe(abs(guess - num_tokens))
        self.tokens.observe(num_tokens)
        self._share.observe(num_tokens / max(1, max_tokens))

    def expected(self, max_tokens: int, hinted: int = 0) -> float:
        by_hint_error, by_guess_error = self._hint_errors
        if hinted and by_hint_error.value <= by_guess_error.value:
            return min(hinted, max_tokens)
        by_mean, by_share = self._guesses(max_tokens)
        by_mean_error, by_share_error = self._errors
        return by_share if by_share_error.value < by_mean_error.value else by_mean

    def left(self, num_tokens: int, max_tokens: int, hinted: int = 0) -> float:
        """Return how many tokens an answer that has so many will probably still gain."""
        return min(max_tokens - num_tokens, max(self.expected(max_tokens, hinted) - num_tokens, self.overdue_tokens))

    @property
    def overdue_tokens(self) -> float:
        """Mean number of tokens still to come of an answer that has as many as were expected: the mean residual life.

        At least the token that is being computed.
        """
        return max(1.0, self._overdue_tokens.value)

    def _guesses(self, max_tokens: int) -> tuple[float, float]:
        return min(self.mean_tokens, max_tokens), self._share.value * max_tokens


class Rates:
    """Of what was sent to each worker lately: sums that fade with time."""

    def __init__(self) -> None:
        self._sums: dict[LinkId, tuple[float, float, float]] = {}  # a sum, when it was that, and when it began

    def add(self, worker: WorkerView, amount: float, now_s: float) -> None:
        before, at_s, since_s = self._sums.get(worker.link, (0.0, now_s, now_s))
        self._sums[worker.link] = before * exp((at_s - now_s) / LATELY_S) + amount, now_s, since_s

    def rate(self, worker: WorkerView, now_s: float) -> float:
        amount, at_s, since_s = self._sums.get(worker.link, (0.0, now_s, now_s))
        seen_s = LATELY_S * (1 - exp(min(0.0, (since_s - now_s) / LATELY_S)))
        return amount * exp((at_s - now_s) / LATELY_S) / max(0.1 * LATELY_S, seen_s)

    def forget(self, worker: WorkerView) -> None:
        self._sums.pop(worker.link, None)


class Fading:
    """A mean of what was seen lately. It fades to where it began: what has gone wrong is tried again some day."""

    def __init__(self, start: float, now_s: float) -> None:
        self._start = self._mean = start
        self._at_s = now_s

    def value(self, now_s: float) -> float:
        return self._start + (self._mean - self._start) * exp(min(0.0, self._at_s - now_s) / _LIFE_S)

    def observe(self, seen: float, now_s: float) -> None:
        before = self.value(now_s)
        self._mean, self._at_s = before + LATEST * (seen - before), now_s


class Fetches:
    """Learns which share of each pair's fetches arrives, and with what delay."""

    def __init__(self) -> None:
        self._records: dict[PairName, tuple[Fading, Fading]] = {}  # share and delay

    def expected(self, pair: PairName, now_s: float) -> tuple[float, float]:
        """Return the share that will probably come, and the delay beyond what the link takes, seconds."""
        record = self._records.get(pair)
        if record is None:
            return 1.0, 0.0
        share, delay = record
        return share.value(now_s), max(0.0, delay.value(now_s))

    def observe(self, pair: PairName, share: float, late_s: float, now_s: float) -> None:
        """Take in which share of a fetch came, and how much later than predicted without what is learnt here."""
        shares, delays = self._records.setdefault(pair, (Fading(1.0, now_s), Fading(0.0, now_s)))
        shares.observe(share, now_s)
        delays.observe(late_s, now_s)

    def forget(self, worker: str) -> None:
        self._records = {pair: record for pair, record in self._records.items() if worker not in pair}
