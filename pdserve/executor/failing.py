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
from dataclasses import dataclass, field

from pdserve.base.errors import DeviceError, InvariantError
from pdserve.engine.step import Chunk, StepPlan, StepResult, Tokens
from pdserve.engine.verification import without_guesses
from pdserve.protocol.sampling import PromptLogprobs

logger = logging.getLogger(__name__)

Run = Callable[[StepPlan], StepResult]


@dataclass(slots=True)
class _Found:
    """The results of those parts of a failed step that were computed, by place in the plan."""

    tokens: list[tuple[Tokens, ...]]
    elapsed_s: float = 0.0
    failed: dict[int, str] = field(default_factory=dict)
    prompts: dict[int, PromptLogprobs] = field(default_factory=dict)
    stuck: dict[int, str] = field(default_factory=dict)
    drafts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    expert_ratios: tuple[float, ...] = ()
    pooled: dict[int, bytes] = field(default_factory=dict)
    draft_s: float = 0.0
    take_in_s: float = 0.0
    num_draft_failures: int = 0


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
        found = _Found([()] * len(plan.chunks))
        wanted = self._known(plan.chunks, found)
        self.is_whole = len(wanted) == len(plan.chunks)
        if wanted:
            self._try(wanted, found)
        self.drawn = tuple(found.tokens)
        beside = found.failed, found.prompts, found.stuck, found.drafts, found.expert_ratios, found.pooled
        of_drafts = found.draft_s, found.take_in_s, found.num_draft_failures
        return StepResult(self.drawn, found.elapsed_s, *beside, *of_drafts)

    def _known(self, chunks: tuple[Chunk, ...], found: _Found) -> list[tuple[int, Chunk]]:
        """Return the chunks to compute, with their places, and with tokens of the step before where they need them."""
        wanted: list[tuple[int, Chunk]] = []
        for place, chunk in enumerate(chunks):
            if chunk.previous is None:
                wanted.append((place, chunk))
            elif sampled := self.drawn[chunk.previous]:
                wanted.append((place, chunk.after(sampled[0][0].token_id)))
            else:
                found.failed[place] = "the step before failed"
        return wanted

    def _copy(self, plan: StepPlan) -> None:
        try:
            self._run(StepPlan((), plan.copies))
        except (InvariantError, DeviceError):
            raise
        except Exception as error:
            raise DeviceError(f"copying pages failed: {_describe(error)}") from error

    def _try(self, wanted: list[tuple[int, Chunk]], found: _Found) -> None:
        """Compute chunks, each with its place in the plan; in halves if that fails."""
        try:
            result = self._run(StepPlan(tuple([chunk for _, chunk in wanted])))
        except (InvariantError, DeviceError):
            raise
        except Exception as error:
            logger.exception("a step of %d sequences failed", len(wanted))
            self.is_whole = False
            if len(wanted) == 1:
                ((place, chunk),) = wanted
                if chunk.num_drafts:
                    self._try([(place, without_guesses(chunk))], found)
                    return
                self._check_device(chunk, error)
                found.failed[place] = _describe(error)
                return
        else:
            for (place, _), tokens in zip(wanted, result.tokens, strict=True):
                found.tokens[place] = tokens
            found.elapsed_s += result.elapsed_s
            found.draft_s += result.draft_s
            found.take_in_s += result.take_in_s
            found.num_draft_failures += result.num_draft_failures
            found.prompts |= {wanted[index][0]: scores for index, scores in result.prompts.items()}
            found.stuck |= {wanted[index][0]: reason for index, reason in result.stuck.items()}
            found.expert_ratios += result.expert_ratios
            found.pooled |= {wanted[index][0]: vector for index, vector in result.pooled.items()}
            found.drafts |= {wanted[index][0]: guesses for index, guesses in result.drafts.items()}
            return
        half = len(wanted) // 2
        self._try(wanted[:half], found)
        self._try(wanted[half:], found)

    def _check_device(self, failed: Chunk, error: Exception) -> None:
        """Raise DeviceError unless one token can be computed, in a page that only the failed sequence writes to."""
        try:
            others = tuple([pages[-1:] for pages in failed.other_pages])
            self._run(StepPlan((Chunk((0,), 0, failed.pages[-1:], (), other_pages=others),)))
        except Exception as second:
            raise DeviceError(
                f"nothing can be computed since {_describe(error)}; then: {_describe(second)}"
            ) from second


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
