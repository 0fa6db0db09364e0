"""What one engine step computes, and its result: the contract between the scheduler and the runner."""

from array import array
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import field, replace
from enum import Enum, auto
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from pdserve.base.ids import PageId
from pdserve.base.values import value
from pdserve.perfmodel.curve import Step, attention_work
from pdserve.protocol.adapters import NO_ADAPTER, AdapterDigest
from pdserve.protocol.pooling import Pooling
from pdserve.protocol.sampling import PromptLogprobs, SampledToken, SamplingParams

Tokens = tuple[SampledToken, ...]  # that one continuation gains in one step
SequenceKey = tuple[int, ...]  # of all that one worker computes: a request's arrival, and a continuation's index
_Of = TypeVar("_Of")
Bits = npt.NDArray[np.int32]  # [ceil(vocab_size / 32)]; token i is bit i % 32 of word i // 32


class Phase(Enum):
    """What steps do for a sequence. It is set where it changes, never guessed from a count of tokens."""

    PROMPT = auto()  # they compute tokens that are known: its prompt, or all of it after a preemption
    DECODE = auto()  # they compute its last token and guesses behind it, and sample what follows


class Matcher(Protocol):
    """The grammar of one continuation, from outside the engine. One thread at a time fills masks."""

    @property
    def is_ready(self) -> bool:
        """Whether masks can be had without delay. Once true, it stays so."""
        ...

    def fill(self, output_ids: Seq[int], bits: Bits) -> None:
        """Write which tokens may follow the answer's tokens so far, at least one; GrammarError if none can."""
        ...


@value
class SampleSpec:
    """Sample one token after a chunk's last known token, and one after each guess behind it.

    The token depends on `seed` and `index` only (and on the logits), never on which worker or batch it is sampled in.
    """

    params: SamplingParams
    seed: int  # 64 bits; already differs between the sequences of one request
    index: int  # how many tokens this sequence has generated so far
    prompt_ids: Seq[int]
    output_ids: Seq[int]  # those that are known
    forbid_stops: bool  # min_tokens not reached: neither end-of-sequence nor stop tokens may be sampled
    sequence: SequenceKey  # whose token it is
    matcher: Matcher | None = None  # says which tokens may be sampled
    lacks_output: bool = False  # the last token of `output_ids` is missing: the previous step samples it

    @property
    def needs_output(self) -> bool:
        """Whether the host has to know the token that is missing: penalties may be counted on a device."""
        return self.lacks_output and (self.matcher is not None or any(len(w) > 1 for w in self.params.bad_word_ids))

    @property
    def forbidden(self) -> tuple[int, ...]:
        """Return the tokens that would complete a bad word whose beginning the answer ends with."""
        output = self.output_ids
        words = [word for word in self.params.bad_word_ids if len(word) <= len(output) + 1]
        return tuple([word[-1] for word in words if list(word[:-1]) == list(output[len(output) + 1 - len(word) :])])

    def after(self, token_id: int) -> "SampleSpec":
        """Return the specification once the token that it lacks is known."""
        if not self.lacks_output:
            return self
        output_ids = array("q", self.output_ids)
        output_ids.append(token_id)
        return replace(self, output_ids=output_ids, lacks_output=False)


@value
class Targets:
    """Prompt tokens to score: the first by the logits of the chunk's first token, and so on."""

    token_ids: Seq[int]  # no more than the chunk has
    num_top: int  # how many of the likeliest tokens are wanted at each place


@value
class Draft:
    """What a draft model computes for a DECODE chunk, when the step has sampled the chunk's tokens.

    First KV of `token_ids` at positions start, start+1, …: tokens before the chunk's own that the draft model lacks.
    If they reach the chunk's start, then KV of the chunk's tokens that are kept, and at most `num_guesses` guesses.
    `start` is one behind the chunk's start where the draft model has made the chunk's guesses.
    """

    token_ids: Seq[int]
    start: int
    num_guesses: int


@value
class Chunk:
    """One sequence's share of a step: compute KV of `token_ids` at positions start, start+1, …

    `pages` covers positions 0 … start+len(token_ids)-1, in order; K and V of the chunk are written there. `other_pages`
    does the same for each group of layers after the first; in front of a group's window any page may stand. The tokens
    are computed with `adapter`.
    `samples` is empty while a prompt is unfinished; a prompt with n > 1 is sampled several times from the same logits.
    The last `num_drafts` tokens of a DECODE chunk are guesses. A token is sampled where the chunk would end without
    them and after each guess, as long as what was sampled before it equals the guesses: KV behind that means nothing.
    With `previous`, which a DECODE chunk without guesses may have, the one token is the one sampled for that chunk of
    the previous step, which may still run; `token_ids` holds a zero in its place. `pooling`: what is made of the chunk.
    With `draft`, `pages` also covers the positions of the chunk's own guesses and of those to come. `following`: the
    token after a chunk of a prompt, where it is known. `continues`: the one token is a guess, behind the token of the
    chunk before it in the plan.
    """

    token_ids: Seq[int]
    start: int
    pages: Seq[PageId]
    samples: tuple[SampleSpec, ...]
    phase: Phase = Phase.PROMPT
    previous: int | None = None
    targets: Targets | None = None
    num_drafts: int = 0
    other_pages: tuple[Seq[PageId], ...] = ()
    adapter: AdapterDigest = NO_ADAPTER
    pooling: Pooling | None = None
    draft: Draft | None = None
    following: int | None = None
    continues: bool = False

    def after(self, token_id: int) -> "Chunk":
        """Return the chunk once the token is known that the previous step samples for it."""
        samples = tuple([spec.after(token_id) for spec in self.samples])
        return replace(self, token_ids=(token_id,), samples=samples, previous=None)

    def without_guesses(self) -> "Chunk":
        """Return the chunk up to its last known token."""
        return replace(self, token_ids=self.token_ids[: len(self.token_ids) - self.num_drafts], num_drafts=0)


