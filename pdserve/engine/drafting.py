"""What guesses beside a worker's model: after a step it guesses what follows, for the next step to verify.

Invariant: a drafter changes guesses and times alone. It writes no KV that the worker's model reads.

Drafters sample as the worker's model does, with the noise, the penalties and the grammar of each place, so that equal
distributions give equal tokens (coupled sampling: Daliri, Musco, Suresh 2024).

A draft model's pool has a page for each page of the worker's pool, so a sequence's page table leads to both, and the
scheduler's bookkeeping serves both. Pages whose KV came from another worker have no KV of the draft model yet: the
scheduler says which tokens it lacks. `head_drafting.py` has the other kind.
"""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from torch import Tensor

from pdserve.base.errors import DeviceError, InvariantError
from pdserve.base.ids import PageId
from pdserve.engine.draft_model import FED_AT_ONCE, FEW
from pdserve.engine.guesses import DraftsBy
from pdserve.engine.runner import EngineRunner
from pdserve.engine.scheduler import Limits
from pdserve.engine.step import Chunk, Draft, Phase, SampleSpec, StepPlan, StepResult, Tokens
from pdserve.engine.verification import Run, behind
from pdserve.protocol.sampling import SamplingParams

logger = logging.getLogger(__name__)

_UNREAD = SampleSpec(SamplingParams(temperature=0.0), 0, 0, (), (), forbid_stops=False, sequence=(0, 0))


@dataclass(slots=True)
class Line:
    """The draft of one chunk."""

    place: int  # of the chunk in the plan
    pages: Seq[PageId]
    tokens: Seq[int]  # to be computed next; of a head: those that follow what it takes in
    start: int  # position of the first that is computed, or taken in
    spec: SampleSpec | None  # what to sample behind them; None: there are more tokens to come
    num_guesses: int
    guesses: list[int] = field(default_factory=list)

    def samples(self) -> tuple[SampleSpec, ...]:
        """Return how the next guess is sampled, if any is."""
        return () if self.spec is None else (behind(self.spec, self.guesses),)

    def chunks(self) -> list[Chunk]:
        """Return what to compute next; the last of it samples a guess. A few tokens are rows, as of decoding steps."""
        samples = self.samples()
        if self.spec is None or len(self.tokens) > FEW:
            return [Chunk(self.tokens, self.start, self.pages, samples)]
        rows = [(token,) for token in self.tokens]
        specs = [*[(_UNREAD,)] * (len(rows) - 1), samples]
        return [
            Chunk(row, self.start + number, self.pages, of_row, Phase.DECODE)
            for number, (row, of_row) in enumerate(zip(rows, specs, strict=True))
        ]

    def take(self, guess: int) -> bool:
        """Take in a guess; return whether another one is wanted."""
        self.guesses.append(guess)
        self.start, self.tokens = self.start + len(self.tokens), (guess,)
        return len(self.guesses) < self.num_guesses


class Drafter(ABC):
    """Guesses after steps."""

    own_memory: Seq[Tensor] = ()  # pages that only this drafter has
    _has_failed = False  # to guess
    _num_failures = 0  # of any kind
    _num_reported = 0  # of these: with a step's result

    def beside(self, run: Run) -> Run:
        """Return what runs steps, takes them in, and drafts. Failures end neither steps nor requests.

        A drafter that has failed to guess is asked for no more guesses. It goes on to take in what is computed: other
        workers may get the pages, and guess from them.
        """

        def run_and_draft(plan: StepPlan) -> StepResult:
            result = run(plan)
            began_s, drafts = time.perf_counter(), dict[int, tuple[int, ...]]()
            self.attempt(lambda: self.take_in(plan, result))
            taken_s = ended_s = time.perf_counter()
            if not self._has_failed and any(chunk.draft is not None for chunk in plan.chunks):
                self._has_failed = not self.attempt(lambda: drafts.update(self.draft(plan, result)))
                ended_s = time.perf_counter()
            return self.told(
                replace(
                    result,
                    drafts=drafts,
                    elapsed_s=result.elapsed_s + ended_s - began_s,
                    draft_s=ended_s - taken_s,
                    take_in_s=taken_s - began_s,
                )
            )

        return run_and_draft

    def told(self, result: StepResult) -> StepResult:
        """Return a step's result with the failures that no result has told of yet."""
        num_new, self._num_reported = self._num_failures - self._num_reported, self._num_failures
        return replace(result, num_draft_failures=num_new) if num_new else result

    def attempt(self, act: Callable[[], None]) -> bool:
        """Return whether it did not fail. A failure is counted, and logged if it is the first."""
        try:
            act()
        except (InvariantError, DeviceError):
            raise
        except Exception:
            if not self._num_failures:
                logger.exception("a draft model or head failed: there are fewer guesses, or worse ones")
            self._num_failures += 1
            return False
        return True

    @abstractmethod
    def take_in(self, plan: StepPlan, result: StepResult) -> None:
        """Compute what guesses of later steps need, whether or not any are wanted after this one."""

    @abstractmethod
    def draft(self, plan: StepPlan, result: StepResult) -> Mapping[int, tuple[int, ...]]:
        """Return guesses for the chunks with a draft, by place in the plan."""


