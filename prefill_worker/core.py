"""What a prefill worker does next. Decides; does no I/O.

Invariant: a task is in the table from its placement until its pages are released, and is released once; each task
reports its tokens, or one failure, or was cancelled.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import replace

from pdserve.engine.outcomes import Computed, Drawn, Split, Started
from pdserve.engine.scheduler import Scheduler
from pdserve.engine.sequence import Sequence
from pdserve.engine.step import StepPlan, StepResult
from pdserve.errors import InvariantError
from pdserve.kvtransfer import sender
from pdserve.kvtransfer.session import MIN_LEASE_S, Capsule, HandoffKey, Peer
from pdserve.prefill_worker.events import Command, Connect, Copy, Event, Forget, FromPeer, PeerLost, ToPeer
from pdserve.prefill_worker.tasks import Task, key_of
from pdserve.worker.admission import refusal
from pdserve.worker.audit import Auditor, Claim
from pdserve.worker.load import load_of
from pdserve.worker.words import (
    Cancelled,
    DrainAsked,
    Failed,
    FailureCode,
    Load,
    PeerGone,
    Placed,
    Progress,
    RouterLost,
    Rung,
    Ticked,
    Tokens,
)

EARLY_GRANT_S = 5.0  # how long a grant may wait for its placement
REDIAL_S = 600.0  # how long a peer is dialled again that was lost and may wait for word of ours
MAX_ADDRESSES = 1024
MAX_CLOSED = 4096


class PrefillCore:
    def __init__(self, scheduler: Scheduler, vocab_size: int, page_bytes: int, max_tasks: int) -> None:
        self._scheduler = scheduler
        self._vocab_size = vocab_size
        self._page_bytes = page_bytes
        self._max_tasks = max_tasks
        self._tasks: dict[HandoffKey, Task] = {}
        self._early: dict[HandoffKey, tuple[float, FromPeer]] = {}  # grants that overtook their placement
        self._closed: OrderedDict[HandoffKey, None] = OrderedDict()  # the last ones, to answer late grants at once
        self._in_doubt: dict[Peer, set[HandoffKey]] = {}  # hand-offs into pages that late bytes may still reach
        self._unstarted: list[Task] = []  # wait until they are granted or leave room for those that are
        self._may_start = False  # whether one of them may have room that had none when this was last tried
        self._pages_ahead = 0  # of all tasks
        self._addresses: OrderedDict[Peer, str] = OrderedDict()
        self._lost: dict[Peer, float] = {}  # since when; peers whose stream ended, to be dialled again
        self._order = 0
        self._draining = False
        self._auditor = Auditor(scheduler.cache.pool)

    @property
    def idle(self) -> bool:
        return not self._tasks

    @property
    def drained(self) -> bool:
        return self._draining and self.idle

    def claims(self) -> tuple[Claim, ...]:
        """Return the pages of everything that goes on."""
        tasks = tuple(Claim(held=task.sequence.pages) for task in self._tasks.values())
        return (Claim(held=self._scheduler.leaving), *tasks)

    def load(self) -> Load:
        load, unstarted = load_of(self._scheduler, self._auditor), self._unstarted
        return replace(
            load,
            num_waiting=load.num_waiting + len(unstarted),
            waiting_tokens=load.waiting_tokens + sum(len(task.sequence.tokens) for task in unstarted),
            num_handoffs=len(self._tasks),
            draining=self._draining,
        )

    def handle(self, event: Event, now_s: float) -> list[Command]:
        """Take in one event; return what to do now, in order. ProtocolError is the peer's and changes nothing."""
        commands = self._react(event, now_s)
        if self._may_start:
            self._start_waiting()
        return commands

    def _react(self, event: Event, now_s: float) -> list[Command]:  # noqa: C901 - one match
        match event:
            case Placed():
                return self._place(event, now_s)
            case FromPeer(peer, key, news):
                task = self._tasks.get(key)
                if task is None or task.peer != peer:
                    return self._unknown(event, now_s)
                return self._advance(task, news, now_s)
            case Cancelled(request_id, attempt, indices):
                doomed = (
                    key
                    for key, task in self._tasks.items()
                    if key.request_id == request_id and key.attempt <= attempt and task.drop(indices)
                )
                return self._give_up(doomed, "cancelled")
            case RouterLost(router):
                return self._give_up((k for k, t in self._tasks.items() if t.router == router), "router lost")
            case Ticked(silent_s):
                commands = self._fell_silent(silent_s, now_s) if silent_s > MIN_LEASE_S else []
                late = (k for k, t in self._tasks.items() if t.deadline_s < now_s)
                self._auditor.look(self.claims(), now_s, idle=self.idle)
                return commands + self._give_up(late, "deadline") + self._expire_early(now_s) + self._redial(now_s)
            case DrainAsked():
                self._draining = True
                return []
            case PeerLost(peer, reason):
                if peer in self._addresses:
                    self._lost.setdefault(peer, now_s)
                return self._lose(peer, reason, now_s)
            case PeerGone(peer):
                self._addresses.pop(peer, None)
                self._lost.pop(peer, None)
                self._in_doubt.pop(peer, None)
                return [*self._lose(peer, "the peer's process ended", now_s), Forget(peer)]

    def plan(self, now_s: float) -> StepPlan | None:
        """Return the next step, or None if there is nothing to compute."""
        del now_s
        return self._scheduler.plan()

    def commit(self, plan: StepPlan, result: StepResult, now_s: float) -> list[Command]:
        """Take in what a step brought."""
        commands: list[Command] = []
        finished: dict[HandoffKey, Task] = {}
        for outcome in self._scheduler.commit(plan, result):
            task = self._tasks[key_of(outcome.sequence)]
            match outcome:
                case Started(sequence):
                    started_s, cached = now_s - result.elapsed_s, sequence.num_cached_tokens
                    commands.append(
                        Progress(task.router, task.key, Rung.PREFILL_STARTED, started_s, cached_tokens=cached)
                    )
                case Computed():
                    commands += self._announce(task, now_s)
                case Drawn(_, index, position, token, finish):
                    commands.append(Tokens(task.router, task.key, index, position, token, finish))
                    finished[task.key] = task
                    if finish is None:
                        task.first_tokens += ((index, token.token_id),)
                case Split():
                    raise InvariantError("a prompt split before its hand-off")
        for task in finished.values():
            commands += self._prompt_done(task, now_s)
        return commands

    def fail_step(self, reason: str) -> list[Command]:
        """Fail the requests of the planned step: computing it has broken."""
        broken = [self._tasks[key_of(sequence)] for sequence in self._scheduler.abandon()]
        commands: list[Command] = []
        for task in broken:
            if not task.ended:
                commands.append(Failed(task.router, task.key, FailureCode.INTERNAL, reason))
            commands += self._give_up([task.key], reason)
        return commands

    def _place(self, placed: Placed, now_s: float) -> list[Command]:
        job = placed.job
        key = HandoffKey(job.request_id, job.attempt)
        reason = refusal(self._scheduler, job, self._vocab_size)
        if reason is not None:
            return [Failed(placed.router, key, FailureCode.INVALID, reason)]
        if self._draining or len(self._tasks) >= self._max_tasks or key in self._tasks:
            why = "draining" if self._draining else f"{len(self._tasks)} of {self._max_tasks} requests"
            return [Failed(placed.router, key, FailureCode.OVERLOADED, why)]
        if key in self._closed:
            return [Failed(placed.router, key, FailureCode.PEER_LOST, "its grant was given back before it was placed")]
        self._order += 1
        sequence = Sequence(
            job=job,
            indices=job.indices,
            tokens=list(job.token_ids),
            order=self._order,
            stop_after_prompt=True,
        )
        task = Task(placed.router, key, sequence, placed.peer, sender.Sender(), placed.deadline_s)
        task.is_granted = placed.peer is None
        self._tasks[key] = task
        self._unstarted.append(task)
        self._unstarted.sort(key=lambda t: t.sequence.urgency)
        self._may_start = True
        commands: list[Command] = [Progress(placed.router, key, Rung.PREFILL_QUEUED, now_s)]
        if placed.peer is not None:
            commands.append(Connect(placed.peer, placed.peer_address))
            self._addresses[placed.peer] = placed.peer_address
            self._addresses.move_to_end(placed.peer)
            if len(self._addresses) > MAX_ADDRESSES:
                forgotten, _ = self._addresses.popitem(last=False)
                self._lost.pop(forgotten, None)
        _, early = self._early.pop(key, (0.0, None))
        return commands + (self.handle(early, now_s) if early else [])

    def _start_waiting(self) -> None:
        """Give prompts to the scheduler: those with room on their decode worker, and others only ahead of that.

        A decode worker may have set pages aside for a prompt that is still to be computed here. Prompts that wait for
        its grants while they hold pages here must leave enough for the longest prompt, or each would wait for the
        other for ever.
        """
        cache, limits = self._scheduler.cache, self._scheduler.limits
        room = cache.pool.num_pages - cache.num_pages(limits.max_model_len) - self._pages_ahead
        waiting: list[Task] = []
        for task in self._unstarted:
            ahead = 0
            if not task.is_granted and (room <= 0 or (ahead := cache.num_pages(len(task.sequence.tokens))) > room):
                waiting.append(task)
                room = 0  # the next ones do not overtake it
                continue
            room -= ahead
            task.has_started, task.pages_ahead = True, ahead
            self._pages_ahead += ahead
            self._scheduler.add(task.sequence)
        self._unstarted, self._may_start = waiting, False

    def _settle_ahead(self, task: Task) -> None:
        """Count a task no longer among those that hold pages before they are granted any, or wait for that."""
        self._pages_ahead -= task.pages_ahead
        task.pages_ahead = 0
        self._may_start = True

    def _redial(self, now_s: float) -> list[Command]:
        """Dial lost peers again: pages that they granted stay quarantined until we answer for them."""
        lost, self._lost = self._lost, {}
        commands: list[Command] = []
        for peer, since_s in lost.items():
            if now_s - since_s < REDIAL_S:
                commands.append(Connect(peer, self._addresses[peer]))
        return commands

    def _lose(self, peer: Peer, reason: str, now_s: float) -> list[Command]:
        self._early = {k: e for k, e in self._early.items() if e[1].peer != peer}
        lost = [task for task in self._tasks.values() if task.peer == peer]
        return [c for task in lost for c in self._advance(task, sender.PeerLost(reason), now_s)]

    def _fell_silent(self, silent_s: float, now_s: float) -> list[Command]:
        """Start no more copies under leases that have lapsed: this process was frozen."""
        tasks = list(self._tasks.values())
        return [c for task in tasks for c in self._advance(task, sender.FellSilent(silent_s), now_s)]

    def _unknown(self, news: FromPeer, now_s: float) -> list[Command]:
        """Answer news of a hand-off that is not here: over, or not here yet."""
        may_come = news.key not in self._closed and len(self._early) < self._max_tasks
        if isinstance(news.event, sender.Granted) and may_come:
            self._early[news.key] = (now_s, news)
            return []
        self._early.pop(news.key, None)
        if not isinstance(news.event, sender.Granted | sender.Withdrawn):
            return []
        if news.key in self._in_doubt.get(news.peer, ()):
            return []  # to say that it is quiescent would be a guess
        return [self._give_back(news, "unknown here")]

    def _give_back(self, news: FromPeer, reason: str) -> Command:
        """Answer for a hand-off that is not here, and will not be from now on."""
        if news.key not in self._tasks:
            self._close(news.key)
        return ToPeer(news.peer, news.key, sender.SendQuiesced(reason))

    def _close(self, key: HandoffKey) -> None:
        self._closed[key] = None
        if len(self._closed) > MAX_CLOSED:
            self._closed.popitem(last=False)

    def _expire_early(self, now_s: float) -> list[Command]:
        expired = [news for since_s, news in self._early.values() if now_s - since_s > EARLY_GRANT_S]
        for news in expired:
            del self._early[news.key]
        return [self._give_back(news, "never placed here") for news in expired]

    def _announce(self, task: Task, now_s: float) -> list[Command]:
        """Tell the hand-off about pages that have become final: full ones, and at the end the last one."""
        sequence = task.sequence
        final = sequence.computed // self._scheduler.cache.page_size
        if sequence.num_missing == 0:
            final = len(sequence.pages)
        pages = tuple(sequence.pages[task.num_announced : final])
        task.num_announced = final
        return self._advance(task, sender.PagesReady(pages), now_s) if pages and task.peer else []

    def _prompt_done(self, task: Task, now_s: float) -> list[Command]:
        commands: list[Command] = [Progress(task.router, task.key, Rung.PREFILL_DONE, now_s)]
        if task.first_tokens and task.peer is not None:
            indices, tokens = zip(*task.first_tokens, strict=True)
            capsule = Capsule(len(task.sequence.tokens), tokens, indices)
            task.sendable_s = max(task.sendable_s, now_s)
            return commands + self._advance(task, sender.PrefillDone(capsule), now_s)
        task.ended = True
        if task.first_tokens:
            commands.append(Failed(task.router, task.key, FailureCode.INVALID, "no decode worker was named"))
        return commands + self._advance(task, sender.GaveUp("finished with its first token"), now_s)

    def _give_up(self, keys: Iterable[HandoffKey], reason: str) -> list[Command]:
        commands: list[Command] = []
        for key in list(keys):
            task = self._tasks[key]
            task.ended = True
            self._scheduler.stop(task.sequence)
            commands += self._advance(task, sender.GaveUp(reason), 0.0)
        return commands

    def _advance(self, task: Task, event: sender.Event, now_s: float) -> list[Command]:
        commands = task.sender.handle(event)
        if isinstance(event, sender.Granted):
            task.sendable_s = max(task.sendable_s, now_s)
            task.is_granted = True
            self._settle_ahead(task)
        return [c for command in commands for c in self._perform(task, command, now_s)]

    def _perform(self, task: Task, command: sender.Command, now_s: float) -> Iterator[Command]:
        match command:
            case sender.StartCopy(src, dst) if task.peer is not None:
                yield Copy(task.peer, task.key, src, dst)
            case sender.SendCommit(commit) if task.peer is not None:
                handoff_bytes = task.sender.num_pages_sent * self._page_bytes
                measured = commit.measured(handoff_bytes, now_s - task.sendable_s)
                yield ToPeer(task.peer, task.key, sender.SendCommit(measured))
            case sender.SendQuiesced() if task.peer is not None:
                yield ToPeer(task.peer, task.key, command)
            case sender.ReleasePages():
                if not task.has_started:
                    self._unstarted.remove(task)
                self._settle_ahead(task)
                self._scheduler.remove(task.sequence)
                del self._tasks[task.key]
                self._close(task.key)
                if task.sender.state is sender.State.IN_DOUBT and task.peer is not None:
                    self._in_doubt.setdefault(task.peer, set()).add(task.key)
            case sender.Failed(transfer, reason):
                self._scheduler.stop(task.sequence)
                if not task.ended:
                    task.ended = True
                    code = FailureCode.TRANSFER_FAILED if transfer else FailureCode.PEER_LOST
                    yield Failed(task.router, task.key, code, reason)
            case _:
                pass  # no peer: nobody to tell
