"""Running continuations on their way to other workers. Decides; does no I/O.

Invariant: a continuation is decoded here only while its commit has not left, or after the receiver has withdrawn. A
page is announced once no step will write to it any more. The failure of a move is reported to the router that asked for
it, since the target may never learn of it and would keep its pages set aside. It is not reported where the continuation
has ended here.

Full pages are announced while the continuation decodes on (pre-copy, as in Llumnix, Sun et al. 2024). It is cut when
all of them have landed: it is held, and its last page follows with the commit.
"""

from dataclasses import dataclass

from pdserve.base.errors import PeerFault, ProtocolError
from pdserve.base.ids import AttemptKey
from pdserve.engine.scheduler import Scheduler
from pdserve.engine.sequence import Sequence
from pdserve.engine.step import Phase
from pdserve.kvtransfer import doors
from pdserve.kvtransfer.doors import Result
from pdserve.kvtransfer.session import Capsule, Tail
from pdserve.prefill_worker.outgoing import Outgoing
from pdserve.prefill_worker.sender import Sender, State
from pdserve.protocol.paging import PageOrder
from pdserve.protocol.reports import Failure
from pdserve.worker.messages import Failed, MoveAsked, Reported, RouterRef
from pdserve.worker.tasks import Task, Tasks

_PLANNED_AHEAD = 2  # steps that may add to a continuation before its move is looked at again


@dataclass(slots=True, eq=False)
class _Move:
    key: AttemptKey  # of the attempt that goes on with it
    task: Task
    sequence: Sequence
    order: PageOrder
    is_cut: bool = False  # nothing more of it is planned
    is_finished: bool = False  # all of its pages are announced, and `outgoing` has its capsule


class Moves:
    """All continuations that are to leave. Each has one hand-off at a time."""

    def __init__(self, scheduler: Scheduler, outgoing: Outgoing, tasks: Tasks) -> None:
        self._scheduler = scheduler
        self._outgoing = outgoing
        self._tasks = tasks
        self._moves: dict[AttemptKey, _Move] = {}

    def moves(self, key: AttemptKey) -> bool:
        return key in self._moves

    def ask(self, asked: MoveAsked, now_s: float) -> list[Reported]:
        """Begin to hand a continuation over. If there is none to move, the receiver gets Quiesced at once."""
        key = AttemptKey(asked.key.request_id, asked.new_attempt)
        if self._outgoing.is_open(key) or self._tasks.get(key) is not None:
            raise ProtocolError(f"new_attempt: {asked.new_attempt} is known here", PeerFault.ORDER)
        if self._outgoing.is_closed(asked.target, key):
            return [_failed(asked.router, key, "its grant was given back before it was asked for")]
        results: list[Reported] = [*self._outgoing.open(key, asked.target, asked.target_address, now_s)]
        task = self._tasks.get(asked.key)
        sequence = None if task is None else task.decoding(asked.index)
        num_tokens, why = asked.num_tokens, ""
        if task is None or sequence is None:
            return results + self._refuse(asked.router, key, "nothing runs here that could move", now_s)
        present = [move for move in self._moves.values() if move.sequence is sequence]
        halves = [self._outgoing.half(move.key) for move in present]
        if not len(task.job.token_ids) <= num_tokens <= len(sequence.tokens):
            why = f"{num_tokens} tokens are not what runs here"
        elif any(half is not None and half.state is State.LANDED for half in halves):
            why = "it has left already"
        if why:
            return results + self._refuse(asked.router, key, why, now_s)
        for move in present:
            results += self._stop(move, "it moves elsewhere", now_s)
        self._moves[key] = _Move(key, task, sequence, PageOrder(self._scheduler.cache.paging, num_tokens))
        return results

    def go_on(self, now_s: float) -> list[Reported]:
        """Announce pages that have become final, and cut continuations that are due (`_is_due`)."""
        return [result for move in list(self._moves.values()) for result in self._go_on(move, now_s)]

    def conclude(self, outcome: doors.Leaving) -> list[Failed]:
        """Let a continuation leave, or go on here, depending on the outcome of its hand-off."""
        if isinstance(outcome, doors.Granted):
            return []  # it goes on in its turn
        move = self._moves.pop(outcome.key)
        task, sequence = move.task, move.sequence
        if not self._tasks.runs(task, sequence):
            return []
        if isinstance(outcome, doors.Sent):
            self._scheduler.remove(sequence)
            self._tasks.replace(task, sequence, ())
            return []
        if outcome.may_resume:
            self._scheduler.resume(sequence)
        else:
            self._tasks.end(task)  # routers place all that an attempt runs again
        key = move.key if outcome.may_resume else task.key
        return [Failed(task.router, key, outcome.failure, outcome.reason)]

    def _go_on(self, move: _Move, now_s: float) -> list[Reported]:
        sequence = move.sequence
        if not self._tasks.runs(move.task, sequence):
            return [*self._end(move, "its continuation has ended", now_s)]
        if not sequence.pages:
            return self._stop(move, "its continuation was preempted", now_s)
        if move.is_finished:
            return []
        size = self._scheduler.cache.page_size
        full = sequence.pages.ordered(move.order, sequence.computed // size * size)
        results: list[Reported] = [*self._outgoing.announce(move.key, full, now_s)]
        sender = self._outgoing.half(move.key)
        if sender is not None and (move.is_cut or self._is_due(move, sender)):
            move.is_cut = True
            if self._scheduler.hold(sequence):
                results += self._finish(move, now_s)
        return results

    def _is_due(self, move: _Move, sender: Sender) -> bool:
        """Whether a continuation is to be cut: little is left to copy, or there is no room for more tokens."""
        sequence, num_granted = move.sequence, sender.num_granted
        if not num_granted or sequence.phase is not Phase.DECODE or len(sequence.tokens) <= move.order.num_known:
            return False
        room = move.order.num_tokens(num_granted)
        is_full = self._scheduler.num_written(sequence) + self._scheduler.limits.most_rows * _PLANNED_AHEAD > room
        return is_full or sender.is_abreast

    def _finish(self, move: _Move, now_s: float) -> list[Result]:
        """Announce all pages of a continuation that is in no step, and the tokens that its target does not know."""
        key, sequence = move.key, move.sequence
        move.is_finished = True
        pages = sequence.pages.ordered(move.order, sequence.computed)
        results = self._outgoing.announce(key, pages, now_s)
        if self._outgoing.is_open(key):
            tail = Tail(sequence.indices[0], sequence.tail(move.order.num_known))
            results += self._outgoing.finish(key, Capsule(sequence.computed, (tail,)), now_s)
        return results

    def _stop(self, move: _Move, reason: str, now_s: float) -> list[Reported]:
        """End a hand-off whose continuation stays: its commit has not left."""
        return [*self._end(move, reason, now_s), _failed(move.task.router, move.key, reason)]

    def _end(self, move: _Move, reason: str, now_s: float) -> list[Result]:
        del self._moves[move.key]
        self._scheduler.resume(move.sequence)
        return self._outgoing.give_up(move.key, reason, now_s)

    def _refuse(self, router: RouterRef, key: AttemptKey, reason: str, now_s: float) -> list[Reported]:
        return [*self._outgoing.give_up(key, reason, now_s), _failed(router, key, reason)]


def _failed(router: RouterRef, key: AttemptKey, reason: str) -> Failed:
    return Failed(router, key, Failure.SENDER_GAVE_UP, reason)
