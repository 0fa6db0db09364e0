"""What a router learns of its cluster beside links: costs of steps, lengths of answers, arrivals, fetches. Pure."""

from dataclasses import dataclass
from math import exp

from pdserve.kvlayout import KvLayout
from pdserve.perfmodel.curve import StepCosts
from pdserve.perfmodel.model import LearntCosts
from pdserve.roles import Role
from pdserve.router.events import LinkId, Registration
from pdserve.router.view import WorkerView

MAX_KINDS = 64  # remembered without a worker of theirs
_MEMORY = 50  # answers in running means
_START_TOKENS = 128.0  # of an answer, before one was seen
PairName = tuple[str, str]  # of a fetch: holder and receiver
_START_SHARE = 0.8  # of a pair's fetches that arrive, before one was seen
_STEP = 0.3  # weight of the latest that was seen: after two fetches that did not arrive, no more are tried
_LIFE_S = 60.0  # in which what was seen fades to 1/e
_START_DELAY_S = 0.005  # of messages between router, holder and receiver, beyond the transfer
_RATE_S = 10.0  # over which, at least, rates of what was sent to a worker are taken


@dataclass(frozen=True, slots=True)
class Kind:
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
        """`start`: what a kind of which nothing was seen is taken to cost."""
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
            costs = self._by_kind[kind] = LearntCosts(self._start.get(kind.role))
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


class AnswerLengths:
    """Learns how long answers get, and guesses how long the next one will be.

    Two guesses compete: the mean of the answers so far, and the mean share of what requests allowed. Where clients ask
    for what they need, the second is right; where they ask for more than they need, the first. Whichever was nearer
    lately is believed.
    """

    def __init__(self) -> None:
        self.mean_tokens = _START_TOKENS
        self._share = 1.0
        self._errors = [0.0, 0.0]  # means of |guess - tokens|: by the mean, by the share
        self._overdue_tokens, self._num_reached = _START_TOKENS, 0

    def observe(self, num_tokens: int, max_tokens: int) -> None:
        excess = num_tokens - self.expected(max_tokens)
        if excess >= 0:
            self._num_reached += 1
            self._overdue_tokens += (excess - self._overdue_tokens) / min(_MEMORY, self._num_reached)
        for number, guess in enumerate(self._guesses(max_tokens)):
            self._errors[number] += (abs(guess - num_tokens) - self._errors[number]) / _MEMORY
        self.mean_tokens += (num_tokens - self.mean_tokens) / _MEMORY
        self._share += (num_tokens / max(1, max_tokens) - self._share) / _MEMORY

    def expected(self, max_tokens: int) -> float:
        by_mean, by_share = self._guesses(max_tokens)
        return by_share if self._errors[1] < self._errors[0] else by_mean

    def left(self, num_tokens: int, max_tokens: int) -> float:
        """Return how many tokens an answer that has so many will probably still gain."""
        return min(max_tokens - num_tokens, max(self.expected(max_tokens) - num_tokens, self.overdue_tokens))

    @property
    def overdue_tokens(self) -> float:
        """Mean number of tokens still to come of an answer that has as many as were expected: the mean residual life.

        At least the token that is being computed.
        """
        return max(1.0, self._overdue_tokens)

    def _guesses(self, max_tokens: int) -> tuple[float, float]:
        return min(self.mean_tokens, max_tokens), self._share * max_tokens


class Rates:
    """Of what was sent to each worker lately: sums that fade with time."""

    def __init__(self) -> None:
        self._sums: dict[LinkId, tuple[float, float, float]] = {}  # a sum, when it was that, and when it began

    def add(self, worker: WorkerView, amount: float, now_s: float) -> None:
        before, at_s, since_s = self._sums.get(worker.link, (0.0, now_s, now_s))
        self._sums[worker.link] = before * exp((at_s - now_s) / _RATE_S) + amount, now_s, since_s

    def rate(self, worker: WorkerView, now_s: float) -> float:
        amount, at_s, since_s = self._sums.get(worker.link, (0.0, now_s, now_s))
        seen_s = _RATE_S * (1 - exp(min(0.0, (since_s - now_s) / _RATE_S)))
        return amount * exp((at_s - now_s) / _RATE_S) / max(0.1 * _RATE_S, seen_s)

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
        self._mean, self._at_s = before + _STEP * (seen - before), now_s


class Fetches:
    """Learns which share of each pair's fetches arrives, and with what delay."""

    def __init__(self) -> None:
        self._records: dict[PairName, tuple[Fading, Fading]] = {}  # share and delay

    def expected(self, pair: PairName, now_s: float) -> tuple[float, float]:
        """Return the share that will probably come, and the delay beyond what the link takes, seconds."""
        record = self._records.get(pair)
        if record is None:
            return _START_SHARE, _START_DELAY_S
        share, delay = record
        return share.value(now_s), max(0.0, delay.value(now_s))

    def observe(self, pair: PairName, share: float, late_s: float, now_s: float) -> None:
        """Take in which share of a fetch came, and how much later than predicted without what is learnt here."""
        start = Fading(_START_SHARE, now_s), Fading(_START_DELAY_S, now_s)
        shares, delays = self._records.setdefault(pair, start)
        shares.observe(share, now_s)
        delays.observe(late_s, now_s)

    def forget(self, worker: str) -> None:
        self._records = {pair: record for pair, record in self._records.items() if worker not in pair}
