"""Carries a core's reports to the routers they concern."""

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from math import inf

from pdserve.clock import Clock
from pdserve.engine.step import StepPlan, StepResult
from pdserve.errors import Refusal
from pdserve.prefill_worker.probes import Measured
from pdserve.proto.v1 import link_pb2 as link
from pdserve.wire import ROLE_NUMBERS
from pdserve.worker import wire
from pdserve.worker.kv_feed import KvFeed
from pdserve.worker.link import Links
from pdserve.worker.messages import Load, Progress, PromptScored, Report, RoleTaken, RouterRef, Tokens
from pdserve.worker.metrics import Steps

logger = logging.getLogger(__name__)

LOAD_EVERY_S = 0.05  # steps may be shorter: what several routers know of each other's requests is this old at most


class Reporter:
    """Turns reports into messages: one a step and router, however many sequences it served."""

    def __init__(self, links: Links, clock: Clock, kv_feed: KvFeed | None = None) -> None:
        self._links = links
        self._clock = clock
        self._pairs: dict[str, link.AttachRequest] = {}
        self._have_pairs: set[RouterRef] = set()  # routers that were sent all pairs
        self._pages_leaked, self._drain_reason = 0, ""  # as last logged
        self.refused: Counter[Refusal] = Counter()  # by this process, since its start
        self.steps = Steps()
        self._kv_feed = kv_feed
        self._beat_s = -inf  # when the load was last reported

    def send(self, reports: Iterable[Report], step: tuple[StepPlan, StepResult] | None) -> None:
        """Queue reports. With a step, every router is sent its cost, whatever it brought them."""
        now_s = self._clock.now_s()
        if step is not None:
            self._send_step(reports, step, now_s)
        else:
            for report in reports:
                self._links.send(report.router, wire.report(report, now_s))
        if self._kv_feed is not None:
            self._kv_feed.flush()

    def _send_step(self, reports: Iterable[Report], step: tuple[StepPlan, StepResult], now_s: float) -> None:
        tokens: defaultdict[RouterRef, list[Tokens]] = defaultdict(list)
        prompts: defaultdict[RouterRef, list[PromptScored]] = defaultdict(list)
        stages: defaultdict[RouterRef, list[Progress]] = defaultdict(list)
        for report in reports:
            if isinstance(report, Tokens):
                tokens[report.router].append(report)
            elif isinstance(report, PromptScored):
                prompts[report.router].append(report)
            elif isinstance(report, Progress):
                stages[report.router].append(report)
            else:
                self._links.send(report.router, wire.report(report, now_s))
        plan, result = step
        computed = wire.computed(plan)
        self.steps.note(computed, result.elapsed_s, sum(map(len, tokens.values())))
        for router in self._links.attached:
            message = wire.step_report(
                computed, result.elapsed_s, tokens.get(router, ()), stages.get(router, ()), now_s
            )
            for scored in prompts.get(router, ()):
                wire.write_prompt(scored, message.step.prompts.add())
            self._links.send(router, message)

    def beat(self, load: Load, num_steps: int) -> None:
        """Tell every router how full this worker is; and the operator, loudly, what should not be."""
        if load.pages_leaked > self._pages_leaked:
            logger.error("%d pages are leaked: they belong to nothing that goes on", load.pages_leaked)
        if load.drain_reason != self._drain_reason:
            logger.error("draining: %s", load.drain_reason)
        self._pages_leaked, self._drain_reason = load.pages_leaked, load.drain_reason
        self._beat_s = self._clock.now_s()
        for router in self._links.attached:
            self._links.send(router, wire.heartbeat(load, num_steps, self.refused, router))
        if self._pairs:
            self._repeat()
        if self._kv_feed is not None:
            self._kv_feed.flush()

    def refresh(self, load: Callable[[], Load], num_steps: int, *, at_once: bool) -> None:
        """Tell routers how full this worker is, if several send it work: none knows of what the others send.

        Unless `at_once`, only where nothing was reported for LOAD_EVERY_S.
        """
        is_due = at_once or self._clock.now_s() - self._beat_s >= LOAD_EVERY_S
        if is_due and len(self._links.attached) > 1:
            self.beat(load(), num_steps)

    def report_role(self, taken: RoleTaken) -> None:
        """Tell every router of a role at once, before they place more here."""
        logger.info("role: %s, epoch %d", taken.role, taken.epoch)
        self._links.take_role(ROLE_NUMBERS[taken.role], taken.epoch, taken.step_tokens)

    def refuse(self, refusal: Refusal) -> None:
        self.refused[refusal] += 1

    def report_pair(self, worker_id: str, measured: Measured | None) -> None:
        """Tell every router, and those that attach later, how fast pages reach a worker; None: not known any more."""
        self._pairs.pop(worker_id, None)
        if measured is not None:
            message = self._pairs[worker_id] = wire.pair_measured(worker_id, measured)
            self._links.broadcast(message)

    def _repeat(self) -> None:
        """Send the pairs to routers that have attached since."""
        attached = self._links.attached
        for router in attached:
            for message in self._pairs.values() if router not in self._have_pairs else ():
                self._links.send(router, message)
        self._have_pairs = set(attached)
