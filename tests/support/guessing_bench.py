"""Requests that a real small model answers under a scheduler, with guesses of any kind, or without."""

import random
from collections import Counter, deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import pytest
from listed_answers import Listed
from scheduled import sequence_of

from pdserve.engine.drafting import ModelDrafter
from pdserve.engine.guesses import DraftsBy, NgramLookup
from pdserve.engine.head_drafting import HeadDrafter, HeadRunner
from pdserve.engine.kvcache import KvCache
from pdserve.engine.layer_kinds import paging_of
from pdserve.engine.runner import Runner
from pdserve.engine.scheduler import Limits, Scheduler
from pdserve.engine.sequence import Broken, Finish, Sampled, Sequence
from pdserve.engine.step import Matcher, StepPlan, StepResult, work_of
from pdserve.engine.verification import Run, verifying
from pdserve.executor.failing import Isolating
from pdserve.model.family import Model
from pdserve.model.guessing_head import Head
from pdserve.protocol.drafts import DraftSource, Verified
from pdserve.protocol.prefix_hash import PrefixHasher
from pdserve.protocol.sampling import SampledToken, SamplingParams

VOCAB, END, PAGE_SIZE = 90, 5, 16
MOST = 6  # guesses
LOOKUP = NgramLookup(1, 4)

Name = tuple[int, int]  # of a request, and of a continuation of it
Answers = Mapping[Name, Seq[SampledToken]]
Guesser = Callable[[Seq[int], int, random.Random], tuple[int, ...]]  # of an answer, and how many tokens it has already


def right(answer: Seq[int], count: int, drawn: random.Random) -> tuple[int, ...]:
    return tuple(answer[count : count + MOST])


def beyond_the_end(answer: Seq[int], count: int, drawn: random.Random) -> tuple[int, ...]:
    return (*answer[count:], *range(40))


def liar(answer: Seq[int], count: int, drawn: random.Random) -> tuple[int, ...]:
    return tuple((token + 1) % VOCAB for token in answer[count : count + MOST])


def mostly_right(answer: Seq[int], count: int, drawn: random.Random) -> tuple[int, ...]:
    guesses = answer[count : count + drawn.randrange(MOST + 1)]
    return tuple(drawn.randrange(VOCAB) if drawn.random() < 0.3 else token for token in guesses)


DRAFTERS: dict[str, Guesser | None] = {each.__name__: each for each in (right, beyond_the_end, liar, mostly_right)}
DRAFTERS["ngram"] = None


