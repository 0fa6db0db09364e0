"""Steps that fail: finds which sequences made one fail, or that the device did, and counts those that brought nothing.

Invariant: a sequence is failed only if its chunk fails by itself while the device still computes another one. If that
fails too, no request is to blame: DeviceError.

A step that fails is computed again in halves. That changes no token: K and V are written to the same slots, and draws
depend on (seed, index) alone. Page copies run on their own, before the chunks, since a chunk may write into the page
that was copied from.

A step may have been planned while the one before it ran: its tokens that were not known then are put into it here.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from pdserve.engine.step import Chunk, StepPlan, StepResult
from pdserve.errors import DeviceError, InvariantError
from pdserve.sampling import PromptLogprobs, SampledToken

logger = logging.getLogger(__name__)

REMEMBERED_S = 30.0  # then a worker that nobody uses is tried again

Run = Callable[[StepPlan], StepResult]


@dataclass(slots=True)
class _Found:
    """What parts of a failed step brought so far, by place in the plan."""

    tokens: list[tuple[SampledToken, ...]]
    elapsed_s: float = 0.0
    failed: dict[int, str] = field(default_factory=dict)
    prompts: dict[int, PromptLogprobs] = field(default_factory=dict)
    stuck: dict[int, str] = field(default_factory=dict)


class Isolating:
    """Runs steps in the engine's thread; blocks."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._drawn: tuple[tuple[SampledToken, ...], ...] = ()  # by the step before

    def run(self, plan: StepPlan) -> StepResult:
        """Run a step; sequences that make it fail are named in the result. DeviceError if nothing can be computed."""
        chunks = tuple(map(self._filled_in, plan.chunks))
        if plan.copies:
            self._copy(plan)
        found = _Found([()] * len(chunks))
        self._try(chunks, 0, found)
        self._drawn = tuple(found.tokens)
        return StepResult(self._drawn, found.elapsed_s, found.failed, found.prompts, found.stuck)

    def _filled_in(self, chunk: Chunk) -> Chunk:
        """Name the token that the step before has sampled for a chunk. Where that failed, nobody wants this chunk."""
        if chunk.previous is None:
            return chunk
        sampled = self._drawn[chunk.previous]
        return replace(chunk, token_ids=(sampled[0].token_id,) if sampled else chunk.token_ids, previous=None)

    def _copy(self, plan: StepPlan) -> None:
        try:
            self._run(StepPlan((), plan.copies))
        except InvariantError:
            raise
        except Exception as error:
            raise DeviceError(f"copying pages failed: {_describe(error)}") from error

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
                found.failed[place] = _describe(error)
                return
        else:
            found.tokens[place : place + len(chunks)] = result.tokens
            found.elapsed_s += result.elapsed_s
            found.prompts |= {place + offset: scores for offset, scores in result.prompts.items()}
            found.stuck |= {place + offset: reason for offset, reason in result.stuck.items()}
            return
        half = len(chunks) // 2
        self._try(chunks[:half], place, found)
        self._try(chunks[half:], place + half, found)

    def _check_device(self, failed: Chunk, error: Exception) -> None:
        """Raise DeviceError unless one token can be computed, in a page that only the failed sequence writes to."""
        try:
            self._run(StepPlan((Chunk((0,), 0, failed.pages[-1:], ()),)))
        except Exception as second:
            raise DeviceError(
                f"nothing can be computed since {_describe(error)}; then: {_describe(second)}"
            ) from second


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


class FailedSteps:
    """Counts steps in a row that brought no sequence anything."""

    def __init__(self) -> None:
        self._count = 0
        self._last_s = 0.0

    def note(self, num_sequences: int, num_failed: int, now_s: float) -> bool:
        """Note a step; return whether all of its sequences failed."""
        all_failed = 0 < num_failed == num_sequences
        self._count = self.count(now_s) + 1 if all_failed else 0
        self._last_s = now_s
        return all_failed

    def count(self, now_s: float) -> int:
        return self._count if now_s - self._last_s < REMEMBERED_S else 0
