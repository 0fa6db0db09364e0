"""A worker under virtual time: its own core and turns, and a profile in place of an engine."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from pdserve.base.clock import VirtualClock
from pdserve.base.ids import PROTOCOL_VERSION, Attempt, Incarnation, Peer, RequestId, WorkerId
from pdserve.base.roles import POOLS, Role
from pdserve.capacity.answers import AnswerScheduler
from pdserve.engine.kvcache import KvCache
from pdserve.engine.scheduler import Limits as EngineLimits
from pdserve.engine.step import StepPlan, StepResult, work_of
from pdserve.measure.workload import Workload
from pdserve.perfmodel.curve import StepCosts, TimedStep
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
    moves: bool = False  # whether answers leave workers that run out of pages

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
        scheduler: AnswerScheduler,
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
        self._ended: TimedStep | None = None  # the step that has ended last

    def offer(self, event: Event) -> None:
        """Hand an event to the core, at this moment."""
        self._inbox.append(event)
        if not self._is_waiting:
            self._is_waiting = True
            self._clock.soon(self._turn)

    def slow_down(self, factor: float) -> None:
        """Let steps from the next one on take so many times as long as the profile says."""
        self._costs = self._usual_costs.scaled(factor)

    def perform(self, commands: Sequence[Command], step: tuple[StepPlan, StepResult] | None) -> None:
        if self.cluster is not None and (commands or step):
            self.cluster.perform(self, commands, self._ended if step else None)

    def beat(self, load: Load, num_steps: int) -> None:
        """Report nothing: routers learn of a drain with the next step."""

    def refresh(self, load: Callable[[], Load], num_steps: int, *, at_once: bool) -> None:
        if self.cluster is not None:
            self.cluster.refresh(self, at_once=at_once)

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
        inbox, self._inbox = self._inbox, []
        for event in inbox:
            self._turns.handle(event, now_s)
        self._turns.note(inbox, now_s)

    def _begin(self, plan: StepPlan, now_s: float) -> None:
        work = work_of(plan)
        elapsed_s = self._costs.seconds(work)
        self._clock.at(now_s + elapsed_s, self._end, TimedStep(work, elapsed_s))

    def _end(self, step: TimedStep) -> None:
        self.busy_s += step.elapsed_s
        self.num_steps += 1
        self._ended = step
        self._turns.end_step(StepResult((), step.elapsed_s), step.elapsed_s, self._clock.now_s())
        self._turn()


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
        scheduler = AnswerScheduler(cache, limits, output_length)
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
