"""Guesses change no token, whatever they are: a real model answers with any drafter as it does without."""

import random
from collections import Counter, deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from listed_answers import Listed
from model_zoo import prompt as zoo_prompt
from model_zoo import write_model
from small_models import small_config, small_model

from pdserve.base.ids import Attempt, RequestId
from pdserve.checkpoint.hf_directory import open_directory
from pdserve.engine.guesses import NgramLookup
from pdserve.engine.kvcache import KvCache
from pdserve.engine.layer_kinds import paging_of
from pdserve.engine.runner import Runner
from pdserve.engine.scheduler import Limits, Scheduler
from pdserve.engine.sequence import Broken, Finish, Job, Sampled, Sequence
from pdserve.engine.step import Matcher, StepPlan, StepResult
from pdserve.engine.verification import verifying
from pdserve.executor.failing import Isolating
from pdserve.model.family import Model
from pdserve.model.loading import load_model
from pdserve.protocol.prefix_hash import PrefixHasher
from pdserve.protocol.sampling import SampledToken, SamplingParams

VOCAB, END, PAGE_SIZE = 90, 5, 16
MOST = 6  # guesses
LOOKUP = NgramLookup(1, 4)

Name = tuple[int, int]  # of a request, and of a continuation of it
Answers = Mapping[Name, Seq[SampledToken]]
Drafter = Callable[[Seq[int], int, random.Random], tuple[int, ...]]  # of an answer, and how many tokens it has already


def right(answer: Seq[int], count: int, drawn: random.Random) -> tuple[int, ...]:
    return tuple(answer[count : count + MOST])


def beyond_the_end(answer: Seq[int], count: int, drawn: random.Random) -> tuple[int, ...]:
    return (*answer[count:], *range(40))


def liar(answer: Seq[int], count: int, drawn: random.Random) -> tuple[int, ...]:
    return tuple((token + 1) % VOCAB for token in answer[count : count + MOST])


def mostly_right(answer: Seq[int], count: int, drawn: random.Random) -> tuple[int, ...]:
    guesses = answer[count : count + drawn.randrange(MOST + 1)]
    return tuple(drawn.randrange(VOCAB) if drawn.random() < 0.3 else token for token in guesses)


DRAFTERS: dict[str, Drafter | None] = {each.__name__: each for each in (right, beyond_the_end, liar, mostly_right)}
DRAFTERS["ngram"] = None

ALWAYS = ("mostly_right", "ngram")


@dataclass
class Bench:
    """A model under a scheduler that plans ahead where it may. With answers given, a drafter guesses them."""

    model: Model
    num_pages: int = 300
    drafter: str = ""
    known: Mapping[Name, Seq[int]] = field(default_factory=dict)
    depth: int = 2
    breaks_guesses: bool = False  # every step with rows behind a guess fails
    answers: dict[Name, list[SampledToken]] = field(default_factory=dict)
    ends: dict[Name, Finish] = field(default_factory=dict)
    broken: dict[int, Broken] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        runner = Runner(self.model, self.num_pages, PAGE_SIZE, (END,))
        cache = KvCache(self.num_pages, paging_of(runner.groups), PrefixHasher(b"secret", "model"))
        limits = Limits(8, 64, 400, frozenset({END}))
        if self.drafter:
            lookup = LOOKUP if self.drafter == "ngram" else None
            limits = replace(limits, num_speculative_tokens=MOST, lookup=lookup)
        self.scheduler = Scheduler(cache, limits)
        verify = verifying(runner.run)

        def run(plan: StepPlan) -> StepResult:
            if self.breaks_guesses and any(chunk.num_drafts for chunk in plan.chunks):
                raise RuntimeError("broken on purpose")
            return verify(plan)

        self._run = Isolating(run).run
        self._drawn = random.Random(3)

    def add(self, number: int, asked: Seq[int], params: SamplingParams, matcher: Matcher | None = None) -> None:
        key = RequestId(number.to_bytes(16)), Attempt(0)
        new_matcher = None if matcher is None else lambda: matcher
        job = Job(*key, tuple(asked), len(asked), params, tuple(range(params.n)), new_matcher=new_matcher)
        self.scheduler.add(Sequence(job, job.indices, list(asked), order=number))

    def run(self) -> "Bench":
        running = deque[tuple[StepPlan, StepResult]]()
        while True:
            plan = self.scheduler.plan() if len(running) < self.depth else None
            if plan is not None:
                self.counts["ahead"] += len(running)
                running.append((plan, self.compute(plan)))
            elif running:
                self.commit(*running.popleft())
            else:
                self.scheduler.cache.check()
                assert self.scheduler.cache.pool.num_held == 0
                return self

    def compute(self, plan: StepPlan) -> StepResult:
        """Run a step, and guess what follows its tokens, as a model's own heads would."""
        result = self._run(plan)
        self.counts["guesses"] += sum(chunk.num_drafts for chunk in plan.chunks)
        drafter, drafts = DRAFTERS.get(self.drafter), {}
        if drafter is not None:
            for place, (chunk, tokens) in enumerate(zip(plan.chunks, result.tokens, strict=True)):
                if len(tokens) == 1:
                    spec = chunk.samples[0]
                    answer = self.known.get(spec.sequence, ())
                    drafts[place] = drafter(answer, spec.index + len(tokens[0]), self._drawn)
        return replace(result, drafts=drafts, elapsed_s=0.01 + 0.0001 * plan.num_tokens)  # rows cost little

    def commit(self, plan: StepPlan, result: StepResult) -> None:
        self.counts["steps"] += 1
        for outcome in self.scheduler.commit(plan, result):
            number = outcome.sequence.order
            if isinstance(outcome, Sampled):
                self.answers.setdefault((number, outcome.index), []).extend(outcome.tokens)
                if outcome.finish is not None:
                    self.ends[number, outcome.index] = outcome.finish
            elif isinstance(outcome, Broken):
                self.broken[number] = outcome
                self.scheduler.remove(outcome.sequence)


