"""A cluster under load and under injected faults, from its start to its end, with every token checked."""

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Literal

from pdserve.base.clock import Clock, MonotonicClock
from pdserve.launch.folder import ClusterState, ProcessState
from pdserve.launch.plan import WORKER_ROLES, ClusterSpec
from pdserve.measure.client import Client
from pdserve.measure.known_answers import KnownRequest, check_answer
from pdserve.measure.live import Report, recovered, started
from pdserve.measure.outcomes import ANY, OK, Outcome, Percentiles, Summary, percentiles, summarize
from pdserve.measure.tables import counted
from pdserve.proto.v1 import admin_pb2 as admin

Victims = Literal["workers", "router"]  # what is hit; clients' streams outlive the router with frontends alone


@dataclass(frozen=True, slots=True)
class FaultPlan:
    every_s: float
    freeze_s: float | None = None  # None: kill; otherwise freeze for that long
    seed: int = 0
    victims: Victims = "workers"


@dataclass(slots=True)
class Fault:
    name: str
    incarnation: int
    at_s: float
    was_attached: bool
    noticed_s: float | None = None  # after the fault, when the router no longer counted on the worker


class FaultInjector:
    """Injects faults, if any are planned.

    `state` returns the processes; `see` is to be called with each status of the router.
    """

    def __init__(self, state: Callable[[], ClusterState], plan: FaultPlan | None, clock: Clock) -> None:
        self.faults: list[Fault] = []
        self._state = state
        self._plan = plan
        self._clock = clock
        self._rng = random.Random(f"faults {plan.seed if plan else 0}")
        self._attached: set[tuple[str, int]] = set()
        self._ready: set[str] = set()
        self._seen = asyncio.Event()  # a status, since the router was hit last
        self._seen.set()

    def see(self, status: admin.ClusterStatus) -> None:
        """Note which workers the router counts on."""
        self._seen.set()
        self._attached = {(w.registration.worker_id, w.registration.incarnation) for w in status.workers}
        self._ready = {w.registration.worker_id for w in status.workers if w.registration.ready}
        for fault in self.faults:
            if fault.was_attached and fault.noticed_s is None and (fault.name, fault.incarnation) not in self._attached:
                fault.noticed_s = self._clock.now_s() - fault.at_s

    async def run(self) -> None:
        """Kill or freeze a process every so often, until cancelled; a frozen one is thawed then too."""
        while self._plan is not None:
            await self._seen.wait()  # a router that was hit serves again
            await asyncio.sleep(self._plan.every_s)
            victim = self._router() if self._plan.victims == "router" else self._worker()
            if victim is not None:
                await self._hit(victim, self._plan.freeze_s)

    def _router(self) -> ProcessState | None:
        """Return the router; None while it starts."""
        return next((p for p in self._state().processes if p.role == "router" and p.pid is not None), None)

    def _worker(self) -> ProcessState | None:
        """Return one of the workers that are ready; while there is none, any that runs."""
        workers = [p for p in self._state().processes if p.role in WORKER_ROLES and p.pid is not None]
        serving = [worker for worker in workers if worker.name in self._ready]
        return self._rng.choice(serving or workers) if workers else None

    async def _hit(self, victim: ProcessState, freeze_s: float | None) -> None:
        is_attached = (victim.name, victim.incarnation) in self._attached
        self.faults.append(Fault(victim.name, victim.incarnation, self._clock.now_s(), is_attached))
        if freeze_s is None:
            self._signal(victim, signal.SIGKILL)
            if victim.role == "router":
                self._seen.clear()
            return
        self._signal(victim, signal.SIGSTOP)
        try:
            await asyncio.sleep(freeze_s)
        finally:
            self._signal(victim, signal.SIGCONT)

    @staticmethod
    def _signal(victim: ProcessState, number: signal.Signals) -> None:
        if victim.pid is not None:
            with suppress(ProcessLookupError):  # it ended by itself
                os.kill(victim.pid, number)


REQUEST_DEADLINE_S = 120.0
_MOST_EXAMPLES = 10


@dataclass(frozen=True, slots=True)
class ChaosTrial:
    name: str
    spec: ClusterSpec
    num_requests: int
    max_concurrency: int
    faults: FaultPlan | None


