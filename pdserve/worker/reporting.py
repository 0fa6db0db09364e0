"""Carries a core's reports to the routers they concern, and decides when, and what goes together.

A message costs a router a fixed time, and so does each sequence's entry in it. So tokens of several short steps go into
one message: with the first step that ends WINDOW_S after they last went, and at most LATEST_S late. What steps over
WINDOW_S bring is sent as they end. A sequence's first and last tokens, tokens of a hand-off, stages and what a prompt's
step cost are always sent at once.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import inf

from pdserve.base.clock import Clock
from pdserve.base.errors import PeerFault
from pdserve.base.ids import AttemptKey
from pdserve.decode_worker import receiver
from pdserve.engine.kvcache import KvCache
from pdserve.engine.step import StepPlan, StepResult, work_of
from pdserve.kvtransfer.speed import PairSpeed
from pdserve.observe import metrics
from pdserve.observe.metrics import Distribution, Sample
from pdserve.perfmodel.curve import Step
from pdserve.prefill_worker import sender
from pdserve.proto.v1 import link_pb2 as link
from pdserve.protocol.drafts import Acceptance, BySource, DraftSource, Verified, count
from pdserve.protocol.link import ROLE_NUMBERS
from pdserve.worker import wire
from pdserve.worker.core import WorkerCore
from pdserve.worker.kv_feed import KvFeed
from pdserve.worker.link import Links
from pdserve.worker.messages import Failed, Load, Progress, PromptScored, Report, RoleTaken, RouterRef, StepCost, Tokens

logger = logging.getLogger(__name__)

WINDOW_S = 0.016  # sixty reports a second: as many changes as a screen shows
LATEST_S = 0.02  # that a token waits for the step behind it
LOAD_EVERY_S = 0.05  # steps may be shorter: what several routers know of each other's requests is this old at most

_Outgoing = tuple[RouterRef, link.AttachRequest | None]  # None: there is nothing to send
_ENDED = ("CLOSED", "COMMITTED", "FREE")  # states of hand-offs that are over


class Steps:
    def __init__(self) -> None:
        self._gaps, self._sizes = Distribution(metrics.ITL), Distribution(metrics.STEP_TOKENS)
        self._expert_ratios = Distribution(metrics.EXPERT_RATIO)
        self._num_computed = self._num_sampled = 0
        self._drafts: BySource = {}
        self._draft_s = self._take_in_s = 0.0
        self._num_draft_failures = 0

    def note(self, computed: Step, elapsed_s: float, num_tokens: int) -> None:
        """Count a step that brought so many tokens of answers."""
        if computed.sequences:
            self._gaps.observe(elapsed_s, computed.sequences - computed.guesses)  # those come at once
        self._sizes.observe(computed.prefill_tokens + computed.sequences)
        self._num_computed += computed.prefill_tokens
        self._num_sampled += num_tokens

    def note_verified(self, verified: Iterable[Verified]) -> None:
        """Count how guesses of answers' tokens turned out."""
        count(self._drafts, verified)

    def note_result(self, result: StepResult) -> None:
        """Count what only runners know of a step: a draft model's time, and which experts were busy."""
        self._draft_s += result.draft_s
        self._take_in_s += result.take_in_s
        self._num_draft_failures += result.num_draft_failures
        for ratio in result.expert_ratios:
            self._expert_ratios.observe(ratio)

    def samples(self, model: str, source: DraftSource | None) -> Iterator[Sample]:
        """Yield the counts of a model's steps. source: the method that guesses; None: none does."""
        label = (model,)
        yield Sample(metrics.ITL, self._gaps, label)
        yield Sample(metrics.STEP_TOKENS, self._sizes, label)
        yield Sample(metrics.COMPUTED_TOKENS, self._num_computed, label)
        yield Sample(metrics.SAMPLED_TOKENS, self._num_sampled, label)
        yield Sample(metrics.EXPERT_RATIO, self._expert_ratios, label)
        if source is not None:
            yield from draft_samples({source: Acceptance(), **self._drafts}, model)
            yield Sample(metrics.DRAFT_SECONDS, self._draft_s, (model, source, "guess"))
            yield Sample(metrics.DRAFT_SECONDS, self._take_in_s, (model, source, "take_in"))
            yield Sample(metrics.DRAFT_FAILURES, self._num_draft_failures, (model, source))


def draft_samples(drafts: BySource, model: str) -> Iterator[Sample]:
    """Yield how guesses turned out."""
    every = [((model, source), counted) for source, counted in drafts.items()]
    yield from (Sample(metrics.DRAFTS, counted.num_drafts, label) for label, counted in every)
    yield from (Sample(metrics.DRAFT_TOKENS, counted.num_draft_tokens, label) for label, counted in every)
    yield from (Sample(metrics.ACCEPTED_TOKENS, counted.num_accepted_tokens, label) for label, counted in every)
    for (_, source), counted in every:
        for place, num_accepted in enumerate(counted.num_accepted_tokens_per_pos):
            yield Sample(metrics.ACCEPTED_PER_POS, num_accepted, (model, str(place), source))


