"""A worker under virtual time: its own core, and a profile in place of an engine.

As in `worker.loop`: handle what came, plan, run, commit; what comes while a step runs is handled at once. Steps that
only decode, until a sequence ends or another comes, are done in one leap.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, sqrt

from pdserve.base.clock import VirtualClock
from pdserve.base.ids import PROTOCOL_VERSION, Attempt, Incarnation, Peer, RequestId, WorkerId
from pdserve.base.roles import POOLS, Role
from pdserve.base.values import value
from pdserve.capacity.leaping import LeapingScheduler
from pdserve.engine.kvcache import KvCache
from pdserve.engine.scheduler import Limits as EngineLimits
from pdserve.engine.step import StepPlan, work_of
from pdserve.measure.workload import Workload
from pdserve.perfmodel.curve import Step, StepCosts
from pdserve.perfmodel.profile import Profile
from pdserve.protocol.kvlayout import KvGroup, KvLayout
from pdserve.protocol.prefix_hash import PrefixHasher
from pdserve.protocol.token_ids import ALL_IDS
from pdserve.router.requests.events import LinkId, Registration
from pdserve.worker.admission import Rules
from pdserve.worker.core import WorkerCore
from pdserve.worker.messages import Due, Event


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


@value
class Steps:
    """Steps that are alike, and how long each of them took."""

    each: Step
    each_s: float


Reported = dict[tuple[RequestId, Attempt], int]  # how many tokens of each placement the router knows
Perform = Callable[["SimWorker", Sequence[object], Steps | None], None]  # commands, and the steps they came of


class SimWorker:
    """A worker's loop around its core."""

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
        self.perform: Perform = _nothing
        self.leaps = True  # else each step is done by itself
        self.reports = False  # what its answers have gained, and how full it is, to every router
        self.on_drained: Callable[[SimWorker], None] | None = None  # called once, when it drains and nothing is left
        self.reported: Reported = {}
        self.reported_s = 0.0  # when it last reported its load
        self.sends_until_s = self.receives_until_s = 0.0  # copies, one at a time
        self._clock = clock
        self._costs = self._usual_costs = costs
        self._inbox: list[Event] = []
        self._is_waiting = False  # for its turn
        self._is_stepping = False
        self._due_s = inf  # when the core asked to be woken
        self._leap: _Leap | None = None
        self._num_turns = 0  # ends of leaps that were arranged; only the last one counts

    def offer(self, event: Event) -> None:
        """Hand an event to the core, at this moment."""
        self._inbox.append(event)
        if not self._is_waiting:
            self._is_waiting = True
            self._clock.soon(self._turn)

    def step_singly(self) -> None:
        """Do one step at a time from the next one on, and report to routers as workers do."""
        self.leaps, self.reports = False, True
        self._cut()

    def slow_down(self, factor: float) -> None:
        """Let steps from the next one on take so many times as long as the profile says."""
        self._costs = self._usual_costs.scaled(factor)
        self._cut()

    def _cut(self) -> None:
        """End the leap under way with the step that runs."""
        leap = self._leap
        if leap is not None:
            leap.num_steps = leap.num_begun(self._clock.now_s())
            self._arrange(leap)

    def _turn(self) -> None:
        self._is_waiting = False
        if self._inbox:
            self._take_in()
        if not self._is_stepping and self._leap is None:
            self._start()
        if self.core.due_s != self._due_s:
            self._due_s = self.core.due_s
            if self._due_s < inf:
                self._clock.at(max(self._due_s, self._clock.now_s()), self.offer, Due())
        if self.on_drained is not None and self.core.drained:
            leave, self.on_drained, self.perform = self.on_drained, None, _nothing
            leave(self)

    def _take_in(self) -> None:
        now_s, leap = self._clock.now_s(), self._leap
        if leap is not None and (num_begun := leap.num_begun(now_s)) > leap.num_with_pages:
            self.scheduler.take_pages(num_begun)
            leap.num_with_pages = num_begun
        inbox, self._inbox = self._inbox, []
        for event in inbox:
            commands = self.core.handle(event, now_s)
            if commands:
                self.perform(self, commands, None)
        if leap is not None and not self.scheduler.can_go_on(leap.num_steps):
            self._cut()

    def _start(self) -> None:
        now_s = self._clock.now_s()
        num_steps = self.scheduler.leap_length() if self.leaps else 0
        if num_steps:
            self._leap = _Leap(self._costs, now_s, num_steps, *self.scheduler.batch())
            self.scheduler.begin_leap()
            self._arrange(self._leap)
            return
        plan = self.core.plan(now_s)
        if plan is not None:
            self._is_stepping = True
            step = work_of(plan)
            elapsed_s = self._costs.seconds(step)
            self._clock.at(now_s + elapsed_s, self._end_step, plan, step, elapsed_s)

    def _end_step(self, plan: StepPlan, step: Step, elapsed_s: float) -> None:
        self._is_stepping = False
        self._commit(plan, step, elapsed_s, 1)

    def _arrange(self, leap: "_Leap") -> None:
        """Let a leap end when its steps do; an end arranged before does not count."""
        self._num_turns += 1
        self._clock.at(leap.end_s, self._end_leap, self._num_turns)

    def _end_leap(self, turn: int) -> None:
        leap = self._leap
        if leap is None or turn != self._num_turns:
            return
        self._leap = None
        plan = self.scheduler.leap(leap.num_steps)
        middle = Step(sequences=leap.sequences, kv_tokens=leap.kv_tokens + leap.sequences * (leap.num_steps // 2))
        self._commit(plan, middle, leap.end_s - leap.start_s, leap.num_steps)

    def _commit(self, plan: StepPlan, step: Step, elapsed_s: float, num_steps: int) -> None:
        self.busy_s += elapsed_s
        self.num_steps += num_steps
        result = self.scheduler.sample(plan, elapsed_s)
        commands = self.core.commit(plan, result, self._clock.now_s())
        self.perform(self, commands, Steps(step, elapsed_s / num_steps))
        self._turn()


class _Leap:
    """Decode steps of one batch, and when each ends."""

    def __init__(self, costs: StepCosts, start_s: float, num_steps: int, sequences: int, kv_tokens: int) -> None:
        curve = costs.decode_curve(sequences)
        self.start_s = start_s
        self.num_steps = num_steps
        self.sequences = sequences
        self.kv_tokens = kv_tokens  # that the first step reads
        self.num_with_pages = 0  # of its steps: their pages are taken
        self._first_s = curve.seconds(sequences, kv_tokens)
        self._rise_s = curve.context_s * sequences  # each step reads one token a sequence more

    @property
    def end_s(self) -> float:
        return self._after_s(self.num_steps)

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
        return min(self.num_steps, max(1, count))


def _nothing(*_: object) -> None:
    pass


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
            max_model_len=self.layout.most_tokens(num_pages, max(step_tokens.values()), self._longest),
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
