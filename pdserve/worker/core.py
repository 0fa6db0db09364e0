"""What a worker does next. Decides; does no I/O.

Invariants: a sequence runs only on pages admitted for it, or computed here; each task reports its tokens or one
failure, or was cancelled. A task ends with its request; the door that its hand-off goes by gives the pages back.
"""

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq

from pdserve.base.errors import InvariantError
from pdserve.base.ids import AttemptKey
from pdserve.decode_worker.granting import Expected, Granting
from pdserve.decode_worker.incoming import Incoming
from pdserve.engine.kvcache import Prefix, Room
from pdserve.engine.scheduler import Scheduler
from pdserve.engine.sequence import Broken, Computed, Finish, Pooled, Sampled, Scored, Sequence, Split, Started
from pdserve.engine.step import Phase, StepPlan, StepResult
from pdserve.kvtransfer import doors
from pdserve.kvtransfer.session import Capsule, Tail
from pdserve.prefill_worker.outgoing import Outgoing
from pdserve.prefill_worker.starting import Starting
from pdserve.protocol.reports import Failure, Stage
from pdserve.worker import messages
from pdserve.worker.admission import Draining, Roles, Rules, longest, refusal
from pdserve.worker.fetches import Fetches
from pdserve.worker.load import Auditor, Meter
from pdserve.worker.messages import Command, Event, Failed, Reported
from pdserve.worker.moves import Moves
from pdserve.worker.tasks import Task, Tasks, arrived, final_pages, tail_tokens