def load_samples(load: Load, cache: KvCache, model: str) -> Iterator[Sample]:
    label, num_pages = (model,), cache.pool.num_pages
    yield Sample(metrics.WAITING, load.num_waiting, label)
    yield Sample(metrics.RUNNING, load.num_running, label)
    yield Sample(metrics.KV_USAGE, 1 - load.pages_free / num_pages, label)
    yield Sample(metrics.PREEMPTIONS, load.num_preemptions, label)
    yield Sample(metrics.CACHE_CONFIG, 1, (str(cache.page_size), str(num_pages)))
    yield Sample(metrics.ROLE, 1, (load.role.value,))
    yield Sample(metrics.DRAINING, load.draining)
    pages = {
        "empty": load.pages_free - load.pages_cached,
        "cached": load.pages_cached,
        "held": load.pages_held,
        "granted": load.pages_granted,
        "quarantined": load.pages_quarantined,
    }
    yield from (Sample(metrics.PAGES, count, (state,)) for state, count in pages.items())
    yield Sample(metrics.LEAKED, load.pages_leaked)
    yield Sample(metrics.WAITING_TOKENS, load.waiting_tokens)
    yield Sample(metrics.KV_TOKENS, load.kv_tokens)
    yield Sample(metrics.DIGEST_MISMATCHES, load.num_digest_mismatches)
    yield Sample(metrics.STALLED_PEERS, load.num_stalled_peers)


def handoff_samples(core: WorkerCore) -> Iterator[Sample]:
    """Yield how many hand-offs are open, in each state."""
    yield Sample(metrics.HANDOFFS, core.incoming.num_ungranted, ("in", "waiting"))
    sides = ("in", receiver.State, core.incoming.states), ("out", sender.State, core.outgoing.states)
    for direction, states, present in sides:
        counts = Counter(state.name for state in present)
        names = [state.name for state in states if state.name not in _ENDED]
        yield from (Sample(metrics.HANDOFFS, counts[name], (direction, name.lower())) for name in names)


def refusal_samples(refused: Mapping[PeerFault, int]) -> Iterator[Sample]:
    return (Sample(metrics.REFUSED_MESSAGES, refused.get(each, 0), (each.value,)) for each in PeerFault)


class StepReports:
    """What one router is sent about steps. Invariant: each sequence's tokens go once and in order."""

    def __init__(self, *, each_at_once: bool) -> None:
        """`each_at_once`: the router wants a report of each step when it ends."""
        self._each_at_once = each_at_once
        self._tokens: dict[tuple[AttemptKey, int], list[Tokens]] = {}  # held, by sequence
        self._costs: list[StepCost] = []  # of steps not reported yet, oldest first
        self._sent_s = -inf  # when all that was held was last sent
        self._held_s = inf  # since when the oldest is held

    @property
    def due_s(self) -> float:
        """When what is held has to go; inf: nothing is held."""
        return self._held_s + LATEST_S

    def report(
        self, reports: Iterable[Tokens | Progress | PromptScored], cost: StepCost | None, now_s: float
    ) -> link.AttachRequest | None:
        """Return the message that goes now, if any. `cost`: of the step that brought the reports; None: no step did."""
        at_once: dict[tuple[AttemptKey, int], None] = {}
        stages: list[Progress] = []
        prompts: list[PromptScored] = []
        for report in reports:
            if isinstance(report, Tokens):
                name = report.key, report.index
                self._tokens.setdefault(name, []).append(report)
                if report.finish is not None or not report.position or cost is None:
                    at_once[name] = None
            elif isinstance(report, Progress):
                stages.append(report)
            else:
                prompts.append(report)
        is_urgent = bool(at_once or stages or prompts)
        if cost is not None:
            self._costs.append(cost)
            is_urgent |= cost.step.prefill_tokens > 0
            if self._each_at_once or max(now_s - self._sent_s, cost.elapsed_s) >= WINDOW_S:
                return self._message(self._take_all(now_s), stages, prompts, now_s)
        message = None
        if is_urgent:
            message = self._message([self._tokens.pop(name) for name in at_once], stages, prompts, now_s)
        if not self._tokens and not self._costs:
            self._held_s = inf
        elif self._held_s == inf:
            self._held_s = now_s
        return message

    def rest(self, now_s: float) -> link.AttachRequest | None:
        """Return a message with all that is held, if anything is."""
        if not self._tokens and not self._costs:
            return None
        return self._message(self._take_all(now_s), (), (), now_s)

    def _take_all(self, now_s: float) -> list[list[Tokens]]:
        tokens = list(self._tokens.values())
        self._tokens.clear()
        self._sent_s, self._held_s = now_s, inf
        return tokens

    def _message(
        self, tokens: list[list[Tokens]], stages: Iterable[Progress], prompts: Iterable[PromptScored], now_s: float
    ) -> link.AttachRequest:
        costs, self._costs = self._costs, []
        return wire.step_report(costs, tokens, stages, prompts, now_s)