@pytest.fixture(scope="module")
def model() -> Model:
    return small_model(small_config(VOCAB, eos_token_id=END))


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
        bench.add(number, asked, settings, Listed(SENTENCES, VOCAB) if has_grammar else None)
    return bench


def ids(answers: Answers) -> dict[Name, list[int]]:
    return {name: [token.token_id for token in answer] for name, answer in answers.items()}


def assert_same_scores(some: Answers, others: Answers) -> None:
    for name, answer in some.items():
        for one, other in zip(answer, others[name], strict=True):
            assert (one.logprobs is None) == (other.logprobs is None)
            if one.logprobs is not None and other.logprobs is not None:
                assert one.logprobs.chosen == pytest.approx(other.logprobs.chosen, abs=1e-5)
                assert [token for token, _ in one.logprobs.top] == [token for token, _ in other.logprobs.top]


@pytest.mark.parametrize(
    ("drafter", "num_pages"),  # with 14, sequences preempt each other
    [
        *(pytest.param(drafter, 300, marks=() if drafter in ALWAYS else pytest.mark.long) for drafter in DRAFTERS),
        *(pytest.param(drafter, 14, marks=() if drafter in ALWAYS else pytest.mark.long) for drafter in DRAFTERS),
    ],
)
def test_answers_are_those_without_guesses_in_tokens_ends_and_scores(
    model: Model, drafter: str, num_pages: int
) -> None:
    plain = add_requests(Bench(model)).run()
    bench = add_requests(Bench(model, num_pages, drafter, ids(plain.answers))).run()
    assert ids(bench.answers) == ids(plain.answers)
    assert bench.ends == plain.ends
    assert bench.broken.keys() == plain.broken.keys() == set()
    assert_same_scores(bench.answers, plain.answers)
    assert bench.counts["guesses"] > 0
    if num_pages == 300:
        assert set(bench.scheduler.cache.spans) == set(plain.scheduler.cache.spans), "answers are found again"
    assert bool(bench.scheduler.num_preemptions) == (num_pages == 14)


def test_right_guesses_save_most_steps_and_lies_cost_none(model: Model) -> None:
    plain = add_requests(Bench(model)).run()
    steps = {
        drafter: add_requests(Bench(model, drafter=drafter, known=ids(plain.answers))).run().counts["steps"]
        for drafter in ("right", "liar")
    }
    assert steps["right"] < plain.counts["steps"] / 3
    assert steps["liar"] <= plain.counts["steps"]


def test_prompts_get_their_part_of_a_step_before_guesses(model: Model) -> None:
    planned = []
    for drafter in ("", "right"):
        bench = Bench(model, drafter=drafter, known={})
        bench.scheduler.limits = replace(bench.scheduler.limits, max_num_batched_tokens=12)
        bench.scheduler.step_tokens = bench.scheduler.step_tokens_beside = 12
        greedy = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
        bench.add(0, REPEATED[:8], greedy)
        plan = bench.scheduler.plan()
        assert plan is not None
        bench.commit(plan, bench.compute(plan))
        (sequence,) = bench.scheduler.running
        sequence.drafts = (7,) * MOST if drafter else ()
        bench.add(1, list(range(20, 40)), greedy)
        if drafter:
            assert bench.scheduler.speculation.counts([sequence])
        plan = bench.scheduler.plan()
        assert plan is not None
        planned.append([len(chunk.token_ids) for chunk in plan.chunks])
    assert planned == [[1, 11], [1, 11]]


def test_a_chunk_that_fails_by_its_guesses_alone_is_computed_without_them(model: Model) -> None:
    plain = Bench(model)
    plain.add(0, REPEATED, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    known = ids(plain.run().answers)
    bench = Bench(model, drafter="right", known=known, breaks_guesses=True)
    bench.add(0, REPEATED, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    assert ids(bench.run().answers) == known
    assert bench.counts["guesses"] > 0
    assert not bench.broken


def test_what_nobody_guesses_for_is_still_planned_ahead(model: Model) -> None:
    bench = Bench(model, drafter="right")  # and knows no answer
    bench.add(0, list(range(20, 80)), SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    bench.run()
    assert bench.counts["guesses"] == 0
    assert bench.counts["ahead"] == 3


@pytest.mark.parametrize(
    "family",
    [
        "gemma2",
        *[pytest.param(family, marks=pytest.mark.long) for family in ("gpt-oss", "mixtral", "cohere2", "deepseek-v3")],
    ],
)
def test_windows_sinks_experts_and_latents_are_served_with_guesses(tmp_path: Path, family: str) -> None:
    checkpoint = open_directory(write_model(family, tmp_path))
    loaded = load_model(checkpoint.config, checkpoint.weights(), torch.float32)
    asked = [[*zoo_prompt(length), *zoo_prompt(9)] for length in (150, 30)]
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    plain, known = Bench(loaded, 200), dict[Name, list[int]]()
    for drafter in ("", "mostly_right", "ngram"):
        bench = Bench(loaded, 200, drafter, known)
        for number, each in enumerate(asked):
            bench.add(number, each, params)
        bench.run()
        if not drafter:
            plain, known = bench, ids(bench.answers)
        assert ids(bench.answers) == known
        if drafter == "mostly_right":
            assert bench.counts["steps"] < plain.counts["steps"] / 1.5
