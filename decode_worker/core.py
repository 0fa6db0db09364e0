"""What a decode worker does next. Decides; does no I/O.

Invariants: a sequence runs only on pages committed for it, or computed here; pages that a peer was offered leave
this core's hands only as the receiver's half of the hand-off says; each task reports its tokens or one failure.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from pdserve.decode_worker.events import (
    CheckDigests,
    Command,
    DigestsChecked,
    Event,
    Forget,
    FromPeer,
    PeerAlive,
    PeerAttached,
    PeerLost,
    ToPeer,
)
from pdserve.decode_worker.granting import Granting, committed
from pdserve.decode_worker.rules import Rules
from pdserve.decode_worker.tasks import Inbound, Task, check_capsule
from pdserve.engine.scheduler import Scheduler
from pdserve.engine.sequence import Broken, Computed, Sampled, Sequence, Split, Started
from pdserve.engine.step import StepPlan, StepResult
from pdserve.errors import InvariantError, ProtocolError, Refusal
from pdserve.ids import Attempt, RequestId
from pdserve.kvtransfer import receiver
from pdserve.kvtransfer.lease import Leases
from pdserve.kvtransfer.session import Capsule, HandoffKey, Peer
from pdserve.reports import Failure, Stage
from pdserve.worker.admission import refusal
from pdserve.worker.audit import Auditor, Claim
from pdserve.worker.draining import Draining
from pdserve.worker.load import Taken, load_of
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


class DecodeCore:
    def __init__(self, scheduler: Scheduler, vocab_size: int, capability_key: bytes, rules: Rules) -> None:
        self._scheduler = scheduler
        self._vocab_size = vocab_size
        self._granting = Granting(scheduler, capability_key, rules)
        self._rules = rules
        self._tasks: dict[tuple[RequestId, Attempt], Task] = {}  # by key
        self._ungranted: list[Task] = []  # wait for pages, most urgent first
        self._inbound: dict[HandoffKey, Inbound] = {}
        self._leases = Leases(rules.lease_s)
        self._draining = Draining(rules.max_quarantined_share)
        self._num_digest_mismatches = 0
        self._auditor = Auditor(scheduler.cache.pool)
        self._taken = Taken()

    @property
    def idle(self) -> bool:
        return not self._tasks and not self._inbound

    @property
    def drained(self) -> bool:
        return self._draining.is_on and not self._tasks

    def num_granted_to(self, peer: Peer) -> int:
        """Return how many grants of a peer are open: it may write into their pages."""
        return sum(i.peer == peer and i.receiver.state is receiver.State.GRANTED for i in self._inbound.values())

    def claims(self) -> Iterator[Claim]:
        """Yield the pages of everything that goes on."""
        yield Claim(held=self._scheduler.leaving)
        for task in self._tasks.values():
            yield from (Claim(held=sequence.pages) for sequence in task.sequences)
        yield from (inbound.claim for inbound in self._inbound.values())

    def load(self) -> Load:
        load, cache = load_of(self._scheduler, self._auditor), self._scheduler.cache
        return replace(
            load,
            num_waiting=load.num_waiting + len(self._ungranted),
            pages_wanted=load.pages_wanted + sum(cache.num_pages(len(t.job.token_ids)) for t in self._ungranted),
            parts=self._taken.parts((task.router, task.part) for task in self._tasks.values()),
            num_handoffs=len(self._inbound),
            num_digest_mismatches=self._num_digest_mismatches,
            draining=self._draining.is_on,
            drain_reason=self._draining.reason,
        )

    def handle(self, event: Event, now_s: float) -> list[Command]:
        """Take in one event; return what to do now, in order. ProtocolError is the peer's and changes nothing."""
        return self._react(event, now_s) + self._grant_waiting(now_s)

    def plan(self, now_s: float) -> StepPlan | None:
        """Return the next step, or None if there is nothing to compute."""
        del now_s
        return self._scheduler.plan()

    def commit(self, plan: StepPlan, result: StepResult, now_s: float) -> list[Command]:
        """Take in what a step brought."""
        commands: list[Command] = []
        for outcome in self._scheduler.commit(plan, result):
            task = self._tasks.get(outcome.sequence.job.key)
            if task is None:
                continue  # an outcome before this one has ended it
            match outcome:
                case Sampled():
                    index, finish = outcome.index, outcome.finish
                    commands.append(Tokens(task.router, task.key, index, outcome.position, outcome.token, finish))
                    if finish is not None and outcome.sequence.indices == (index,):
                        self._part(task, outcome.sequence, ())
                case Started():
                    stage = Stage.DECODE_JOINED if task.peer else Stage.PREFILL_STARTED
                    cached = 0 if task.peer else outcome.sequence.num_cached_tokens
                    commands.append(Progress(task.router, task.key, stage, now_s - result.elapsed_s, cached))
                case Split(sequence, children):
                    self._part(task, sequence, children)
                    self._drop_sequences(task)
                case Broken(_, reason):
                    commands.append(Failed(task.router, task.key, Failure.INTERNAL, reason))
                    self._forget(task)
                case Computed():
                    pass
        return commands + self._grant_waiting(now_s)

    def _react(self, event: Event, now_s: float) -> list[Command]:  # noqa: C901, PLR0912 - one match
        match event:
            case Placed():
                return self._place(event)
            case FromPeer(peer, key, news):
                inbound = self._inbound.get(key)
                if inbound is None:
                    return []  # late news of a hand-off that is over
                if inbound.peer != peer:
                    raise ProtocolError(f"{peer} speaks for a hand-off of {inbound.peer}", Refusal.INCARNATION)
                return self._landed(inbound, news, now_s) + self._advance(inbound, news, now_s)
            case Cancelled():
                return self._cancel(event, now_s)
            case RouterLost(router):
                self._taken.forget(router)
                orphans = (task.key for task in self._tasks.values() if task.router == router)
                return self._give_up(orphans, "router lost", now_s)
            case Ticked(silent_s):
                late = (task.key for task in self._tasks.values() if task.deadline_s < now_s)
                ended = self._give_up(late, "deadline", now_s) + self._end_leases(silent_s, now_s)
                self._auditor.look(self.claims(), now_s, idle=self.idle)
                return ended + self._leave_if_too_much_is_quarantined()
            case DrainAsked():
                self._draining.ask()
                return []
            case DigestsChecked(key, mismatch):
                inbound = self._inbound.get(key)
                return self._advance(inbound, receiver.DigestsChecked(mismatch), now_s) if inbound else []
            case PeerAttached(peer):
                self._leases.begin(peer, now_s)
                return self._tell_all(peer, receiver.SenderAttached(), now_s)
            case PeerAlive(peer):
                is_back = self._leases.renew(peer, now_s)
                return self._tell_all(peer, receiver.SenderAttached(), now_s) if is_back else []
            case PeerLost(peer, reason):
                self._leases.end(peer)
                return self._tell_all(peer, receiver.SenderLost(reason), now_s)
            case PeerGone(peer):
                self._leases.end(peer)
                lost = [t for t in self._ungranted if t.peer == peer]
                commands: list[Command] = [
                    Failed(t.router, t.key, Failure.PEER_LOST, "the sender's process ended") for t in lost
                ]
                for task in lost:
                    self._forget(task)
                return [*commands, *self._tell_all(peer, receiver.SenderGone(), now_s), Forget(peer)]

    def _place(self, placed: Placed) -> list[Command]:
        job = placed.job
        key = HandoffKey(job.request_id, job.attempt)
        reason = refusal(self._scheduler, job, self._vocab_size)
        if reason is not None:
            return [Failed(placed.router, key, Failure.INVALID, reason)]
        is_full = len(self._tasks) >= self._rules.max_tasks
        if self._draining.is_on or is_full or key in self._tasks or key in self._inbound:
            why = "draining" if self._draining.is_on else f"{len(self._tasks)} of {self._rules.max_tasks} requests"
            return [Failed(placed.router, key, Failure.OVERLOADED, why)]
        order = self._taken.add(placed.router, job, computes=placed.peer is None)
        task = Task(placed.router, job, placed.deadline_s, order, placed.peer)
        self._tasks[key] = task
        if placed.peer is None:
            sequence = Sequence(job=job, indices=job.indices, tokens=list(job.token_ids), order=order)
            task.sequences.append(sequence)
            self._scheduler.add(sequence)
        else:
            self._ungranted.append(task)
            self._ungranted.sort(key=lambda t: (-t.job.priority, t.order))
        return []

    def _grant_waiting(self, now_s: float) -> list[Command]:
        """Reserve pages for hand-offs in their order, while there is room beside what runs."""
        commands: list[Command] = []
        while self._ungranted and self._scheduler.num_waiting == 0:
            task = self._ungranted[0]
            coming = sum([i.num_sequences for i in self._inbound.values() if not i.quarantined])
            inbound = self._granting.reserve(task, coming)
            if inbound is None:
                break
            self._ungranted.pop(0)
            self._inbound[task.key] = inbound
            commands.append(Progress(task.router, task.key, Stage.GRANTED, now_s, pages_reused=len(inbound.reused)))
            if self._leases.holds(inbound.peer):
                commands += self._advance(inbound, receiver.SenderAttached(), now_s)
        return commands

    def _end_leases(self, silent_s: float, now_s: float) -> list[Command]:
        """Give up what was granted to peers that say nothing, unless it was this process that heard nothing."""
        self._leases.excuse(max(0.0, silent_s - 2 * BEAT_S), now_s)
        commands: list[Command] = []
        for peer, reason in self._leases.take_lapsed(now_s):
            commands += self._tell_all(peer, receiver.LeaseLapsed(reason), now_s)
        return commands

    def _leave_if_too_much_is_quarantined(self) -> list[Command]:
        """Drain once too few pages are left to be of use, and give back what waits for pages."""
        pool = self._scheduler.cache.pool
        if not self._draining.look(pool.num_quarantined, pool.num_pages):
            return []
        refused = list(self._ungranted)
        for task in refused:
            self._forget(task)
        return [Failed(task.router, task.key, Failure.OVERLOADED, self._draining.reason) for task in refused]

    def _tell_all(self, peer: Peer, event: receiver.Event, now_s: float) -> list[Command]:
        concerned = [i for i in self._inbound.values() if i.peer == peer]
        return [command for inbound in concerned for command in self._advance(inbound, event, now_s)]

    def _give_up(self, keys: Iterable[HandoffKey], reason: str, now_s: float) -> list[Command]:
        commands: list[Command] = []
        for key in list(keys):
            self._forget(self._tasks[key])
            if key in self._inbound:
                commands += self._advance(self._inbound[key], receiver.GaveUp(reason), now_s)
        return commands

    def _cancel(self, cancelled: Cancelled, now_s: float) -> list[Command]:
        doomed = []
        for task in list(self._tasks.values()):
            key = task.key
            if key.request_id != cancelled.request_id or key.attempt > cancelled.attempt:
                continue
            task.dropped.update(cancelled.indices or task.job.indices)
            if task.dropped.issuperset(task.job.indices):
                doomed.append(key)
            else:
                self._drop_sequences(task)
        return self._give_up(doomed, "cancelled", now_s)

    def _drop_sequences(self, task: Task) -> None:
        """Stop continuations that are no longer wanted, once each runs by itself."""
        for sequence in [s for s in task.sequences if task.dropped.issuperset(s.indices)]:
            self._scheduler.remove(sequence)
            self._part(task, sequence, ())

    def _forget(self, task: Task) -> None:
        """Drop a task and what it runs. A hand-off of it goes on until its pages are safe."""
        self._tasks.pop(task.key, None)
        if task in self._ungranted:
            self._ungranted.remove(task)
        for sequence in task.sequences:
            self._scheduler.remove(sequence)

    def _advance(self, inbound: Inbound, event: receiver.Event, now_s: float) -> list[Command]:
        task = self._tasks.get(inbound.key)
        if isinstance(event, receiver.Committed) and task is not None:
            check_capsule(task.job, event.commit.capsule, self._vocab_size)
        commands = inbound.receiver.handle(event)
        return [c for command in commands for c in self._perform(inbound, command, now_s)]

    def _landed(self, inbound: Inbound, news: receiver.Event, now_s: float) -> list[Command]:
        """Say that a hand-off has landed, if this is its commit and it is still wanted."""
        task = self._tasks.get(inbound.key)
        if task is None or not isinstance(news, receiver.Committed):
            return []
        num_bytes, seconds = news.commit.handoff_bytes, news.commit.handoff_s
        return [Progress(task.router, task.key, Stage.LANDED, now_s, handoff_bytes=num_bytes, handoff_s=seconds)]

    def _perform(self, inbound: Inbound, command: receiver.Command, now_s: float) -> Iterator[Command]:
        pool, key = self._scheduler.cache.pool, inbound.key
        pages = inbound.receiver.grant.pages
        task = self._tasks.get(key)
        match command:
            case receiver.SendGrant() | receiver.SendTaken() | receiver.SendWithdrawn():
                yield ToPeer(inbound.peer, key, command)
            case receiver.CheckDigests(digests):
                yield CheckDigests(key, pages, digests)
            case receiver.Admit(capsule) if task is not None:
                del self._inbound[key]
                pool.adopt(pages)
                self._admit(task, inbound, capsule)
                yield Progress(task.router, key, Stage.COMMITTED, now_s)
            case receiver.QuarantinePages():
                inbound.quarantined = True
                pool.quarantine(pages)
            case receiver.FreePages():
                del self._inbound[key]
                (pool.unquarantine if inbound.quarantined else pool.ungrant)(pages)
                pool.release(inbound.reused)
                if task is not None:
                    self._forget(task)  # the sender has told the router why
            case receiver.Failed(failure, reason):
                self._num_digest_mismatches += failure is Failure.DIGEST_MISMATCH
                if task is not None:
                    self._forget(task)
                    yield Failed(task.router, key, failure, reason)
            case receiver.Admit():
                raise InvariantError("a hand-off outlived its task without being given up")

    def _admit(self, task: Task, inbound: Inbound, capsule: Capsule) -> None:
        """Let the committed sequences join the batch."""
        task.sequences += committed(self._scheduler, task, inbound, capsule)
        for sequence in task.sequences:
            self._scheduler.join(sequence)
        self._drop_sequences(task)

    def _part(self, task: Task, sequence: Sequence, children: tuple[Sequence, ...]) -> None:
        """Replace what runs for a task; drop the task after its last sequence."""
        task.sequences.remove(sequence)
        task.sequences += children
        if not task.sequences:
            del self._tasks[task.key]
