"""Sequences on one worker, and what a committed step brought them. Pure."""

from array import array
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np

from pdserve.base.ids import Attempt, RequestId
from pdserve.base.values import value
from pdserve.engine.guesses import Guessing
from pdserve.engine.kvcache import Prefix
from pdserve.engine.pages import PagePool
from pdserve.engine.step import Chunk, Matcher, Phase, SampleSpec, StepResult, Targets, Tokens
from pdserve.protocol.drafts import Verified
from pdserve.protocol.page_tables import PageTables
from pdserve.protocol.pooling import Pooling
from pdserve.protocol.prefix_hash import EVERYONE, CacheScope
from pdserve.protocol.sampling import PromptLogprobs, SampledToken, SamplingParams, TokenLogprobs

SEED_STRIDE = 0xD1342543DE82EF95  # odd, so that the sequences of a request get different seeds
SEED_MASK = 2**64 - 1
_LEAST = 1e-12  # that a vector is divided by, as torch does


class Finish(Enum):
    STOP = auto()  # end-of-sequence or a stop token
    LENGTH = auto()  # max_tokens or the model's length limit


@value
class Job:
    """One placement of a request, as a worker gets it."""

    request_id: RequestId
    attempt: Attempt
    token_ids: Seq[int]  # the prompt, then tokens sampled before this placement
    num_prompt_tokens: int
    params: SamplingParams
    indices: tuple[int, ...]  # continuations to compute
    scope: CacheScope = EVERYONE
    priority: int = 0
    new_matcher: Callable[[], Matcher] | None = None  # where the text has to match a grammar

    @property
    def key(self) -> tuple[RequestId, Attempt]:
        return self.request_id, self.attempt


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens, the pages that hold their KV, and how far that has come.

    With several `indices` the sequence is still one prompt; it splits when their first tokens are sampled. KV of
    tokens[:computed] is in `pages`, and is final: no step writes there again. In phase DECODE that is all but the last
    token, and there is at least one token of the answer.
    """

    job: Job
    indices: tuple[int, ...]
    tokens: list[int]
    order: int  # of arrival at this worker
    stop_after_prompt: bool = False  # a hand-off takes over after the first token
    phase: Phase = Phase.PROMPT
    computed: int = 0
    pages: PageTables = field(default_factory=PageTables)
    drafts: tuple[int, ...] = ()  # guesses of the tokens to come, some of which its next step may verify
    guessing: Guessing = field(default_factory=Guessing)
    num_published: int = 0  # spans
    num_cached_tokens: int = 0
    has_run: bool = False
    is_held: bool = False  # it is not planned
    prompt_logprobs: int | None = None  # likeliest tokens reported with each score of the prompt, if asked
    num_scored: int = 1  # leading tokens of the prompt that have been scored; the first one has no score
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of the tokens after the job's, if they are asked for
    pooled: bytes = b""  # the sum of hidden states so far, where their mean is wanted
    prompt_ids: "array[int]" = field(init=False)  # as numpy reads them; empty if no sample reads them
    output_ids: "array[int]" = field(init=False)  # the same, as far as samples have needed them
    prefix: Prefix = field(init=False)  # of `tokens`
    ends_with_prompt: bool = field(init=False)  # after its first tokens it splits, or is handed off
    length_limit: int = field(init=False)  # tokens of prompt and answer that the request allows
    urgency: tuple[int, int] = field(init=False)  # sorts first what is served first and preempted last
    seeds: tuple[int, ...] = field(init=False)  # parallel to indices
    matcher: Matcher | None = field(init=False)
    reads_output: bool = field(init=False)  # how a token is sampled depends on the tokens in front of it

    def __post_init__(self) -> None:
        self.prefix = Prefix(self.tokens, self.job.scope)
        self.ends_with_prompt = self.stop_after_prompt or len(self.indices) > 1
        self.urgency = -self.job.priority, self.order
        params = self.job.params
        self.length_limit = self.job.num_prompt_tokens + params.max_tokens
        self.seeds = tuple([(params.seed + index * SEED_STRIDE) & SEED_MASK for index in self.indices])
        self.matcher = self.job.new_matcher() if self.job.new_matcher is not None else None
        self.prompt_ids = array("q", self.tokens[: self.job.num_prompt_tokens] if params.has_penalties else ())
        self.output_ids = array("q")
        has_long_words = any(len(word) > 1 for word in params.bad_word_ids)
        self.reads_output = params.has_penalties or self.matcher is not None or has_long_words

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.job.num_prompt_tokens

    @property
    def is_ready(self) -> bool:
        """Whether it can be planned: its grammar, if there is one, is compiled."""
        return self.matcher is None or self.matcher.is_ready

    @property
    def num_missing(self) -> int:
        """Return how many known tokens wait to be computed."""
        return len(self.tokens) - self.computed

    @property
    def is_to_score(self) -> bool:
        """Whether tokens of its prompt are yet to be scored."""
        return self.prompt_logprobs is not None and self.num_scored < self.job.num_prompt_tokens

    @property
    def reads_all(self) -> bool:
        """Whether hidden states of all its tokens are needed, also of those whose KV is cached."""
        pooling = self.job.params.pooling
        return self.is_to_score if pooling is None else pooling.reads_all

    def pooling(self, stop: int) -> Pooling | None:
        """Return what is made of a chunk that ends at `stop`."""
        pooling = self.job.params.pooling
        return pooling if pooling is not None and (pooling.reads_all or stop == len(self.tokens)) else None

    def beside(self, place: int, chunk: Chunk, result: StepResult) -> "list[Scored | Pooled]":
        """Take what a step brought of a computed chunk besides tokens; `place`: of the chunk in the step's plan."""
        outcomes: list[Scored | Pooled] = []
        if place in result.prompts:
            outcomes.append(self.scored(chunk.start + 1, result.prompts[place]))
        if place in result.pooled and (pooled := self._take_pooled(result.pooled[place])) is not None:
            outcomes.append(pooled)
        return outcomes

    def _take_pooled(self, vector: bytes) -> "Pooled | None":
        """Take what was made of a computed chunk; return the result, if that was the last one."""
        pooling = self.job.params.pooling
        if pooling is None or not (pooling.reads_all or pooling.normalizes):
            return Pooled(self, vector)
        total = np.frombuffer(vector, "<f4")
        if pooling.reads_all and self.pooled:
            total = total + np.frombuffer(self.pooled, "<f4")
        self.pooled = total.tobytes()
        if self.num_missing:
            return None
        mean = total / len(self.tokens) if pooling.reads_all else total
        whole = mean / max(float(np.linalg.norm(mean)), _LEAST) if pooling.normalizes else mean
        return Pooled(self, whole.astype("<f4").tobytes())

    def targets(self, start: int, stop: int) -> Targets | None:
        """Return which tokens the chunk tokens[start:stop] scores, if any."""
        stop = min(stop + 1, self.job.num_prompt_tokens)
        if self.prompt_logprobs is None or stop <= max(start + 1, self.num_scored):
            return None
        return Targets(self.tokens[start + 1 : stop], self.prompt_logprobs)

    def scored(self, position: int, logprobs: PromptLogprobs) -> "Scored":
        """Note that the prompt's tokens from `position` on have been scored."""
        self.num_scored = max(self.num_scored, position + len(logprobs))
        return Scored(self, position, logprobs)

    def append(self, token: SampledToken) -> None:
        self.tokens.append(token.token_id)
        if token.logprobs is not None:
            self.logprobs.append(token.logprobs)

    def tail(self, start: int) -> tuple[SampledToken, ...]:
        """Return the tokens from `start` on, a place after the job's tokens."""
        if not self.logprobs:
            return tuple([SampledToken(token_id) for token_id in self.tokens[start:]])
        logprobs = self.logprobs[start - len(self.job.token_ids) :]
        return tuple(map(SampledToken, self.tokens[start:], logprobs))

    def forget_pages(self) -> None:
        """Forget the pages, and so the KV; the caller holds or releases them. What helps to guess is made anew."""
        self.pages = PageTables()
        self.phase = Phase.PROMPT
        self.computed = 0
        self.num_published = 0
        self.pooled = b""
        self.guessing = Guessing()

    def num_left(self, max_model_len: int) -> int:
        """Return how many more tokens the request and the model allow."""
        return min(max_model_len, self.length_limit) - len(self.tokens)

    def finish_with(self, token_id: int, eos_token_ids: frozenset[int], max_model_len: int) -> Finish | None:
        """Return why the sequence ends if `token_id` is its next token; None if it goes on."""
        params = self.job.params
        if token_id in params.stop_token_ids:
            return Finish.STOP
        if token_id in eos_token_ids and not params.ignore_eos:
            return Finish.STOP
        return Finish.LENGTH if self.num_left(max_model_len) <= 1 else None

    def gain(self, tokens: Tokens, eos_token_ids: frozenset[int], max_model_len: int) -> tuple[Tokens, Finish | None]:
        """Append what a step sampled; return as much of it as belongs to the answer, and why that ends there, if so.

        The token that ends a sequence is not appended.
        """
        for count, token in enumerate(tokens, 1):
            finish = self.finish_with(token.token_id, eos_token_ids, max_model_len)
            if finish is not None:
                return tokens[:count], finish
            self.append(token)
        return tokens, None

    def samples(self, num_unknown: int = 0) -> tuple[SampleSpec, ...]:
        """Return what to sample after the last token and `num_unknown` unknown ones, once for each index."""
        params, num_prompt = self.job.params, self.job.num_prompt_tokens
        if params.pooling is not None:
            return ()
        count = len(self.tokens) - num_prompt + num_unknown
        output_ids: Seq[int] = ()
        if self.reads_output:
            self.output_ids.extend(self.tokens[num_prompt + len(self.output_ids) :])
            output_ids = self.output_ids[:]  # that one grows while steps run
        forbid_stops, lacks_output = count < params.min_tokens, self.reads_output and num_unknown > 0
        before, rest = (self.prompt_ids, output_ids, forbid_stops), (self.matcher, lacks_output)
        if len(self.seeds) == 1:
            return (SampleSpec(params, self.seeds[0], count, *before, (self.order, self.indices[0]), *rest),)
        pairs = zip(self.seeds, self.indices, strict=True)
        return tuple([SampleSpec(params, seed, count, *before, (self.order, index), *rest) for seed, index in pairs])