class Reporter:
    """Turns reports into messages: with a step at most one for each router, but for failures."""

    def __init__(self, links: Links, clock: Clock, kv_feed: KvFeed | None = None) -> None:
        self._links = links
        self._clock = clock
        self._held: dict[RouterRef, StepReports] = {}
        self._pairs: dict[str, link.AttachRequest] = {}
        self._have_pairs: set[RouterRef] = set()  # routers that were sent all pairs
        self._pages_leaked, self._drain_reason = 0, ""  # as last logged
        self.refused: Counter[PeerFault] = Counter()  # by this process, since its start
        self.steps = Steps()
        self._kv_feed = kv_feed
        self._beat_s = -inf  # when the load was last reported

    @property
    def due_s(self) -> float:
        """When `send_due` has something to send; inf: nothing waits."""
        return min([held.due_s for held in self._held.values()], default=inf)

    def send(self, reports: Iterable[Report], step: tuple[StepPlan, StepResult] | None) -> None:
        """Queue reports. With a step, every router is sent its cost, whatever it brought them."""
        brought: dict[RouterRef, list[Tokens | PromptScored | Progress]] = {}
        failed: list[Failed] = []
        now_s, num_tokens, verified = self._clock.now_s(), 0, list[Verified]()
        for report in reports:
            if isinstance(report, Failed):
                failed.append(report)
            else:
                brought.setdefault(report.router, []).append(report)
                if isinstance(report, Tokens):
                    num_tokens += len(report.tokens)
                    verified += (report.verified,) if report.verified is not None else ()
        self.steps.note_verified(verified)
        cost = None
        if step is not None:
            plan, result = step
            cost = StepCost(work_of(plan, result), result.elapsed_s, now_s)
            self.steps.note(cost.step, cost.elapsed_s, num_tokens)
            self.steps.note_result(result)
        messages: list[_Outgoing] = [
            (router, self._held_for(router).report(brought.get(router, ()), cost, now_s))
            for router in (self._links.attached if cost is not None else brought)
        ]
        for each in failed:
            messages += [(each.router, self._held_for(each.router).rest(now_s)), (each.router, wire.failed(each))]
        self._send(messages)

    def send_due(self) -> None:
        """Queue what has been held back long enough."""
        now_s = self._clock.now_s()
        self._send([(router, held.rest(now_s)) for router, held in self._held.items() if held.due_s <= now_s])

    def _held_for(self, router: RouterRef) -> StepReports:
        held = self._held.get(router)
        if held is None:
            attached = self._links.attached
            self._held = {each: kept for each, kept in self._held.items() if each in attached}
            held = self._held[router] = StepReports(each_at_once=self._links.wants_each_step(router))
        return held

    def _send(self, messages: Iterable[_Outgoing]) -> None:
        """Queue messages, where there are any, and behind them what has changed in the prefix cache."""
        has_sent = False
        for router, message in messages:
            if message is not None:
                self._links.send(router, message)
                has_sent = True
        if has_sent and self._kv_feed is not None:
            self._kv_feed.flush()

    def beat(self, load: Load, num_steps: int) -> None:
        """Report the load to every router, and log as errors what should not be."""
        if load.pages_leaked > self._pages_leaked:
            logger.error("%d pages are leaked: they belong to nothing that goes on", load.pages_leaked)
        if load.drain_reason != self._drain_reason:
            logger.error("draining: %s", load.drain_reason)
        self._pages_leaked, self._drain_reason = load.pages_leaked, load.drain_reason
        self._beat_s = now_s = self._clock.now_s()
        messages: list[_Outgoing] = [(router, held.rest(now_s)) for router, held in self._held.items()]
        attached = self._links.attached
        self._send([*messages, *((each, wire.heartbeat(load, num_steps, self.refused, each)) for each in attached)])
        if self._pairs:
            self._repeat()
        if self._kv_feed is not None:
            self._kv_feed.flush()  # subscribers over ZMQ get events even where no router is attached

    def refresh(self, load: Callable[[], Load], num_steps: int, *, at_once: bool) -> None:
        """Report to routers how full this worker is, if several place work here: none knows what the others place.

        Unless `at_once`, only where nothing was reported for LOAD_EVERY_S.
        """
        is_due = at_once or self._clock.now_s() - self._beat_s >= LOAD_EVERY_S
        if is_due and len(self._links.attached) > 1:
            self.beat(load(), num_steps)

    def report_role(self, taken: RoleTaken) -> None:
        """Report a role to every router at once, before they place more here."""
        logger.info("role: %s, epoch %d", taken.role, taken.epoch)
        self._links.take_role(ROLE_NUMBERS[taken.role], taken.epoch, taken.step_tokens)

    def refuse(self, refusal: PeerFault) -> None:
        self.refused[refusal] += 1

    def report_pair(self, worker_id: str, speed: PairSpeed | None) -> None:
        """Report to all routers, also later ones, how fast pages reach a worker; None: that is not known any more."""
        self._pairs.pop(worker_id, None)
        if speed is not None:
            message = self._pairs[worker_id] = wire.pair_measured(worker_id, speed)
            self._links.broadcast(message)

    def _repeat(self) -> None:
        """Send the pairs to routers that have attached since."""
        attached = self._links.attached
        for router in attached:
            for message in self._pairs.values() if router not in self._have_pairs else ():
                self._links.send(router, message)
        self._have_pairs = set(attached)