@dataclass
class Bench:
    """A model under a scheduler that plans ahead where it may. With answers given, a drafter guesses them."""

    model: Model
    num_pages: int = 300
    drafter: str = ""
    known: Mapping[Name, Seq[int]] = field(default_factory=dict)
    lookup: NgramLookup = field(default_factory=lambda: LOOKUP)
    depth: int = 2
    breaks_guesses: bool = False  # every step with rows behind a guess fails
    draft: Model | None = None  # guesses, in place of a drafter
    draft_model_len: int = 400
    row_s: float = 0.0001  # that a row takes
    draft_run: Callable[[Run], Run] = lambda run: run  # what is put around the draft model's steps
    head: Head | None = None  # guesses, in place of a draft model
    head_drafter: type[HeadDrafter] = HeadDrafter
    drafted: list[tuple[Sequence, list[int], tuple[int, ...]]] = field(default_factory=list)  # all guesses, and of what
    answers: dict[Name, list[SampledToken]] = field(default_factory=dict)
    ends: dict[Name, Finish] = field(default_factory=dict)
    broken: dict[int, Broken] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    verified: list[Verified] = field(default_factory=list)

    def __post_init__(self) -> None:
        runner = self.runner = Runner(self.model, self.num_pages, PAGE_SIZE, (END,))
        cache = KvCache(self.num_pages, paging_of(runner.groups), PrefixHasher(b"secret", "model"))
        limits = Limits(8, 64, 400, frozenset({END}))
        verify = verifying(runner.run)
        if self.draft is not None:
            limits = replace(
                limits, num_speculative_tokens=MOST, guesser=DraftsBy(DraftSource.DRAFT_MODEL, self.draft_model_len)
            )
            self.draft_runner = Runner(self.draft, self.num_pages, runner.groups[0].page_size, (END,))
            self.draft_runner.run = self.draft_run(self.draft_runner.run)  # type: ignore[method-assign]
            verify = ModelDrafter(self.draft_runner).beside(verify)
        elif self.head is not None:
            limits = replace(
                limits, num_speculative_tokens=MOST, guesser=DraftsBy(DraftSource.EAGLE3, self.draft_model_len)
            )
            verify = self.head_drafter(HeadRunner(self.head, runner, (END,))).beside(verify)
        elif self.drafter:
            lookup = self.lookup if self.drafter == "ngram" else None
            limits = replace(limits, num_speculative_tokens=MOST, guesser=lookup)
        self.scheduler = Scheduler(cache, limits)

        def run(plan: StepPlan) -> StepResult:
            if self.breaks_guesses and any(chunk.num_drafts for chunk in plan.chunks):
                raise RuntimeError("broken on purpose")
            return verify(plan)

        self._run = Isolating(run).run
        self._drawn = random.Random(3)

    def add(self, number: int, asked: Seq[int], params: SamplingParams, matcher: Matcher | None = None) -> None:
        self.scheduler.add(sequence_of(number, asked, params, matcher=matcher))

    def run(self) -> "Bench":
        running = deque[tuple[StepPlan, Callable[[], StepResult]]]()
        while True:
            plan = self.scheduler.plan() if len(running) < self.depth else None
            if plan is not None:
                self.counts["ahead"] += len(running)
                running.append((plan, self.begin(plan)))
            elif running:
                plan, end = running.popleft()
                self.commit(plan, self.guessed(plan, end()))
            else:
                self.scheduler.cache.check()
                assert self.scheduler.cache.pool.num_held == 0
                return self

    def begin(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Begin a step; return what waits for its end."""
        result = self._run(plan)
        return lambda: result

    def compute(self, plan: StepPlan) -> StepResult:
        """Run a step, and guess what follows its tokens."""
        return self.guessed(plan, self.begin(plan)())

    def guessed(self, plan: StepPlan, result: StepResult) -> StepResult:
        """Count a step, and guess what follows its tokens, as a model's own heads would."""
        self.counts["guesses"] += sum(chunk.num_drafts for chunk in plan.chunks)
        self.counts["right"] += sum(
            len(tokens[0]) - 1 for chunk, tokens in zip(plan.chunks, result.tokens, strict=True) if chunk.num_drafts
        )
        drafter, drafts = DRAFTERS.get(self.drafter), dict(result.drafts)
        if drafter is not None:
            for place, (chunk, tokens) in enumerate(zip(plan.chunks, result.tokens, strict=True)):
                if len(tokens) == 1:
                    spec = chunk.samples[0]
                    answer = self.known.get(spec.sequence, ())
                    drafts[place] = drafter(answer, spec.index + len(tokens[0]), self._drawn)
        num_fed = sum(len(chunk.draft.token_ids) for chunk in plan.chunks if chunk.draft is not None)
        num_passes = max([bool(num_fed), *map(len, result.drafts.values())])
        draft_s = 0.0005 * num_passes + 0.0001 * num_fed if result.draft_s else 0.0
        take_in_s = 0.0005 if self.head is not None else 0.0
        self.counts["timed take-ins"] += result.take_in_s > 0
        self.counts["draft failures"] += result.num_draft_failures
        elapsed_s = 0.01 + self.row_s * plan.num_tokens + draft_s + take_in_s
        return replace(result, drafts=drafts, elapsed_s=elapsed_s, draft_s=draft_s)

    def commit(self, plan: StepPlan, result: StepResult) -> None:
        self.counts["steps"] += 1
        self.counts["guesses of work"] += work_of(plan, result).guesses
        self.counts["rows of work"] += work_of(plan, result).sequences
        for place, guesses in result.drafts.items():
            sequence, sampled = self.scheduler.steps[0].sequences[place], result.tokens[place][0]
            self.drafted.append((sequence, [*sequence.tokens, *[token.token_id for token in sampled]], guesses))
        for outcome in self.scheduler.commit(plan, result):
            number = outcome.sequence.order
            if isinstance(outcome, Sampled):
                self.verified += (outcome.verified,) if outcome.verified is not None else ()
                self.answers.setdefault((number, outcome.index), []).extend(outcome.tokens)
                if outcome.finish is not None:
                    self.ends[number, outcome.index] = outcome.finish
            elif isinstance(outcome, Broken):
                self.broken[number] = outcome
                self.scheduler.remove(outcome.sequence)


REPEATED = [7, 8, 9, 10, 11, 12, 13] * 3
SENTENCES = {(*range(20, 20 + length), last, END) for length in (3, 9, 15) for last in (60, 61, 62)}
REQUESTS: tuple[tuple[dict[str, object], bool], ...] = (  # params, and whether a grammar goes with them
    ({"temperature": 0.0, "ignore_eos": True, "max_tokens": 70}, False),
    ({"temperature": 0.0, "max_tokens": 41, "logprobs": 3}, False),
    ({"temperature": 1.0, "top_p": 0.9, "logprobs": 0}, False),
    ({"temperature": 0.7, "top_k": 5, "n": 3}, False),
    ({"temperature": 0.8, "min_p": 0.1, "repetition_penalty": 1.3, "logprobs": 1}, False),
    ({"temperature": 0.0, "frequency_penalty": 0.6, "presence_penalty": 0.4, "ignore_eos": True}, False),
    ({"temperature": 1.0, "min_tokens": 12, "stop_token_ids": (9, 10, 11)}, False),
    ({"temperature": 0.9, "bad_word_ids": ((9, 10), (33,)), "logit_bias": ((12, 4.0),), "n": 2}, False),
    ({"temperature": 2.0, "logprobs": 2}, True),
    ({"temperature": 1.5, "n": 2, "min_tokens": 6}, True),
    ({"temperature": 0.0, "repetition_penalty": 1.5, "allowed_token_ids": tuple(range(40, 90))}, False),
)


def add_requests(bench: Bench) -> Bench:
    for number, (params, has_grammar) in enumerate(REQUESTS):
        settings = SamplingParams(**{"seed": 11 * number, "max_tokens": 40, **params})  # type: ignore[arg-type]
        asked = [*REPEATED, 14 + number, *REPEATED[: number + 2]]
        bench.add(number, asked, settings, Listed(SENTENCES, bench.model.config.vocab_size) if has_grammar else None)
    return bench


def ids(answers: Answers) -> dict[Name, list[int]]:
    return {name: [token.token_id for token in answer] for name, answer in answers.items()}


def assert_same(bench: Bench, plain: Bench, close: float = 1e-5) -> None:
    """Assert that answers are the same, in tokens, ends and scores; and that none has failed."""
    assert ids(bench.answers) == ids(plain.answers)
    assert bench.ends == plain.ends
    assert bench.broken.keys() == plain.broken.keys() == set()
    assert_same_scores(bench.answers, plain.answers, close)


def answered_alike(plain: Bench, bench: Bench, *asked: tuple[Seq[int], SamplingParams]) -> None:
    """Answer requests by two benches, and assert that tokens are the same."""
    for each in (plain, bench):
        for number, (tokens, params) in enumerate(asked):
            each.add(number, tokens, params)
        each.run()
    assert ids(bench.answers) == ids(plain.answers)


def assert_same_scores(some: Answers, others: Answers, close: float = 1e-5) -> None:
    """Compare log probabilities. close: as near as sums of float32 are that many rows, or few, are part of."""
    for name, answer in some.items():
        for one, other in zip(answer, others[name], strict=True):
            assert (one.logprobs is None) == (other.logprobs is None)
            if one.logprobs is not None and other.logprobs is not None:
                assert one.logprobs.chosen == pytest.approx(other.logprobs.chosen, abs=close)
                assert [token for token, _ in one.logprobs.top] == [token for token, _ in other.logprobs.top]
