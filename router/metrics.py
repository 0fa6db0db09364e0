"""What a router shows of itself as metrics: the ends of requests, counted as they pass by, and its state as it is."""

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence

from pdserve.base.errors import PeerFault
from pdserve.base.roles import Role
from pdserve.observe import metrics
from pdserve.observe.metrics import Distribution, Metric, Sample, span_samples
from pdserve.protocol.refusal import Cause, Refused, Status
from pdserve.protocol.reports import FINISH_REASONS, Failure, Stage
from pdserve.router.frontend.backend import Span
from pdserve.router.frontend.clients import DENIALS, Clients
from pdserve.router.frontend.limits import Uses
from pdserve.router.live import WORKER_STATES, state_of
from pdserve.router.placement.placements import DONE
from pdserve.router.placement.sessions import TURNS
from pdserve.router.requests.commands import Finished
from pdserve.router.requests.core import RouterCore
from pdserve.router.requests.events import RequestArrived
from pdserve.router.requests.recent import judge
from pdserve.router.requests.timeline import Ledger
from pdserve.router.shell import Shell

_LATELY = 1000  # ended requests of a class that the attainment is taken of
_OBJECTIVES = ("ttft", "tpot")
_CLASSES = ("high", "normal", "low")  # of priorities over, at and under 0
PREPARED = ("done", "cancelled", "refused")
OK = "OK"
_PARTS = (  # of a request's life, from one stage to another
    (metrics.TTFT, Stage.RECEIVED, Stage.FIRST_TOKEN),
    (metrics.E2E, Stage.RECEIVED, Stage.FINISHED),
    (metrics.QUEUE, Stage.RECEIVED, Stage.PREFILL_STARTED),
    (metrics.PREFILL, Stage.PREFILL_STARTED, Stage.FIRST_TOKEN),
    (metrics.DECODE, Stage.FIRST_TOKEN, Stage.FINISHED),
    (metrics.INFERENCE, Stage.PREFILL_STARTED, Stage.FINISHED),
)


def _ended_how(outcome: Finished | Refused) -> str:
    """Return one of PREPARED."""
    if isinstance(outcome, Finished):
        return "done"
    return "cancelled" if outcome.status is Status.CANCELLED else "refused"


class Ends:
    def __init__(self, model: str) -> None:
        self._model = model
        self._parts = [(Distribution(metric), start, end) for metric, start, end in _PARTS]
        self._tpot, self._pooled = Distribution(metrics.TPOT), Distribution(metrics.POOLED)
        self._prompts, self._answers = Distribution(metrics.PROMPT_TOKENS), Distribution(metrics.ANSWER_TOKENS)
        self._handoffs = Distribution(metrics.HANDOFF_S)
        self._ratios = {name: Distribution(metrics.OUTCOME_RATIO) for name in _OBJECTIVES}
        self._prompt_tokens = self._cached_tokens = self._handoff_bytes = 0
        self._finished = Counter[int]()
        self._invalid = Counter[Status]()
        self._goodput, self._prepared = Counter[str](), Counter[str]()
        self._judged = Counter[tuple[str, str, bool]]()
        self._lately = {(name, each): deque[bool](maxlen=_LATELY) for name in _OBJECTIVES for each in _CLASSES}

    def reject(self, status: Status) -> None:
        self._invalid[status] += 1

    def end(self, event: RequestArrived, outcome: Finished | Refused, finish_reasons: Sequence[int]) -> None:
        if event.is_preparation:
            self._prepared[_ended_how(outcome)] += 1
            return
        priority, slo_s = event.priority, (event.ttft_slo_s, event.tpot_slo_s)
        if isinstance(outcome, Finished):
            self._finished.update(finish_reasons)
            if event.params.pooling is None:
                self._take_ledger(outcome.ledger)
                self._answers.observe(outcome.usage.completion_tokens)
            else:
                self._pooled.observe(outcome.ledger.steps[-1][1] / 1e3)
            self._prompt_tokens += outcome.usage.prompt_tokens
            self._cached_tokens += outcome.usage.cached_tokens
            self._prompts.observe(outcome.usage.prompt_tokens)
        verdict = judge(slo_s, outcome)
        if verdict is None:
            return
        name = _CLASSES[0 if priority > 0 else 1 if priority == 0 else 2]
        self._goodput[name] += verdict.ttft and verdict.tpot
        for objective, asked_s, is_met in zip(_OBJECTIVES, slo_s, (verdict.ttft, verdict.tpot), strict=True):
            if asked_s is not None:
                self._judged[objective, name, is_met] += 1
                self._lately[objective, name].append(is_met)

    def _take_ledger(self, ledger: Ledger) -> None:
        reached_ms = dict(ledger.steps)
        for seen, start, end in self._parts:
            if start in reached_ms and end in reached_ms:
                seen.observe((reached_ms[end] - reached_ms[start]) / 1e3)
        if ledger.tpot_ms:
            self._tpot.observe(ledger.tpot_ms / 1e3)
        if ledger.handoff_bytes:
            self._handoff_bytes += ledger.handoff_bytes
            self._handoffs.observe(ledger.handoff_ms / 1e3)
        came = (ledger.predicted_ttft_ms, ledger.ttft_ms), (ledger.predicted_tpot_ms, ledger.tpot_ms)
        for objective, (predicted_ms, observed_ms) in zip(_OBJECTIVES, came, strict=True):
            if ledger.attempts == 1 and predicted_ms and observed_ms:
                self._ratios[objective].observe(observed_ms / predicted_ms)

    @property
    def num_invalid(self) -> int:
        return self._invalid.total()

    def span(self, metric: Metric) -> Span:
        """Return a part of _PARTS, over answered requests."""
        seen = next(seen for (of, *_), (seen, *_) in zip(_PARTS, self._parts, strict=True) if of is metric)
        return Span(seen.count, seen.total)

    def samples(self) -> Iterator[Sample]:
        model = (self._model,)
        yield from (Sample(metric, seen[0], model) for (metric, *_), seen in zip(_PARTS, self._parts, strict=True))
        for reason, name in FINISH_REASONS.items():
            yield Sample(metrics.FINISHED, self._finished[reason], (self._model, name))
        yield Sample(metrics.TPOT, self._tpot, model)
        yield Sample(metrics.POOLED, self._pooled)
        yield Sample(metrics.PROMPT_TOKENS, self._prompts, model)
        yield Sample(metrics.ANSWER_TOKENS, self._answers, model)
        yield Sample(metrics.CACHE_QUERIES, self._prompt_tokens, model)
        yield Sample(metrics.CACHE_HITS, self._cached_tokens, model)
        yield Sample(metrics.HANDOFF_S, self._handoffs)
        yield Sample(metrics.HANDOFF_BYTES, self._handoff_bytes)
        yield from (Sample(metrics.OUTCOME_RATIO, ratio, (name,)) for name, ratio in self._ratios.items())
        yield from (Sample(metrics.INVALID, self._invalid[each], (each.value,)) for each in Status)
        yield from (Sample(metrics.PREPARED, self._prepared[each], (each,)) for each in PREPARED)
        yield from (Sample(metrics.GOODPUT, self._goodput[each], (each,)) for each in _CLASSES)
        for objective, name in self._lately:
            for verdict, is_met in (("met", True), ("missed", False)):
                yield Sample(metrics.JUDGED, self._judged[objective, name, is_met], (objective, name, verdict))
        for key, lately in self._lately.items():
            if lately:
                yield Sample(metrics.ATTAINMENT, sum(lately) / len(lately), key)


