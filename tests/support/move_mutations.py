"""Bugs on purpose in how a running continuation moves from one worker to another."""

from collections import deque
from dataclasses import replace
from typing import Any

from breaking import Original, breaks

from pdserve.decode_worker import receiver
from pdserve.decode_worker.incoming import Incoming
from pdserve.engine.scheduler import Scheduler
from pdserve.engine.sequence import Sequence
from pdserve.engine.step import StepPlan
from pdserve.kvtransfer.doors import NotAdmitted, Outcome, Result, Unsent
from pdserve.kvtransfer.session import Quiesced
from pdserve.router.placement.placements import Placements
from pdserve.router.requests.commands import CancelAttempt
from pdserve.router.requests.request import Placement, Request
from pdserve.router.requests.request import Sequence as RouterSequence
from pdserve.worker.messages import Failed
from pdserve.worker.moves import Moves

# ---- the worker that a continuation leaves


@breaks(Moves, "conclude")
def resume_a_continuation_whose_commit_has_left(original: Original, self: Moves, outcome: Result) -> list[Failed]:
    """Go on with it when the stream to its target is lost, as if its commit could not have arrived."""
    return original(self, replace(outcome, may_resume=True) if isinstance(outcome, Unsent) else outcome)


@breaks(Moves, "conclude")
def let_a_move_fail_in_silence(original: Original, self: Moves, outcome: Outcome) -> list[Failed]:
    """Go on with a continuation, and leave it to its target to report that it does not come."""
    return [failed for failed in original(self, outcome) if failed.key != outcome.key]


@breaks(Scheduler, "hold")
def announce_a_page_that_a_step_still_writes(original: Original, self: Scheduler, sequence: Sequence) -> bool:
    """Cut a continuation while a step has it."""
    original(self, sequence)
    return True


@breaks(Moves, "_finish")
def leave_a_token_out_of_a_tail(original: Original, self: Moves, move: Any, now_s: float) -> list[Result]:  # noqa: ANN401 - private
    """Hand a continuation over without the first token that its target does not know."""
    move.order = replace(move.order, num_known=move.order.num_known + 1)
    return original(self, move, now_s)


@breaks(Moves, "_finish")
def give_the_pages_up_when_the_commit_leaves(original: Original, self: Moves, move: Any, now_s: float) -> list[Result]:  # noqa: ANN401 - private
    """Let go of a continuation at its cut, and not when its target has it."""
    results: list[Result] = original(self, move, now_s)
    self._scheduler.release(move.sequence)
    return results


# ---- the worker that it goes to


@breaks(Incoming, "_offer_moves")
def let_a_continuation_come_during_a_long_step(original: Original, self: Incoming, now_s: float) -> list[Result]:
    """Offer it pages at once: it stops where it runs, and waits here for the step's end."""
    steps, self._scheduler.steps = self._scheduler.steps, deque()
    results: list[Result] = original(self, now_s)
    self._scheduler.steps = steps
    return results


@breaks(Scheduler, "plan")
def begin_a_long_step_before_a_continuation_comes(
    original: Original, self: Scheduler, *, is_brief: bool = False
) -> StepPlan | None:
    return original(self)


@breaks(receiver.Receiver, "handle")
def end_in_silence_when_the_source_gives_up(
    original: Original, self: receiver.Receiver, event: receiver.Event
) -> tuple[receiver.Command, ...]:
    """Leave a router to wait for a continuation that will not come."""
    commands = original(self, event)
    is_silent = isinstance(event, Quiesced)
    return tuple(command for command in commands if not (is_silent and isinstance(command, NotAdmitted)))


# ---- the router


@breaks(Placements, "_leave")
def take_tokens_of_both_attempts(
    original: Original, self: Placements, request: Request, placement: Placement, index: int, *, stop_workers: bool
) -> None:
    """Let the attempt that a continuation has moved from go on beside the one that has it."""
    sequence = request.sequences[index]
    if sequence.ended or sequence.placement is None:
        original(self, request, placement, index, stop_workers=stop_workers)


@breaks(Placements, "take_charge")
def cancel_a_shadow_with_its_original(
    original: Original, self: Placements, request: Request, sequence: RouterSequence
) -> None:
    original(self, request, sequence)
    placement = sequence.placement
    if placement is not None and placement.decode is not None:
        link = placement.decode.link
        self.emit(CancelAttempt(link, request.request_id, placement.attempt, (sequence.index,)))


@breaks(Placements, "take_charge")
def close_a_shadow_when_its_source_is_lost_and_place_nothing(
    original: Original, self: Placements, request: Request, sequence: RouterSequence
) -> None:
    """Believe that nobody waits for a continuation whose worker is lost while it moves."""
    shadow = sequence.shadow
    original(self, request, sequence)
    if shadow is not None and not shadow.committed:
        shadow.running.clear()
