"""A worker under virtual time: its own core and turns, and a profile in place of an engine.

Steps that only decode, until a sequence ends or another comes, are done in one leap.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from typing import TYPE_CHECKING

from pdserve.base.clock import VirtualClock
from pdserve.base.ids import PROTOCOL_VERSION, Attempt, Incarnation, Peer, RequestId, WorkerId
from pdserve.base.roles import POOLS, Role
from pdserve.capacity.leaping import Leap, LeapingScheduler
from pdserve.engine.kvcache import KvCache
from pdserve.engine.scheduler import Limits as EngineLimits
from pdserve.engine.step import StepPlan, StepResult, work_of
from pdserve.measure.workload import Workload
from pdserve.perfmodel.curve import Step, StepCosts, TimedStep
from pdserve.perfmodel.profile import Profile
from pdserve.protocol.kvlayout import KvGroup, KvLayout
from pdserve.protocol.prefix_hash import PrefixHasher
from pdserve.protocol.token_ids import ALL_IDS
from pdserve.router.requests.events import LinkId, Registration
from pdserve.worker.admission import Rules
from pdserve.worker.core import WorkerCore
from pdserve.worker.messages import Command, Due, Event, Load
from pdserve.worker.turns import Turns

if TYPE_CHECKING:
    from pdserve.capacity.cluster import SimCluster


@dataclass(frozen=True, slots=True)
class Shape:
    """What a cluster is made of. Without prefill workers it is colocated: decode workers do everything."""

    prefill: int
    decode: int
    prefill_tp: int = 1
    decode_tp: int = 1
    prefill_chunk: int = 2048  # tokens of a prefill worker's step
    decode_chunk: int = 512  # tokens of a step of a decode worker that computes prompts itself
    max_num_seqs: int = 256
    local_prefill: bool = True  # whether a policy may let decode workers compute prompts
    kv_share: float = 1.0  # of the KV pages that fit, which a worker gets
    routers: int = 1  # that place requests, in turn, each on its own
    fetches: bool = True  # whether workers fetch cached pages from each other
    moves: bool = False  # whether answers leave workers that run out of pages; steps are then simulated one by one

    def tp_of(self, role: Role) -> int:
        """Return the devices of a worker of a role."""
        return self.prefill_tp if role is Role.PREFILL else self.decode_tp

    @property
    def num_gpus(self) -> int:
        return self.prefill * self.prefill_tp + self.decode * self.decode_tp

    def __str__(self) -> str:
        if not self.prefill:
            return f"colocated {self.decode} x tp{self.decode_tp}, chunk {self.decode_chunk}"
        return f"{self.prefill} x tp{self.prefill_tp} prefill + {self.decode} x tp{self.decode_tp} decode"


Reported = dict[tuple[RequestId, Attempt], int]  # how many tokens of each placement the router knows


class SimWorker:
    """Takes a worker's turns. A step is over when the profile says so, and none is planned ahead."""

    def __init__(
        self,
        clock: VirtualClock,
        name: tuple[Peer, LinkId],
        core: WorkerCore,
        scheduler: LeapingScheduler,
        costs: StepCosts,
    ) -> None:
        self.peer, self.link = name
        self.core = core
        self.scheduler = scheduler
        self.busy_s = 0.0
        self.num_steps = 0
        self.cluster: SimCluster | None = None  # None: it has left
        self.reports = False  # what its answers have gained, and how full it is, to every router
        self.on_drained: Callable[[SimWorker], None] | None = None  # called once, when it drains and nothing is left
        self.reported: Reported = {}
        self.reported_s = 0.0  # when it last reported its load
        self.sends_until_s = self.receives_until_s = 0.0  # copies, one at a time
        self._clock = clock
        self._turns = Turns(core, self)
        self._costs = self._usual_costs = costs
        self._inbox: list[Event] = []
        self._is_waiting = False  # for its turn
        self._due_s = inf  # when the core asked to be woken
        self._leap: _TimedLeap | None = None
        self._ended: TimedStep | None = None  # each of the steps that have ended last

    def offer(self, event: Event) -> None:
        """Hand an event to the core, at this moment."""
        self._inbox.append(event)
        if not self._is_waiting:
            self._is_waiting = True
            self._clock.soon(self._turn)

    def step_singly(self) -> None:
        """Do one step at a time from the next one on, and report to routers as workers do."""
        self.scheduler.leaps, self.reports = False, True
        self._cut()

    def slow_down(self, factor: float) -> None:
        """Let steps from the next one on take so many times as long as the profile says."""
        self._costs = self._usual_costs.scaled(factor)
        self._cut()

    def perform(self, commands: Sequence[Command], step: tuple[StepPlan, StepResult] | None) -> None:
        if self.cluster is not None and (commands or step):
            self.cluster.perform(self, commands, self._ended if step else None)

    def beat(self, load: Load, num_steps: int) -> None:
        """Report nothing: routers learn of a drain with the next step."""

    def refresh(self, load: Callable[[], Load], num_steps: int, *, at_once: bool) -> None:
        if self.cluster is not None:
            self.cluster.refresh(self, at_once=at_once)

    def _cut(self) -> None:
        """End the leap under way with the step that runs."""
        leap = self._leap
        if leap is not None:
            leap.plan.num_steps = leap.num_begun(self._clock.now_s())
            self._arrange(leap)

    def _turn(self) -> None:
        self._is_waiting, now_s = False, self._clock.now_s()
        if self._inbox:
            self._take_in(now_s)
        if not self._turns.steps and (plan := self._turns.next_step(now_s)) is not None:
            self._begin(plan, now_s)
        if self.core.due_s != self._due_s:
            self._due_s = self.core.due_s
            if self._due_s < inf:
                self._clock.at(max(self._due_s, now_s), self.offer, Due())
        if self.on_drained is not None and self._turns.drained:
            leave, self.on_drained, self.cluster = self.on_drained, None, None
            leave(self)

    def _take_in(self, now_s: float) -> None:
        leap = self._leap
        if leap is not None and (num_begun := leap.num_begun(now_s)) > leap.num_with_pages:
            self.scheduler.take_pages(num_begun)
            leap.num_with_pages = num_begun
        inbox, self._inbox = self._inbox, []
        for event in inbox:
            self._turns.handle(event, now_s)
        self._turns.note(inbox, now_s)
        if leap is not None and not self.scheduler.can_go_on(leap.plan.num_steps):
            self._cut()

    def _begin(self, plan: StepPlan, now_s: float) -> None:
        if isinstance(plan, Leap):
            self._leap = _TimedLeap(plan, self._costs, now_s)
            self._arrange(self._leap)
        else:
            work = work_of(plan)
            elapsed_s = self._costs.seconds(work)
            self._clock.at(now_s + elapsed_s, self._end, work, elapsed_s, 1)

    def _arrange(self, leap: "_TimedLeap") -> None:
        """Let a leap end when its steps do. An end that was arranged before is not earlier, and comes to nothing."""
        self._clock.at(leap.end_s, self._end_leap, leap)

    def _end_leap(self, leap: "_TimedLeap") -> None:
        if leap is self._leap:
            self._leap = None
            self._end(leap.middle, leap.end_s - leap.start_s, leap.plan.num_steps)

    def _end(self, each: Step, elapsed_s: float, num_steps: int) -> None:
        self.busy_s += elapsed_s
        self.num_steps += num_steps
        self._ended = TimedStep(each, elapsed_s / num_steps)
        self._turns.end_step(StepResult((), elapsed_s), elapsed_s, self._clock.now_s())
        self._turn()