@value
class StepPlan:
    """One step: page copies first (copy-on-write), then all chunks in one forward pass."""

    chunks: tuple[Chunk, ...]
    copies: tuple[tuple[PageId, PageId], ...] = ()  # (from, to)

    @property
    def num_tokens(self) -> int:
        return sum([len(chunk.token_ids) for chunk in self.chunks])

    @property
    def has_guesses(self) -> bool:
        return any(chunk.num_drafts for chunk in self.chunks)

    @property
    def has_drafts(self) -> bool:
        """Whether guesses are to be made when it is over."""
        return any(chunk.draft is not None for chunk in self.chunks)


@value
class StepResult:
    """Tokens sampled, parallel to `StepPlan.chunks` and each chunk's `samples`: the kept guesses and one more.

    Each of the others goes by the place in `StepPlan.chunks`. `failed`: why the chunk could not be computed; its tokens
    are empty. `prompts`: the scores of a chunk with targets. `stuck`: why the grammar lets no token follow; the tokens
    mean nothing. `drafts`: guesses of what follows the tokens of a chunk; none for a chunk whose draft was computed in
    part. `expert_ratios`: see `engine.expert_balance`. `pooled`: of a chunk with pooling, float32: the vector, or for a
    mean the sum over the chunk. `draft_s`, `take_in_s`: how much of `elapsed_s` a draft model or head guessed, and took
    in what was computed. `num_draft_failures`: how often one of these failed. `unverified`: chunks that failed with
    their guesses, and were computed without them.
    """

    tokens: tuple[tuple[Tokens, ...], ...]
    elapsed_s: float
    failed: Mapping[int, str] = field(default_factory=dict)
    prompts: Mapping[int, PromptLogprobs] = field(default_factory=dict)
    stuck: Mapping[int, str] = field(default_factory=dict)
    drafts: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    expert_ratios: tuple[float, ...] = ()
    pooled: Mapping[int, bytes] = field(default_factory=dict)
    draft_s: float = 0.0
    take_in_s: float = 0.0
    num_draft_failures: int = 0
    unverified: frozenset[int] = frozenset()

    def computed(self, place: int, chunk: Chunk) -> Chunk:
        """Return what was computed of the chunk at a place of the plan."""
        return chunk.without_guesses() if place in self.unverified else chunk


def joined(parts: Seq[tuple[Seq[int], StepResult]], num_chunks: int) -> StepResult:
    """Return the result of a plan of so many chunks whose parts were computed by themselves, each at these places."""

    def by_place(of: Callable[[StepResult], Mapping[int, _Of]]) -> dict[int, _Of]:
        return {places[index]: found for places, result in parts for index, found in of(result).items()}

    tokens: list[tuple[Tokens, ...]] = [()] * num_chunks
    for places, result in parts:
        for place, sampled in zip(places, result.tokens, strict=True):
            tokens[place] = sampled
    results = [result for _, result in parts]
    return StepResult(
        tokens=tuple(tokens),
        elapsed_s=sum([result.elapsed_s for result in results]),
        failed=by_place(lambda result: result.failed),
        prompts=by_place(lambda result: result.prompts),
        stuck=by_place(lambda result: result.stuck),
        drafts=by_place(lambda result: result.drafts),
        expert_ratios=tuple([ratio for result in results for ratio in result.expert_ratios]),
        pooled=by_place(lambda result: result.pooled),
        draft_s=sum([result.draft_s for result in results]),
        take_in_s=sum([result.take_in_s for result in results]),
        num_draft_failures=sum([result.num_draft_failures for result in results]),
        unverified=frozenset([places[index] for places, result in parts for index in result.unverified]),
    )


def work_of(plan: StepPlan, result: StepResult | None = None) -> Step:
    """Return what a step computes, and what it brought."""
    decode_rows = prefill_tokens = prefill_work = kv_tokens = guesses = kept = 0
    for place, planned in enumerate(plan.chunks):
        chunk = planned if result is None else result.computed(place, planned)
        count = len(chunk.token_ids)
        if chunk.phase is Phase.PROMPT:
            prefill_tokens += count
            prefill_work += attention_work(count, chunk.start)
        else:
            decode_rows += count
            kv_tokens += count * chunk.start + count * (count + 1) // 2  # each row reads its context
            if chunk.num_drafts:
                guesses += chunk.num_drafts
                tokens = () if result is None else result.tokens[place]
                kept += len(tokens[0]) - 1 if tokens else 0
    return Step(prefill_tokens, prefill_work, decode_rows, kv_tokens, guesses, kept)
