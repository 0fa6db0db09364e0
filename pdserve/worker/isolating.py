"""Finds which sequences of a failed step made it fail, or that the device did. Runs in the engine's thread.

Invariant: a sequence is failed only if its chunk fails by itself while the device still computes another one. If that
fails too, no request is to blame: DeviceError.

A step that fails is computed again in halves. That changes no token: K and V are written to the same slots, and draws
depend on (seed, index) alone. Page copies run on their own, before the chunks, since a chunk may write into the page
that was copied from.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from pdserve.engine.step import Chunk, SampledToken, StepPlan, StepResult
from pdserve.errors import DeviceError, InvariantError

logger = logging.getLogger(__name__)

Run = Callable[[StepPlan], StepResult]


@dataclass(slots=True)
class _Found:
    """What parts of a failed step brought so far, by place in the plan."""

    tokens: list[tuple[SampledToken, ...]]
    elapsed_s: float = 0.0
    failed: dict[int, str] = field(default_factory=dict)


class Isolating:
    """Runs steps; blocks."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def run(self, plan: StepPlan) -> StepResult:
        """Run a step; sequences that make it fail are named in the result. DeviceError if nothing can be computed."""
        chunks = plan.chunks
        if plan.copies:
            self._copy(plan)
        found = _Found([()] * len(chunks))
        self._try(chunks, 0, found)
        return StepResult(tuple(found.tokens), found.elapsed_s, found.failed)

    def _copy(self, plan: StepPlan) -> None:
        try:
            self._run(StepPlan((), plan.copies))
        except InvariantError:
            raise
        except Exception as error:
            raise DeviceError(f"copying pages failed: {_words(error)}") from error

    def _try(self, chunks: tuple[Chunk, ...], place: int, found: _Found) -> None:
        """Compute chunks, the first of which is at that place of the plan; in halves if it fails."""
        try:
            result = self._run(StepPlan(chunks))
        except InvariantError:
            raise
        except Exception as error:
            logger.exception("a step of %d sequences failed", len(chunks))
            if len(chunks) == 1:
                self._check_device(chunks[0], error)
                found.failed[place] = _words(error)
                return
        else:
            found.tokens[place : place + len(chunks)] = result.tokens
            found.elapsed_s += result.elapsed_s
            return
        half = len(chunks) // 2
        self._try(chunks[:half], place, found)
        self._try(chunks[half:], place + half, found)

    def _check_device(self, failed: Chunk, error: Exception) -> None:
        """Raise DeviceError unless one token can be computed, in a page that only the failed sequence writes to."""
        try:
            self._run(StepPlan((Chunk((0,), 0, failed.pages[-1:], ()),)))
        except Exception as second:
            raise DeviceError(f"nothing can be computed since {_words(error)}; then: {_words(second)}") from second


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