class _TimedLeap:
    """A leap, and when each of its steps ends."""

    def __init__(self, plan: Leap, costs: StepCosts, start_s: float) -> None:
        curve = costs.decode_curve(plan.sequences)
        self.plan = plan
        self.start_s = start_s
        self.num_with_pages = 0  # of its steps: their pages are taken
        self._first_s = curve.seconds(plan.sequences, plan.kv_tokens)
        self._rise_s = curve.context_s * plan.sequences  # each step reads one token a sequence more

    @property
    def end_s(self) -> float:
        return self._after_s(self.plan.num_steps)

    @property
    def middle(self) -> Step:
        """Return the step in the middle of them."""
        sequences, kv_tokens = self.plan.sequences, self.plan.kv_tokens
        return Step(sequences=sequences, kv_tokens=kv_tokens + sequences * (self.plan.num_steps // 2))

    def _after_s(self, num_steps: int) -> float:
        return self.start_s + num_steps * self._first_s + self._rise_s * num_steps * (num_steps - 1) / 2

    def num_begun(self, now_s: float) -> int:
        """Return how many steps have begun, the one that runs now included."""
        elapsed_s, half_s = now_s - self.start_s, self._rise_s / 2
        linear_s = self._first_s - half_s
        if half_s > 0:
            count = int((sqrt(linear_s * linear_s + 4 * half_s * elapsed_s) - linear_s) / (2 * half_s))
        else:
            count = int(elapsed_s / self._first_s)
        while self._after_s(count) < now_s:  # rounding
            count += 1
        while count > 1 and self._after_s(count - 1) >= now_s:
            count -= 1
        return min(self.plan.num_steps, max(1, count))


MODEL = "simulated"
MAX_TASKS = 100_000
_MOST_PAGE_TOKENS = 64


class Builder:
    """Builds all workers of one cluster, of one profile, for one workload."""

    def __init__(self, profile: Profile, shape: Shape, workload: Workload) -> None:
        self._profile = profile
        self._shape = shape
        self._longest = max(each.prompt_tokens + workload.max_tokens(each) for each in workload.arrivals) + 1
        size = min(workload.block_tokens, _MOST_PAGE_TOKENS) if workload.block_tokens else _MOST_PAGE_TOKENS
        window = profile.window
        ratio, tokens = (0, None) if window is None else (window.ratio, window.tokens)
        # One head in each layer, whose width makes pages as large as the profile says.
        width = profile.kv_bytes_per_token // (4 * (1 + ratio))
        others = (KvGroup("window", ratio, 1, width, size, tokens),) if ratio else ()
        self.layout = KvLayout("simulated", 1, 1, width, size * max(1, ratio), "bfloat16", others=others)
        self.page_size = self.layout.page_size  # of the largest pages
        self.page_bytes = self.page_size * profile.kv_bytes_per_token // (1 + ratio)
        self.hasher = PrefixHasher(b"simulated", MODEL, self.page_size)
        self.costs = {role: profile.configuration(shape.tp_of(role)).costs() for role in POOLS}
        self._cache_hasher = self.hasher if workload.block_tokens else None

    def num_pages(self, role: Role) -> int:
        """Return how many KV pages a worker of a role has."""
        configuration = self._profile.configuration(self._shape.tp_of(role))
        return self.layout.paging.whole_pages(int(configuration.kv_tokens * self._shape.kv_share))

    @property
    def step_tokens(self) -> Mapping[Role, int]:
        """Return how many tokens a worker's step computes at most, in each role."""
        shape = self._shape
        return {Role.PREFILL: shape.prefill_chunk, Role.DECODE: max(shape.decode_chunk, shape.max_num_seqs)}

    def build(
        self, clock: VirtualClock, name: str, link: LinkId, role: Role, output_length: Callable[[bytes], int]
    ) -> tuple[SimWorker, Registration]:
        """Return a worker, and what it registers with."""
        num_pages, step_tokens = self.num_pages(role), self.step_tokens
        limits = EngineLimits(
            max_num_seqs=self._shape.max_num_seqs,
            max_num_batched_tokens=max(step_tokens.values()),
            max_model_len=self.layout.paging.most_tokens(num_pages, max(step_tokens.values()), self._longest),
            eos_token_ids=frozenset(),
        )
        cache = KvCache(num_pages, self.layout.paging, self._cache_hasher)
        scheduler = LeapingScheduler(cache, limits, output_length)
        # Nobody is lost, or falls silent.
        rules = Rules(MAX_TASKS, False, 1.0, lease_s=3600.0, role=role, step_tokens=step_tokens)
        core = WorkerCore(scheduler, ALL_IDS, self.page_bytes, b"simulated", rules)
        peer = Peer(WorkerId(name), Incarnation(link))
        scheduler.cache.take_changes()  # from now on they are noted
        worker = SimWorker(clock, (peer, link), core, scheduler, self.costs[role])
        return worker, self._registration(peer, link, role, limits)

    def _registration(self, peer: Peer, link: LinkId, role: Role, limits: EngineLimits) -> Registration:
        return Registration(
            link=link,
            worker_id=peer.worker_id,
            incarnation=peer.incarnation,
            role=role,
            protocol_version=PROTOCOL_VERSION,
            ready=True,
            model=MODEL,
            layout=self.layout,
            num_pages=self.num_pages(role),
            max_num_seqs=limits.max_num_seqs,
            max_model_len=limits.max_model_len,
            handoff_address=peer.worker_id,
            max_num_batched_tokens=self.step_tokens[role],
        )
