"""What a prefill worker does next. Decides; does no I/O.

Invariant: a task is in the table from its placement until its pages are released, and is released once; each task
reports its tokens, or one failure, or was cancelled.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from pdserve.engine.scheduler import Scheduler
from pdserve.engine.sequence import Broken, Computed, Sampled, Sequence, Split, Started
from pdserve.engine.step import StepPlan, StepResult
from pdserve.errors import InvariantError
from pdserve.kvtransfer import sender
from pdserve.kvtransfer.session import MIN_LEASE_S, Capsule, HandoffKey, Peer
from pdserve.load import LoadPart
from pdserve.prefill_worker.absent import Absent
from pdserve.prefill_worker.backlog import Backlog
from pdserve.prefill_worker.events import (
    CancelCopies,
    Command,
    Copy,
    Event,
    Forget,
    FromPeer,
    PeerAttached,
    PeerLost,
    ToPeer,
)
from pdserve.prefill_worker.redialling import Redialling
from pdserve.prefill_worker.tasks import Task, key_of
from pdserve.reports import Failure, Stage
from pdserve.worker.admission import refusal
from pdserve.worker.audit import Auditor, Claim
from pdserve.worker.draining import Draining
from pdserve.worker.load import Taken, load_of, waiting
from pdserve.worker.messages import (
    BEAT_S,
    Cancelled,
    DrainAsked,
    Failed,
    Load,
    PeerGone,
    Placed,
    Progress,
    RouterLost,
    Ticked,
    Tokens,
)


class PrefillCore:
    def __init__(
        self, scheduler: Scheduler, vocab_size: int, page_bytes: int, max_tasks: int, max_quarantined_share: float
    ) -> None:
        self._scheduler = scheduler
        self._vocab_size = vocab_size
        self._page_bytes = page_bytes
        self._max_tasks = max_tasks
        self._tasks: dict[HandoffKey, Task] = {}
        self._absent = Absent(max_tasks)
        self._backlog = Backlog(scheduler)
        self._redialling = Redialling()
        self._order = 0
        self._draining = Draining(max_quarantined_share)
        self._ticked_s = 0.0
        self._auditor = Auditor(scheduler.cache.pool)
        self._taken = Taken()

    @property
    def idle(self) -> bool:
        return not self._tasks

    @property
    def drained(self) -> bool:
        """Whether nothing is left to wait for: copies to peers that may be frozen end with this process."""
        return self._draining.is_on and all(task.is_stuck for task in self._tasks.values())

    def claims(self) -> tuple[Claim, ...]:
        """Return the pages of everything that goes on."""
        tasks = tuple(Claim(held=task.sequence.pages) for task in self._tasks.values())
        return (Claim(held=self._scheduler.leaving), *tasks)

    def load(self) -> Load:
        load, num_quarantined = load_of(self._scheduler, self._auditor), self._num_quarantined()
        present = ((t.router, LoadPart(0, 0, 0, *waiting(t.sequence))) for t in self._tasks.values() if not t.ended)
        return replace(
            load,
            pages_held=load.pages_held - num_quarantined,
            pages_quarantined=num_quarantined,
            num_waiting=load.num_waiting + self._backlog.num_waiting,
            waiting_tokens=load.waiting_tokens + self._backlog.waiting_tokens,
            num_handoffs=len(self._tasks),
            draining=self._draining.is_on,
            drain_reason=self._draining.reason,
            parts=self._taken.parts(present),
        )

    def handle(self, event: Event, now_s: float) -> list[Command]:
        """Take in one event; return what to do now, in order. ProtocolError is the peer's and changes nothing."""
        commands = self._react(event, now_s)
        self._backlog.start()
        return commands

    def _react(self, event: Event, now_s: float) -> list[Command]:  # noqa: C901 - one match
        match event:
            case Placed():
                return self._place(event, now_s)
            case FromPeer(peer, key, news):
                task = self._tasks.get(key)
                if task is None or task.peer != peer:
                    return self._absent.hear(event, now_s)
                return self._advance(task, news, now_s)
            case Cancelled(request_id, attempt, indices):
                doomed = (
                    key
                    for key, task in self._tasks.items()
                    if key.request_id == request_id and key.attempt <= attempt and task.drop(indices)
                )
                return self._give_up(doomed, "cancelled")
            case RouterLost(router):
                self._taken.forget(router)
                return self._give_up((k for k, t in self._tasks.items() if t.router == router), "router lost")
            case Ticked(silent_s):
                commands = self._fell_silent(silent_s, now_s) if silent_s > MIN_LEASE_S else []
                late = (k for k, t in self._tasks.items() if t.deadline_s < now_s)
                self._auditor.look(self.claims(), now_s, idle=self.idle)
                commands += self._give_up(late, "deadline")
                commands += self._absent.expire(now_s) + self._redialling.dial(now_s)
                return commands + self._leave_if_too_much_is_quarantined(now_s)
            case DrainAsked():
                self._draining.ask()
                return []
            case PeerAttached(peer):
                self._redialling.attached(peer)
                return []
            case PeerLost(peer, reason):
                self._redialling.lose(peer, now_s)
                self._absent.lose(peer)
                return self._lose(peer, reason, now_s)
            case PeerGone(peer):
                self._redialling.forget(peer)
                self._absent.forget(peer)
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
            task = self._tasks.get(key_of(outcome.sequence))
            if task is None:
                continue  # an outcome before this one has ended it
            match outcome:
                case Started(sequence):
                    started_s, cached = now_s - result.elapsed_s, sequence.num_cached_tokens
                    commands.append(
                        Progress(task.router, task.key, Stage.PREFILL_STARTED, started_s, cached_tokens=cached)
                    )
                case Computed():
                    commands += self._announce(task, now_s)
                case Sampled(_, index, position, token, finish):
                    commands.append(Tokens(task.router, task.key, index, position, token, finish))
                    finished[task.key] = task
                    if finish is None:
                        task.first_tokens += ((index, token.token_id),)
                case Broken(_, reason):
                    commands += self._break(task, reason)
                case Split():
                    raise InvariantError("a prompt split before its hand-off")
        for task in finished.values():
            commands += self._prompt_done(task, now_s)
        self._backlog.start()
        return commands

    def _break(self, task: Task, reason: str) -> list[Command]:
        """Fail a request that cannot be computed."""
        failed: list[Command] = []
        if not task.ended:
            failed.append(Failed(task.router, task.key, Failure.INTERNAL, reason))
        return failed + self._give_up([task.key], reason)

    def _place(self, placed: Placed, now_s: float) -> list[Command]:
        job = placed.job
        key = HandoffKey(job.request_id, job.attempt)
        reason = refusal(self._scheduler, job, self._vocab_size)
        if reason is not None:
            return [Failed(placed.router, key, Failure.INVALID, reason)]
        if self._draining.is_on or len(self._tasks) >= self._max_tasks or key in self._tasks:
            why = "draining" if self._draining.is_on else f"{len(self._tasks)} of {self._max_tasks} requests"
            return [Failed(placed.router, key, Failure.OVERLOADED, why)]
        if self._absent.is_closed(placed.peer, key):
            return [Failed(placed.router, key, Failure.PEER_LOST, "its grant was given back before it was placed")]
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
        self._taken.add(placed.router, job, computes=True)
        self._backlog.add(task)
        commands: list[Command] = [Progress(placed.router, key, Stage.PREFILL_QUEUED, now_s)]
        if placed.peer is not None:
            commands.append(self._redialling.named(placed.peer, placed.peer_address))
        early = self._absent.take_early(placed.peer, key)
        return commands + (self._advance(task, early.event, now_s) if early else [])

    def _lose(self, peer: Peer, reason: str, now_s: float) -> list[Command]:
        lost = [task for task in self._tasks.values() if task.peer == peer]
        return [c for task in lost for c in self._advance(task, sender.PeerLost(reason), now_s)]

    def _fell_silent(self, silent_s: float, now_s: float) -> list[Command]:
        """Start no more copies under leases that have lapsed: this process was frozen."""
        tasks = list(self._tasks.values())
        return [c for task in tasks for c in self._advance(task, sender.FellSilent(silent_s), now_s)]

    def _num_quarantined(self) -> int:
        """Return how many pages copies may read that do not stop."""
        return len({page for task in self._tasks.values() if task.is_stuck for page in task.sequence.pages})

    def _leave_if_too_much_is_quarantined(self, now_s: float) -> list[Command]:
        """Drain once too few pages are left to be of use, and give back what waits for pages."""
        awake_s = min(now_s - self._ticked_s, 2 * BEAT_S)  # more than that is this process's own silence
        self._ticked_s = now_s
        for task in self._tasks.values():
            task.wait_for_copies(awake_s)
        if not self._draining.look(self._num_quarantined(), self._scheduler.cache.pool.num_pages):
            return []
        refused = [task for task in self._tasks.values() if not task.sequence.pages and not task.ended]
        reason, code = self._draining.reason, Failure.OVERLOADED
        failed: list[Command] = [Failed(task.router, task.key, code, reason) for task in refused]
        return failed + self._give_up([task.key for task in refused], reason)

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
        commands: list[Command] = [Progress(task.router, task.key, Stage.PREFILL_DONE, now_s)]
        if task.first_tokens and task.peer is not None:
            indices, tokens = zip(*task.first_tokens, strict=True)
            capsule = Capsule(len(task.sequence.tokens), tokens, indices)
            task.sendable_s = max(task.sendable_s, now_s)
            return commands + self._advance(task, sender.PrefillDone(capsule), now_s)
        task.ended = True
        if task.first_tokens:
            commands.append(Failed(task.router, task.key, Failure.INVALID, "no decode worker was named"))
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
            self._backlog.settle(task)
        return [c for command in commands for c in self._perform(task, command, now_s)]

    def _perform(self, task: Task, command: sender.Command, now_s: float) -> Iterator[Command]:
        match command:
            case sender.StartCopy(src, dst) if task.peer is not None:
                yield Copy(task.peer, task.key, src, dst)
            case sender.CancelCopies() if task.peer is not None:
                yield CancelCopies(task.peer, task.key)
            case sender.SendCommit(commit) if task.peer is not None:
                handoff_bytes = task.sender.num_pages_sent * self._page_bytes
                measured = commit.measured(handoff_bytes, now_s - task.sendable_s)
                yield ToPeer(task.peer, task.key, sender.SendCommit(measured))
            case sender.SendQuiesced() if task.peer is not None:
                yield ToPeer(task.peer, task.key, command)
            case sender.ReleasePages():
                self._backlog.remove(task)
                self._scheduler.remove(task.sequence)
                del self._tasks[task.key]
                in_doubt = task.sender.state is sender.State.IN_DOUBT
                self._absent.close(task.peer, task.key, in_doubt=in_doubt)
            case sender.Failed(failure, reason):
                self._scheduler.stop(task.sequence)
                if not task.ended:
                    task.ended = True
                    yield Failed(task.router, task.key, failure, reason)
            case _:
                pass  # no peer: nobody to tell