def split(pool: PagePool, sequence: Sequence, tails: Iterable[tuple[int, Seq[SampledToken]]]) -> list[Sequence]:
    """Return a sequence for each (index, tokens that follow), all of which share the pages of the given one.

    The first takes over the given sequence's hold on the pages; without tails, that keeps them. A shared page is copied
    before a sequence writes into it.
    """
    children: list[Sequence] = []
    for index, tokens in tails:
        if children:
            pool.share(sequence.pages.held)
        child = Sequence(
            job=sequence.job,
            indices=(index,),
            tokens=list(sequence.tokens),
            order=sequence.order,
            phase=Phase.DECODE,
            computed=sequence.computed,
            pages=sequence.pages.copy(),
            num_published=sequence.num_published,
            num_cached_tokens=sequence.num_cached_tokens,
            has_run=sequence.has_run,
            logprobs=list(sequence.logprobs),
        )
        for token in tokens:
            child.append(token)
        child.prefix.hashes += sequence.prefix.hashes
        children.append(child)
    if children:
        sequence.forget_pages()
    return children


@value
class Sampled:
    """A sequence gained tokens. `position` counts those generated before the first, from the request's start."""

    sequence: Sequence
    index: int
    position: int
    tokens: Tokens  # at least one
    finish: Finish | None
    verified: Verified | None = None  # the guesses among them, and those that were wrong


@value
class Started:
    """A sequence was in a step for the first time."""

    sequence: Sequence


@value
class Computed:
    """A chunk of a prompt is done: KV of tokens[:sequence.computed] is final."""

    sequence: Sequence


@value
class Scored:
    """The prompt's tokens from `position` on were scored; some of them may have been scored before."""

    sequence: Sequence
    position: int
    logprobs: PromptLogprobs


@value
class Pooled:
    """What was asked for in place of an answer. Nothing of the sequence is left to compute: it is to be removed."""

    sequence: Sequence
    vector: bytes


@value
class Split:
    """A prompt has split into its continuations, without those that ended with their first token."""

    sequence: Sequence
    children: tuple[Sequence, ...]


@value
class Broken:
    """A sequence could not be computed. It is no longer running, and keeps its pages until it is removed."""

    sequence: Sequence
    reason: str
    is_stuck: bool = False  # its own grammar lets no token follow


Outcome = Sampled | Started | Computed | Scored | Pooled | Split | Broken