class ModelDrafter(Drafter):
    """A draft model, on a runner whose pool has as many pages as the worker's, for as many tokens each."""

    def __init__(self, runner: EngineRunner) -> None:
        self.own_memory = (runner.kv,)
        self._runner = runner

    def take_in(self, plan: StepPlan, result: StepResult) -> None:
        """Do nothing: tokens are all that it needs, and the scheduler has these."""

    def draft(self, plan: StepPlan, result: StepResult) -> Mapping[int, tuple[int, ...]]:
        lines = [
            _line(place, chunk, chunk.draft, tokens[0])
            for place, (chunk, tokens) in enumerate(zip(plan.chunks, result.tokens, strict=True))
            if chunk.draft is not None and place not in result.stuck
        ]
        open_lines = lines
        while open_lines:
            open_lines = self._pass(open_lines)
        return {line.place: tuple(line.guesses) for line in lines}

    def _pass(self, lines: list[Line]) -> list[Line]:
        """Let the model compute once; return the lines that want another guess."""
        chunks, lasts = list[Chunk](), list[int]()
        for line in lines:
            chunks += line.chunks()
            lasts.append(len(chunks) - 1)
        result = self._runner.run(StepPlan(tuple(chunks)))
        going_on = []
        for line, last in zip(lines, lasts, strict=True):
            sampled, is_stuck = result.tokens[last], last in result.stuck
            if sampled and not is_stuck and line.take(sampled[0][0].token_id):
                going_on.append(line)
        return going_on


def _line(place: int, chunk: Chunk, draft: Draft, kept: Tokens) -> Line:
    """Return what is drafted for a chunk, of which a step has kept guesses and sampled one more token."""
    (spec,), start = chunk.samples, draft.start
    if start + len(draft.token_ids) < chunk.start:
        return Line(place, chunk.pages, draft.token_ids, start, None, 0)
    sampled = [token.token_id for token in kept]
    tokens = [*draft.token_ids, chunk.token_ids[0], *sampled]
    if start > chunk.start:  # of its guesses it has computed all but the last
        num_right = min(len(kept), max(1, chunk.num_drafts))
        tokens, start = tokens[num_right:], chunk.start + num_right
    return Line(place, chunk.pages, tokens, start, guessed(behind(spec, sampled)), draft.num_guesses)


def guessed(spec: SampleSpec) -> SampleSpec:
    """Return what samples the same token as a guess: without its log probability, and for a sequence of its own.

    So what a device counts of guesses is nobody's but those of one draft.
    """
    params = spec.params if spec.params.logprobs is None else replace(spec.params, logprobs=None)
    return replace(spec, params=params, sequence=(*spec.sequence, spec.index))


def limits_of_passes(limits: Limits) -> Limits:
    """Return what a pass of a draft model computes at most, beside a model whose steps have these limits.

    Each sequence has few tokens that it lacks and those that a step gives it, and one has a part of its prompt. Behind
    a draft that was right these are two: the last guess, and the token behind it.
    """
    assert isinstance(limits.guesser, DraftsBy), "nothing else drafts"
    return replace(
        limits,
        max_num_batched_tokens=limits.max_num_seqs * (FEW + 1 + limits.most_rows) + FED_AT_ONCE,
        max_model_len=limits.guesser.max_model_len,
        num_speculative_tokens=1,
    )
