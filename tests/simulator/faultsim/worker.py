"""A worker's process: its loop around the real core, in virtual time.

As in `worker.loop`: handle what came, plan, run, commit; what comes while a step runs is handled at once. While a
worker only decodes, a step is planned ahead, and begins when the one before it ends. A step reads and writes memory at
its end, so that whatever touches its pages before that is seen.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import TYPE_CHECKING, cast

from faultsim.doors import Doors, FindPeer
from faultsim.engine import FakeRunner
from faultsim.links import SimLinks
from faultsim.memory import Memory
from faultsim.mover import CopyFaults, Host
from faultsim.network import End, Network
from faultsim.registration import MODEL, Size, registration
from faultsim.witness import WorkerWitness
from faultsim.world import Process, ViolationError
from pdserve.base.errors import InvariantError, ProtocolError
from pdserve.base.ids import Incarnation, Peer, WorkerId
from pdserve.base.roles import Role
from pdserve.engine.kvcache import KvCache
from pdserve.engine.scheduler import Limits, Scheduler
from pdserve.engine.step import Chunk, StepPlan, StepResult
from pdserve.executor.failing import Isolating
from pdserve.kvtransfer.doors import HEARTBEAT_S
from pdserve.kvtransfer.session import Introduction
from pdserve.protocol.prefix_hash import PrefixHasher
from pdserve.worker.admission import Rules
from pdserve.worker.core import WorkerCore
from pdserve.worker.inbox import MAX_INBOX
from pdserve.worker.load import leaked_pages
from pdserve.worker.messages import (
    Command,
    Event,
    Failed,
    Load,
    Placed,
    Report,
    RoleTaken,
    Ticked,
    Tokens,
)
from pdserve.worker.reporting import Reporter
from pdserve.worker.turns import Turns

if TYPE_CHECKING:
    from pdserve.worker.link import Links

MAX_QUARANTINED_SHARE = 0.5
CHECK_EVERY = 64  # turns of the loop between two looks at all pages


class WorkerProcess(Host):
    """One incarnation of a worker. Its role is what routers place on it."""

    def __init__(
        self, network: Network, name: str, incarnation: Incarnation, role: Role, size: Size, lease_s: float
    ) -> None:
        super().__init__(network.world, name, incarnation)
        self.role = role
        self.lease_s = lease_s
        self.peer = Peer(WorkerId(name), incarnation)
        self.network = network
        self.size = size
        self.runner = FakeRunner(size.num_pages, size.page_size, size.vocab_size, size.most_drafts, size.others)
        self.runner.before_states = self._break
        hasher = PrefixHasher(b"a secret of the cluster", MODEL, block_tokens=size.page_size)
        tokens = size.max_num_batched_tokens
        limits = Limits(size.max_num_seqs, tokens, size.max_model_len, frozenset(), size.most_drafts)
        self.scheduler = Scheduler(KvCache(size.num_pages, size.layout.paging, hasher), limits)
        self.memory = Memory(name, self.runner, self.scheduler.cache, size.shares)
        self.introduction = Introduction(self.peer, size.layout)
        key = self.world.rng.randbytes(16)
        adapters = frozenset([each.digest for each in size.adapters])
        settings = size.max_tasks, True, MAX_QUARANTINED_SHARE, lease_s, role
        rules = Rules(*settings, fills_steps_ahead=True, num_parts=len(size.shares), adapters=adapters)
        self.core = WorkerCore(self.scheduler, size.vocab_size, self.runner.page_bytes, key, rules)
        self.copy_faults = CopyFaults()
        self.site: Callable[[str, Process], object] = lambda name, process: None  # see Doors
        self.register = registration(self.introduction, role, size)
        self.links = SimLinks(self, network, self.register, self.offer, self._be_dismissed)
        self.reporter = Reporter(cast("Links", self.links), self.world)
        self.witness = WorkerWitness(name, self.world)
        self.break_next_step = False
        self._broken: list[Chunk] = []  # of the step that is computed
        self._steps = Isolating(self.runner.run)
        self._turns = Turns(self.core, self)
        self._reports_due_s = inf
        self.exited = False
        self.on_exit: Callable[[], object] = lambda: None
        self.on_dismissed: Callable[[], object] = lambda: None
        self._inbox: deque[Event] = deque()
        self._loaded = self._busy = False
        self._ticked_s = 0.0
        self._num_turns = 0

    def start(self, routers: Iterable[str], find_peer: FindPeer) -> None:
        self.doors = Doors(self, find_peer)
        for router in routers:
            self.links.dial(router)
        self.world.after(self.size.load_s, self, self._load)

    def _load(self) -> None:
        self._loaded = True
        self.register.ready = True
        self.register.load_progress = 1.0
        self.links.update()
        self._ticked_s = self.world.now
        self._turn()
        self.world.after(HEARTBEAT_S, self, self._wake)

    @property
    def can_listen(self) -> bool:
        """Whether the core may be handed an event now."""
        return self._loaded and not self._busy and not self.exited and not self.frozen

    def accept(self, end: End) -> None:
        self.doors.accept(end)

    def offer(self, event: Event) -> None:
        self._inbox.append(event)
        if len(self._inbox) > MAX_INBOX:
            raise ViolationError("I6", f"{self.name} has {len(self._inbox)} events waiting")
        self._turn()

    def check(self) -> None:
        """Raise ViolationError unless the pool adds up and every table is within its bound."""
        try:
            self.scheduler.cache.check()
            leaked = leaked_pages(self.scheduler.cache.pool, self.core.claims())
        except InvariantError as error:
            raise ViolationError("I2", f"{self.name}: {error}") from error
        if leaked:
            raise ViolationError("I2", f"{self.name} has leaked pages {leaked}: they belong to nothing that goes on")
        self.memory.check_cache()
        self.doors.check()

    def check_idle(self) -> None:
        """Raise ViolationError unless nothing is left of any request."""
        self.check()
        pool = self.scheduler.cache.pool
        if not self.core.idle or not all(mover.idle for mover in self.doors.movers) or pool.num_free != pool.num_pages:
            raise ViolationError("I2", f"{self.name} is not idle: {self.core.load()}")

    def _wake(self) -> None:
        """Say that this worker lives, and let its core know that time passes."""
        if self.exited:
            return
        silent_s, self._ticked_s = self.world.now - self._ticked_s, self.world.now
        self._turns.beat(self.world.now)
        self.offer(Ticked(silent_s))
        self.world.after(HEARTBEAT_S, self, self._wake)

    def beat(self, load: Load, num_steps: int) -> None:
        self.reporter.beat(load, num_steps)
        self.doors.beat()

    def refresh(self, load: Callable[[], Load], num_steps: int, *, at_once: bool) -> None:
        try:
            self.reporter.refresh(load, num_steps, at_once=at_once)
        except ValueError as error:
            raise ViolationError("I2", f"{self.name} reports a load that cannot be: {error}") from error

    def _turn(self, *, step_is_over: bool = False) -> None:
        """Go on until there is nothing to do, or a step runs."""
        if self._busy or not self._loaded or self.exited:
            return
        self._busy = True
        while self._inbox:
            self.handle(self._inbox.popleft())
        if step_is_over or not self._turns.steps:
            self._between_steps()
        self._busy = False

    def _between_steps(self) -> None:
        if self._turns.drained:
            self._exit()
        else:
            self._start_steps()
        self._num_turns += 1
        if self._num_turns % CHECK_EVERY == 0:
            self.check()

    def handle(self, event: Event) -> None:
        """Let the core take in one event. An honest one is never refused."""
        self.world.note(self.name, event)
        self.witness.sees(event)
        if isinstance(event, Placed):
            self.doors.note(event)
        try:
            self._turns.handle(event, self.world.now)
        except ProtocolError as error:
            raise ViolationError("I7", f"{self.name} refused an honest {event}: {error}") from error
        except ViolationError:
            raise
        except Exception as error:
            raise ViolationError("I7", f"{self.name} broke on {event}: {error!r}") from error
        self._turns.note((event,), self.world.now)

    def _start_steps(self) -> None:
        while True:
            try:
                plan = self._turns.next_step(self.world.now)
            except Exception as error:
                raise ViolationError("I7", f"{self.name} broke while planning: {error!r}") from error
            if plan is None:
                return
            self.witness.computes(self.scheduler.steps[-1].sequences)
            if len(self._turns.steps) == 1:
                self._begin(plan)

    def _begin(self, plan: StepPlan) -> None:
        elapsed_s = (self.size.step_s + self.size.token_s * plan.num_tokens) * (0.8 + 0.4 * self.world.rng.random())
        self.world.after(elapsed_s, self, self._step)

    def _step(self) -> None:
        """End the oldest step: what it computed is in memory now."""
        self._busy = True
        plan, *behind = self._turns.steps
        try:
            result = self._run(plan)
            if behind:
                self._begin(behind[0])
            self._turns.end_step(result, result.elapsed_s, self.world.now)
        except ViolationError:
            raise
        except Exception as error:
            raise ViolationError("I7", f"{self.name} broke on a step: {error!r}") from error
        self._busy = False
        self._turn(step_is_over=True)

    def _run(self, plan: StepPlan) -> StepResult:
        """Compute a step; one that breaks does so for all of its sequences, or for some."""
        announced = [page for claim in self.core.outgoing.claims() for page in claim.held]
        self.memory.check_step(plan, announced)
        self._broken = []
        return self._steps.run(plan)

    def _break(self, plan: StepPlan) -> None:
        """Raise if something of a step or of a part of it is broken, after K and V are written."""
        if self.break_next_step and plan.chunks:
            self.break_next_step = False
            share = self.world.rng.choice((0.3, 1.0))
            self._broken = [chunk for chunk in plan.chunks if self.world.rng.random() < share]
            self.world.note(self.name, f"a step breaks for {len(self._broken)} of {len(plan.chunks)} sequences")
        if any(chunk in self._broken for chunk in plan.chunks):
            raise RuntimeError("broken by the simulator")

    def perform(self, commands: Sequence[Command], step: tuple[StepPlan, StepResult] | None) -> None:
        reports: list[Report] = []
        for command in commands:
            if isinstance(command, Tokens):
                self.witness.reports(command)
                reports.append(command)
            elif isinstance(command, Report):
                if isinstance(command, Failed):
                    self.witness.fails(command)
                reports.append(command)
            elif isinstance(command, RoleTaken):
                self.world.note(self.name, command)
                self.witness.takes(command)
                self.role = command.role
                self.reporter.report_role(command)
            else:
                self.world.note(self.name, command)
                self.doors.perform(command)
        if reports or step:
            self.world.note(self.name, reports)
            self.reporter.send(reports, step)
            self._watch_reports()
        self.witness.check_moves(self.core, self.scheduler)

    def _watch_reports(self) -> None:
        """Let reports that wait for others go when it is time."""
        due_s = self.reporter.due_s
        if due_s < self._reports_due_s:
            self._reports_due_s = due_s
            self.world.at(due_s, self, self._send_reports)

    def _send_reports(self) -> None:
        self._reports_due_s = inf
        if not self.exited:
            self.reporter.send_due()
            self._watch_reports()

    def _be_dismissed(self) -> None:
        self.world.note(self.name, "dismissed")
        self.on_dismissed()

    def _exit(self) -> None:
        self.world.note(self.name, "drained")
        self.exited = True
        self.reporter.beat(self.core.load(), self._turns.num_steps)
        self.links.finish()
        self.world.after(0.05, None, self.on_exit)