class WorkerCore:
    """One engine, and the two doors through which KV leaves it and arrives."""

    def __init__(
        self, scheduler: Scheduler, vocab_size: int, page_bytes: int, capability_key: bytes, rules: Rules
    ) -> None:
        pool = scheduler.cache.pool
        self._scheduler = scheduler
        self._vocab_size, self._adapters = vocab_size, rules.adapters
        self._max_tasks, self._rules = rules.max_tasks, rules
        self._room = Room(scheduler.cache, scheduler.most_pages(scheduler.limits.max_model_len))
        self._roles = Roles(rules.role, scheduler, self._room, rules.step_tokens)
        self._starting = Starting(scheduler, self._room)
        self._tasks = Tasks(scheduler, self._starting)
        self.outgoing = Outgoing(pool, rules.max_tasks, rules.num_parts)
        granting = Granting(scheduler, self._room, capability_key, rules.lease_s, checks_digests=rules.checks_digests)
        self.incoming = Incoming(scheduler, granting, rules.lease_s, vocab_size, page_bytes)
        self._moves = Moves(scheduler, self.outgoing, self._tasks)
        self._fetches = Fetches(scheduler, self._tasks, self._starting, self.outgoing, self.incoming)
        self._draining = Draining(rules.max_quarantined_share)
        self._auditor = Auditor(pool)
        self._num_placed = 0  # numbers tasks in the order in which they arrived
        self._meter = Meter(scheduler, self._starting, self.outgoing, self.incoming)

    @property
    def idle(self) -> bool:
        return not self._tasks and not self.outgoing.num_open and not self.incoming.num_open

    @property
    def drained(self) -> bool:
        """Whether nothing is left to wait for. Peers that may be frozen give no page back before this process ends."""
        return self._draining.is_on and not self._tasks and self.outgoing.has_only_stuck

    @property
    def may_plan_ahead(self) -> bool:
        """Whether the next step may be planned while one runs: all sequences decode, or prompts will fill it.

        Another step of prompts is long, so it is planned late: it takes all that has come by then. Only pipeline
        stages plan prompts ahead that wait. A continuation that moves here would wait for both steps.
        """
        scheduler = self._scheduler
        prompts = (*scheduler.running, *(scheduler.waiting if self._rules.has_stages else ()))
        left = sum([s.num_missing for s in prompts if s.phase is Phase.PROMPT])
        beyond = left - sum(step.num_prompt_tokens for step in scheduler.steps)
        is_full = self._rules.fills_steps_ahead and beyond >= scheduler.step_tokens
        return (is_full or not (left or scheduler.waiting)) and not self.incoming.awaits_move()

    @property
    def due_s(self) -> float:
        """When this is to handle `Due`, if nothing else comes before."""
        return self._fetches.due_s

    def has_task(self, key: AttemptKey) -> bool:
        """Whether it works on an attempt, or waits for its hand-off."""
        return self._tasks.get(key) is not None

    def claims(self) -> Iterator[doors.Claim]:
        yield doors.Claim(held=self._scheduler.leaving)
        for task in self._tasks:
            yield from (doors.Claim(held=sequence.pages.held) for sequence in task.sequences)
        yield from self._fetches.claims()
        yield from self.outgoing.claims()
        yield from self.incoming.claims()

    def load(self) -> messages.Load:
        return self._meter.read(self._tasks, self._draining, self._roles, self._auditor.num_leaked)

    def handle(self, event: Event, now_s: float) -> list[Command]:
        """Take in one event; return what to do now, in order. ProtocolError is the peer's and changes nothing."""
        commands = self._react(event, now_s)
        return commands + self._use_room(now_s)

    def plan(self, now_s: float) -> StepPlan | None:
        """Return the next step, or None if there is nothing to compute. It is short while a continuation may arrive."""
        plan = self._scheduler.plan(is_brief=self.incoming.wants_brief_step(now_s))
        if plan is not None:
            self.incoming.note_step()
        return plan

    def commit(self, plan: StepPlan, result: StepResult, now_s: float) -> list[Command]:  # noqa: C901 - one match
        commands: list[Command] = []
        handed_off: dict[AttemptKey, Task] = {}
        for outcome in self._scheduler.commit(plan, result):
            task = self._tasks.get(outcome.sequence.job.key)
            if task is None:
                continue  # an outcome before this one has ended it
            match outcome:
                case Sampled(_, index, position, tokens, finish, verified):  # the most frequent by far
                    brought = position, tokens, finish, b"", verified
                    commands.append(messages.Tokens(task.router, task.key, index, *brought))
                    if task.target is not None:
                        handed_off[task.key] = task
                        task.tails += (Tail(index, tokens),) if finish is None else ()
                    elif finish is not None and outcome.sequence.indices == (index,):
                        self._tasks.replace(task, outcome.sequence, ())
                case Started(sequence):
                    commands.append(_started(task, sequence, now_s - result.elapsed_s))
                case Computed(sequence):
                    commands += self._computed(task, sequence, now_s)
                case Pooled(sequence, vector):
                    commands.append(messages.Tokens(task.router, task.key, 0, 0, (), Finish.STOP, vector))
                    self._tasks.end(task)
                case Scored(_, position, logprobs):
                    commands.append(messages.PromptScored(task.router, task.key, position, logprobs))
                case Split(sequence, children):
                    self._tasks.replace(task, sequence, children)
                    self._tasks.drop_sequences(task)
                case Broken(_, reason, is_stuck):
                    failure = Failure.INVALID if is_stuck else Failure.INTERNAL
                    commands += self._refuse([task], reason, now_s, failure)
        for task in handed_off.values():
            commands += self._hand_off(task, now_s)
        return commands + self._use_room(now_s)

    def _react(self, event: Event, now_s: float) -> list[Command]:  # noqa: C901 - one match
        match event:
            case messages.Placed():
                return self._place(event, now_s)
            case messages.Cancelled():
                return self._give_up(self._tasks.cancel(event), "cancelled", now_s)
            case messages.RouterLost(router):
                self._meter.taken.forget(router)
                return self._give_up([task for task in self._tasks if task.router == router], "router lost", now_s)
            case messages.RoleGiven():
                self._roles.give(event)
                return []
            case messages.MoveAsked():
                return self._take(self._moves.ask(event, now_s), now_s)
            case messages.ShareAsked():
                return self._take(self._fetches.share(event, now_s), now_s)
            case messages.Due():
                return []  # what is due goes on after every event: `_use_room`
            case messages.DrainAsked() | messages.DrainCancelled():
                self._draining.take(event)
                return []
            case messages.Ticked(silent_s):
                return self._tick(silent_s, now_s)
            case doors.ReceiverAttached() | doors.ReceiverMessage() | doors.ReceiverLost():
                return self._take(self.outgoing.handle(event, now_s), now_s)
            case (
                doors.SenderAttached()
                | doors.SenderAlive()
                | doors.SenderMessage()
                | doors.SenderLost()
                | doors.DigestsChecked()
            ):
                return self._take(self.incoming.handle(event, now_s), now_s)
            case doors.PeerGone(peer):
                results = self.outgoing.handle(event, now_s) + self.incoming.handle(event, now_s)
                return [*self._take(results, now_s), doors.Forget(peer)]

    def _place(self, placed: messages.Placed, now_s: float) -> list[Command]:
        job, source, target = placed.job, placed.source, placed.target
        key = AttemptKey(job.request_id, job.attempt)
        if (reason := refusal(self._scheduler, job, self._vocab_size, self._adapters)) is not None:
            return [Failed(placed.router, key, Failure.INVALID, reason)]
        is_open = self.outgoing.is_open(key) if source is None else self.incoming.is_open(key)
        if self._draining.is_on or len(self._tasks) >= self._max_tasks or is_open or self.has_task(key):
            why = "draining" if self._draining.is_on else f"{len(self._tasks)} of {self._max_tasks} requests"
            return [Failed(placed.router, key, Failure.OVERLOADED, why)]
        if why := self._roles.refusal(placed, self.incoming.pages_wanted):
            return [Failed(placed.router, key, Failure.OVERLOADED, why)]
        if target is not None and self.outgoing.is_closed(target, key):
            return [Failed(placed.router, key, Failure.PEER_LOST, "its grant was given back before it was placed")]
        self._num_placed += 1
        task = Task(placed.router, job, placed.deadline_s, self._num_placed, source, target)
        if source is not None:
            prefix = task.prefix = Prefix(job.token_ids, job.scope)
            num_tokens = min(len(job.token_ids) + placed.extra_tokens, longest(self._scheduler, job))
            expected = Expected(key, source, job, task.order, prefix, num_tokens, is_move=placed.extra_tokens > 0)
            reserved: list[doors.Result] = []
            if not placed.extra_tokens:
                self.incoming.expect(expected)
            elif not (reserved := self.incoming.expect_now(expected)):  # a move never waits for room
                return [Failed(placed.router, key, Failure.OVERLOADED, "no room for a continuation that moves")]
            self._add(task)
            return self._take(reserved, now_s)
        self._add(task)
        sequence = Sequence(job, job.indices, list(job.token_ids), task.order, stop_after_prompt=target is not None)
        sequence.prompt_logprobs = job.params.prompt_logprobs
        task.sequences.append(sequence)
        results = self._fetches.start(task, sequence, placed.fetch, now_s)
        if target is not None:
            results += self.outgoing.open(key, target, placed.target_address, now_s)
        return [messages.Progress(placed.router, key, Stage.PREFILL_QUEUED, now_s), *self._take(results, now_s)]

    def _add(self, task: Task) -> None:
        self._tasks.add(task)
        self._meter.taken.add(task.router, task.job, computes=task.source is None)

    def _use_room(self, now_s: float) -> list[Command]:
        """Continue moves and fetches, take a given role, start prompts and grant pages, as far as there is room."""
        moved = self._take(self._moves.go_on(now_s) + self._fetches.go_on(now_s), now_s)
        taken = self._roles.settle()
        if self._starting.num_waiting:
            self._starting.start(self._roles.num_kept(self.incoming.pages_wanted))
        return [*moved, *taken, *self._take(self.incoming.grant_waiting(now_s), now_s)]

    def _tick(self, silent_s: float, now_s: float) -> list[Command]:
        commands = self._take(self.outgoing.tick(silent_s, now_s) + self.incoming.tick(silent_s, now_s), now_s)
        commands += self._give_up([task for task in self._tasks if task.deadline_s < now_s], "deadline", now_s)
        self._auditor.look(self.claims(), now_s, idle=self.idle)
        return commands + self._give_back_what_waits(now_s)

    def _give_back_what_waits(self, now_s: float) -> list[Command]:
        """Drain if too few pages are left to be of use. Refuse requests that would wait for pages in vain."""
        scheduler, pool = self._scheduler, self._scheduler.cache.pool
        num_lost = pool.num_quarantined + self.outgoing.num_stuck_pages
        if self._draining.look(num_lost, pool.num_pages):
            waiting = [task for task in self._tasks if task.is_unstarted or self.incoming.is_ungranted(task.key)]
            return self._refuse(waiting, self._draining.reason, now_s)
        is_leaving, is_stuck = self._draining.is_on and not scheduler.running, self.incoming.is_stuck
        stalled = scheduler.prompt_room.stalled  # is one of those that run
        tasks = () if scheduler.steps or (scheduler.running and stalled is None) else self._tasks
        ready = [t for t in tasks if t.sequences and all(s.is_ready for s in t.sequences)]  # others lack grammars
        waiting = [t for t in ready if is_leaving or any(s in scheduler.waiting or s is stalled for s in t.sequences)]
        waiting += [t for t in tasks if is_stuck and self.incoming.is_ungranted(t.key)]
        reason = self._draining.in_vain(num_lost, is_still=bool(waiting))
        return self._refuse(waiting, reason, now_s) if reason else []

    def _refuse(self, tasks: Seq[Task], why: str, now_s: float, as_: Failure = Failure.OVERLOADED) -> list[Command]:
        failed: list[Command] = [Failed(task.router, task.key, as_, why) for task in tasks]
        return failed + self._give_up(tasks, why, now_s)

    def _computed(self, task: Task, sequence: Sequence, now_s: float) -> list[Command]:
        """Send the pages of a prompt that have become final: full ones, and at the end the last one."""
        is_done = sequence.num_missing == 0
        commands: list[Command] = []
        if is_done and task.source is None and len(sequence.tokens) == len(task.job.token_ids):
            commands.append(messages.Progress(task.router, task.key, Stage.PREFILL_DONE, now_s))
        if task.target is not None:
            final = final_pages(self._scheduler, task, sequence)
            commands += self._take(self.outgoing.announce(task.key, final, now_s), now_s)
        return commands

    def _hand_off(self, task: Task, now_s: float) -> list[Command]:
        """Hand a prompt, whose first tokens are known, to its target if any continuation goes on."""
        if not task.tails:
            return self._give_up([task], "finished with its first token", now_s)
        (sequence,) = task.sequences
        task.sequences.clear()
        self._scheduler.remove(sequence)  # `outgoing` holds its pages
        return self._take(self.outgoing.finish(task.key, Capsule(len(sequence.tokens), task.tails), now_s), now_s)

    def _give_up(self, tasks: Iterable[Task], reason: str, now_s: float) -> list[Command]:
        """End tasks without a report to their routers."""
        commands: list[Command] = []
        for task in tasks:
            self._tasks.end(task)
            results = self.outgoing.give_up(task.key, reason, now_s) + self.incoming.give_up(task.key, reason)
            commands += self._take(results, now_s)
        return commands

    def _take(self, results: Iterable[Reported], now_s: float) -> list[Command]:
        """Return the commands and reports among results, each outcome replaced by what follows from it."""
        commands: list[Command] = []
        for result in results:
            if isinstance(result, doors.Outcome):
                commands += self._conclude(result, now_s)
            else:
                commands.append(result)
        return commands

    def _conclude(self, outcome: doors.Outcome, now_s: float) -> Seq[Command]:
        """Apply the outcome of a hand-off to its task. A key can name one hand-off that leaves and one that arrives."""
        key = outcome.key
        if isinstance(outcome, doors.Leaving):
            if self._fetches.shares(key):
                return self._take(self._fetches.conclude_share(outcome, now_s), now_s)
            return self._moves.conclude(outcome) if self._moves.moves(key) else self._conclude_leaving(outcome)
        if self._fetches.fetches(key):
            return self._take(self._fetches.conclude_fetch(outcome, now_s), now_s)
        return self._conclude_arriving(outcome, now_s)

    def _conclude_leaving(self, outcome: doors.Leaving) -> Seq[Command]:
        key, task = outcome.key, self._tasks.get(outcome.key)
        if task is None:
            return ()  # it has been given up
        match outcome:
            case doors.Granted():
                self._starting.granted(key)
                return ()
            case doors.Sent():
                self._tasks.end(task)
                return ()
            case doors.Unsent(_, failure, reason):
                self._tasks.end(task)
                return (Failed(task.router, key, failure, reason),)

    def _conclude_arriving(self, outcome: doors.Arriving, now_s: float) -> Seq[Command]:
        key, task = outcome.key, self._tasks.get(outcome.key)
        if task is None:  # it has been given up
            if isinstance(outcome, doors.Admitted):
                raise InvariantError("a hand-off outlived its task without being given up")
            return ()
        match outcome:
            case doors.Reserved():
                return (messages.Progress(task.router, key, Stage.GRANTED, now_s, pages_reused=outcome.num_reused),)
            case doors.Landed(_, num_bytes, seconds):
                return (messages.Progress(task.router, key, Stage.LANDED, now_s, 0, num_bytes, seconds),)
            case doors.Admitted():
                self._admit(task, outcome)
                committed = messages.Progress(task.router, key, Stage.COMMITTED, now_s)
                return (committed, *tail_tokens(task, outcome.capsule))
            case doors.NotAdmitted(_, failure, reason):
                self._tasks.end(task)
                return (Failed(task.router, key, failure, reason),)

    def _admit(self, task: Task, admitted: doors.Admitted) -> None:
        task.sequences += arrived(self._scheduler, task, admitted)
        for sequence in task.sequences:
            self._scheduler.join(sequence)
        self._tasks.drop_sequences(task)


def _started(task: Task, sequence: Sequence, at_s: float) -> messages.Progress:
    if task.source is not None:
        return messages.Progress(task.router, task.key, Stage.DECODE_JOINED, at_s)
    return messages.Progress(task.router, task.key, Stage.PREFILL_STARTED, at_s, sequence.num_cached_tokens)