@dataclass(frozen=True, slots=True)
class Tally:
    """A run's outcomes; in its summary, right answers alone count as good."""

    summary: Summary
    num_right: int
    num_wrong: int
    num_retried: int  # answered well after more than one attempt
    most_attempts: int
    errors: dict[str, int]  # by status and detail
    wrong_examples: tuple[str, ...]
    gap_s: Percentiles | None  # of good answers: the longest time between two messages with tokens
    retried_gap_s: Percentiles | None

    @property
    def problems(self) -> list[str]:
        """A line for each kind of error, and some for wrong answers."""
        name, errors = self.summary.name, [f"{count} x {error}" for error, count in self.errors.items()]
        return [f"{name}: {problem}" for problem in (*errors, *self.wrong_examples)]

    @property
    def result(self) -> dict[str, object]:
        """The tally as tables and JSON have it: all on one level."""
        fields = asdict(self)
        return {**fields.pop("summary"), **fields}


@dataclass(frozen=True, slots=True)
class Verdict:
    tally: Tally
    faults: tuple[Fault, ...]
    noticed_s: Percentiles | None  # how long the router took to drop an attached worker that was hit
    free_after_s: float | None  # of the last answer; None: not all pages within the time
    left_over: str  # describes what was not free, or not ready again
    num_replaced: int  # requests that the router placed again
    ended: dict[str, int]  # as the router counts; a router that was hit counts from its start
    was_router_hit: bool = False

    @property
    def is_clean(self) -> bool:
        """Return whether every request was answered rightly and ended once, and every page came back."""
        num_requests = self.tally.summary.num_requests
        has_counted = self.was_router_hit or sum(self.ended.values()) == num_requests
        return self.tally.num_right == num_requests and has_counted and not self.left_over

    @property
    def result(self) -> dict[str, object]:
        """The verdict as its table and its JSON have it: all on one level."""
        fields = asdict(self) | {"num_hit": len(self.faults)}
        del fields["tally"]
        return self.tally.result | fields


async def run_chaos(trial: ChaosTrial, requests: Sequence[KnownRequest], report: Report) -> Verdict:
    """Start a cluster, load it, inject faults, and report what is left."""
    async with started(trial.spec, report) as (cluster, live, board):
        injector = FaultInjector(lambda: cluster.state, trial.faults, MonotonicClock())
        board.watchers.append(injector.see)
        injector.see(board.last)
        outcomes = await _send(trial, live.client, injector, requests, report)
        free_after_s, left_over = await recovered(lambda: cluster.state, board)
        return Verdict(
            tally=tally(trial.name, outcomes),
            faults=tuple(injector.faults),
            noticed_s=percentiles(fault.noticed_s for fault in injector.faults),
            free_after_s=free_after_s,
            left_over=left_over,
            num_replaced=board.last.num_replaced,
            ended=dict(board.last.ended),
            was_router_hit=any(fault.name == "router" for fault in injector.faults),
        )


async def _send(
    trial: ChaosTrial,
    client: Client,
    injector: FaultInjector,
    requests: Sequence[KnownRequest],
    report: Report,
) -> list[Outcome]:
    """Send the requests in turn, over and over, while faults happen; compare each answer with the right one."""
    messages = [request.message(REQUEST_DEADLINE_S) for request in requests]
    timed = [(0.0, messages[number % len(messages)]) for number in range(trial.num_requests)]
    with counted(trial.name, trial.num_requests) as advance:

        def on_end(outcome: Outcome) -> None:
            check_answer(outcome, requests)
            advance()
            if not outcome.is_good:
                report(f"{outcome}")

        async with asyncio.TaskGroup() as tasks:
            injecting = tasks.create_task(injector.run())
            outcomes = await client.run(timed, on_end, trial.max_concurrency)
            injecting.cancel()
    return outcomes


def tally(name: str, outcomes: Sequence[Outcome]) -> Tally:
    good = [outcome for outcome in outcomes if outcome.is_good]
    retried = [outcome for outcome in good if outcome.attempts > 1]
    wrong = [outcome for outcome in outcomes if outcome.wrong]
    errors = Counter(f"{outcome.status}: {outcome.detail}" for outcome in outcomes if outcome.status != OK)
    return Tally(
        summary=summarize(name, outcomes, ANY),
        num_right=len(good),
        num_wrong=len(wrong),
        num_retried=len(retried),
        most_attempts=max((outcome.attempts for outcome in good), default=0),
        errors=dict(errors.most_common()),
        wrong_examples=tuple(f"request {outcome.number}: {outcome.wrong}" for outcome in wrong[:_MOST_EXAMPLES]),
        gap_s=percentiles(max(outcome.gaps_s, default=0.0) for outcome in good),
        retried_gap_s=percentiles(max(outcome.gaps_s, default=0.0) for outcome in retried),
    )