def router_samples(
    shell: Shell, ends: Ends, clients: Clients, tenants: Uses, spans: Mapping[str, int], model: str
) -> Iterator[Sample]:
    yield from ends.samples()
    core, label = shell.core, (model,)
    yield from _requests(core, tenants)
    yield from (Sample(metrics.DENIED, tenants.denied[each], (each,)) for each in DENIALS)
    yield Sample(metrics.REFUSED_KEY_FILES, clients.num_refused_files)
    num_waiting = core.num_held + sum(
        not request.is_preparation and not request.timeline.ms(Stage.PREFILL_STARTED)
        for request in core.placements.requests.values()
    )
    yield Sample(metrics.WAITING, num_waiting, label)
    yield Sample(metrics.RUNNING, core.placements.num_asked + core.num_held - num_waiting, label)
    yield Sample(metrics.KV_USAGE, max(_usage(core, Role.PREFILL), _usage(core, Role.DECODE)), label)
    yield from _workers(core)
    yield from (Sample(metrics.REFUSED_MESSAGES, shell.refused[each], (each.value,)) for each in PeerFault)
    yield from span_samples(spans)


def _requests(core: RouterCore, tenants: Uses) -> Iterator[Sample]:
    placements = core.placements
    refused = placements.refused_because + tenants.over_limit
    yield Sample(metrics.ARRIVED, placements.demand.counted().num_requests)
    yield from _all(metrics.ENDED, (OK, *(status.value for status in Status)), placements.ended)
    yield from (Sample(metrics.REFUSED, refused[cause], (cause.value,)) for cause in Cause)
    yield Sample(metrics.ACTIVE, core.placements.num_asked)
    yield Sample(metrics.HELD, core.num_held)
    yield Sample(metrics.REPLACED, placements.num_replaced)
    failures = [failure.name.lower() for failure in Failure]
    yield from _all(metrics.MOVES, (DONE, *failures), placements.shadows.ended)
    yield Sample(metrics.CONVERSATIONS, len(placements.sessions))
    yield Sample(metrics.CONVERSATIONS_FORGOTTEN, placements.sessions.num_forgotten)
    yield from _all(metrics.TURNS, TURNS, placements.sessions.turns)


def _all(metric: Metric, names: tuple[str, ...], counts: Counter[str]) -> Iterator[Sample]:
    """Yield a count for each name, also where it is 0: a series that begins with its first event hides that event."""
    return (Sample(metric, counts[name], (name,)) for name in names)


def _usage(core: RouterCore, pool: Role) -> float:
    known = [(worker.registration.num_pages, worker.load) for worker in core.workers if worker.role.is_in(pool)]
    num_pages = sum(count for count, load in known if load is not None)
    num_free = sum(load.pages_free for _, load in known if load is not None)
    return 1 - num_free / num_pages if num_pages else 0.0


def _workers(core: RouterCore) -> Iterator[Sample]:
    unroutable = core.membership.unroutable()
    counts = Counter(
        (worker.role, state_of(worker.registration.ready, worker.draining, unroutable[worker.link]))
        for worker in core.workers
    )
    for role in Role:
        yield from (Sample(metrics.WORKERS, counts[role, state], (role.value, state)) for state in WORKER_STATES)
