"""Steps that fail: finds the sequences at fault, or a broken device.

Invariant: a sequence is failed only if its chunk fails by itself while the device still computes another one. If that
fails too, no request is to blame: DeviceError.

A step that fails is computed again in halves. That changes no token: K and V are written to the same slots, and draws
depend on (seed, index) alone. Page copies run on their own, before the chunks, since a chunk may write into the page
that was copied from.

A step may have been planned while the one before it ran: its tokens that were not known then are put into it here.
A chunk whose sequence failed in that step is not computed.
"""

import logging
from collections.abc import Callable

from pdserve.base.errors import DeviceError, InvariantError
from pdserve.engine.step import Chunk, StepPlan, StepResult, Tokens, joined

logger = logging.getLogger(__name__)

Run = Callable[[StepPlan], StepResult]


_Parts = list[tuple[list[int], StepResult]]  # of a step: places in its plan, and what they were computed to be


class Isolating:
    """Runs steps in the engine's thread; blocks."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.drawn: tuple[tuple[Tokens, ...], ...] = ()  # in the step before, which may have been launched
        self.is_whole = False  # whether all of that step was computed at once

    def run(self, plan: StepPlan) -> StepResult:
        """Run a step; sequences that make it fail are named in the result. DeviceError if nothing can be computed."""
        if plan.copies:
            self._copy(plan)
        parts: _Parts = []
        wanted = self._known(plan.chunks, parts)
        self.is_whole = len(wanted) == len(plan.chunks)
        if wanted:
            self._try(wanted, parts)
        result = joined(parts, len(plan.chunks))
        self.drawn = result.tokens
        return result

    def _known(self, chunks: tuple[Chunk, ...], parts: _Parts) -> list[tuple[int, Chunk]]:
        """Return the chunks to compute, with their places, and with tokens of the step before where they need them."""
        wanted: list[tuple[int, Chunk]] = []
        for place, chunk in enumerate(chunks):
            if chunk.previous is None:
                wanted.append((place, chunk))
            elif sampled := self.drawn[chunk.previous]:
                wanted.append((place, chunk.after(sampled[0][0].token_id)))
            else:
                parts.append(_failed(place, "the step before failed"))
        return wanted

    def _copy(self, plan: StepPlan) -> None:
        try:
            self._run(StepPlan((), plan.copies))
        except (InvariantError, DeviceError):
            raise
        except Exception as error:
            raise DeviceError(f"copying pages failed: {_describe(error)}") from error

    def _try(self, wanted: list[tuple[int, Chunk]], parts: _Parts) -> None:
        """Compute chunks, each with its place in the plan; in halves if that fails."""
        try:
            parts.append(([place for place, _ in wanted], self._run(StepPlan(tuple([chunk for _, chunk in wanted])))))
            return
        except (InvariantError, DeviceError):
            raise
        except Exception as error:
            logger.exception("a step of %d sequences failed", len(wanted))
            self.is_whole = False
            if len(wanted) == 1:
                ((place, chunk),) = wanted
                if chunk.num_drafts:
                    parts.append(([place], StepResult(((),), 0.0, unverified=frozenset({0}))))  # its tokens follow
                    self._try([(place, chunk.without_guesses())], parts)
                    return
                self._check_device(chunk, error)
                parts.append(_failed(place, _describe(error)))
                return
        half = len(wanted) // 2
        self._try(wanted[:half], parts)
        self._try(wanted[half:], parts)

    def _check_device(self, failed: Chunk, error: Exception) -> None:
        """Raise DeviceError unless one token can be computed, in a page that only the failed sequence writes to."""
        try:
            others = tuple([pages[-1:] for pages in failed.other_pages])
            self._run(StepPlan((Chunk((0,), 0, failed.pages[-1:], (), other_pages=others),)))
        except Exception as second:
            raise DeviceError(
                f"nothing can be computed since {_describe(error)}; then: {_describe(second)}"
            ) from second


def _failed(place: int, reason: str) -> tuple[list[int], StepResult]:
    return [place], StepResult(((),), 0.0, {0: reason})


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
