"""Bugs on purpose in how a running continuation moves from one worker to another."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from breaking import Original, mutation, wrap

from pdserve.engine.scheduler import Scheduler
from pdserve.engine.sequence import Sequence
from pdserve.kvtransfer import receiver
from pdserve.kvtransfer.doors import Outcome, Result, Unsent
from pdserve.kvtransfer.session import Quiesced
from pdserve.router.commands import CancelAttempt
from pdserve.router.placements import Placements
from pdserve.router.request import Placement, Request
from pdserve.router.request import Sequence as RouterSequence
from pdserve.worker.messages import Failed
from pdserve.worker.moves import Moves

# ---- the worker that a continuation leaves


@mutation
def resume_a_continuation_whose_commit_has_left() -> Iterator[object]:
    """Go on with it when the stream to its target is lost, as if its commit could not have arrived."""

    def conclude(original: Original, self: Moves, outcome: Result) -> list[Failed]:
        return original(self, replace(outcome, may_resume=True) if isinstance(outcome, Unsent) else outcome)

    with wrap(Moves, "conclude", conclude) as patched:
        yield patched


@mutation
def let_a_move_fail_in_silence() -> Iterator[object]:
    """Go on with a continuation, and leave it to its target to report that it does not come."""

    def conclude(original: Original, self: Moves, outcome: Outcome) -> list[Failed]:
        return [failed for failed in original(self, outcome) if failed.key != outcome.key]

    with wrap(Moves, "conclude", conclude) as patched:
        yield patched


@mutation
def announce_a_page_that_a_step_still_writes() -> Iterator[object]:
    """Cut a continuation while a step has it."""

    def hold(original: Original, self: Scheduler, sequence: Sequence) -> bool:
        original(self, sequence)
        return True

    with wrap(Scheduler, "hold", hold) as patched:
        yield patched


@mutation
def leave_a_token_out_of_a_tail() -> Iterator[object]:
    """Hand a continuation over without the first token that its target does not know."""

    def finish(original: Original, self: Moves, move: Any, now_s: float) -> list[Result]:  # noqa: ANN401 - private
        move.num_tokens += 1
        return original(self, move, now_s)

    with wrap(Moves, "_finish", finish) as patched:
        yield patched


@mutation
def give_the_pages_up_when_the_commit_leaves() -> Iterator[object]:
    """Let go of a continuation at its cut, and not when its target has it."""

    def finish(original: Original, self: Moves, move: Any, now_s: float) -> list[Result]:  # noqa: ANN401 - private
        results: list[Result] = original(self, move, now_s)
        self._scheduler.release(move.sequence)
        return results

    with wrap(Moves, "_finish", finish) as patched:
        yield patched


# ---- the worker that it goes to


@mutation
def end_in_silence_when_the_source_gives_up() -> Iterator[object]:
    """Leave a router to wait for a continuation that will not come."""

    def failures(original: Original, event: receiver.Event) -> tuple[receiver.Failed, ...]:
        return () if isinstance(event, Quiesced) else original(event)

    with wrap(receiver, "_failures", failures) as patched:
        yield patched


# ---- the router


@mutation
def take_tokens_of_both_attempts() -> Iterator[object]:
    """Let the attempt that a continuation has moved from go on beside the one that has it."""

    def leave(
        original: Original, self: Placements, request: Request, placement: Placement, index: int, *, stop_workers: bool
    ) -> None:
        sequence = request.sequences[index]
        if sequence.ended or sequence.placement is None:
            original(self, request, placement, index, stop_workers=stop_workers)

    with wrap(Placements, "_leave", leave) as patched:
        yield patched


@mutation
def cancel_a_shadow_with_its_original() -> Iterator[object]:
    def take_charge(original: Original, self: Placements, request: Request, sequence: RouterSequence) -> None:
        original(self, request, sequence)
        placement = sequence.placement
        if placement is not None and placement.decode is not None:
            link = placement.decode.link
            self.emit(CancelAttempt(link, request.request_id, placement.attempt, (sequence.index,)))

    with wrap(Placements, "take_charge", take_charge) as patched:
        yield patched


@mutation
def close_a_shadow_when_its_source_is_lost_and_place_nothing() -> Iterator[object]:
    """Believe that nobody waits for a continuation whose worker is lost while it moves."""

    def take_charge(original: Original, self: Placements, request: Request, sequence: RouterSequence) -> None:
        shadow = sequence.shadow
        original(self, request, sequence)
        if shadow is not None and not shadow.committed:
            shadow.running.clear()

    with wrap(Placements, "take_charge", take_charge) as patched:
        yield patched
