"""Steps launched while the one before is computed sample what the CPU's engine samples one step after another."""

import random
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from listed_answers import Listed
from long_cases import long
from small_models import small_config, small_model

from pdserve.base.ids import Attempt, RequestId
from pdserve.engine.kvcache import KvCache
from pdserve.engine.runner import Runner
from pdserve.engine.runner_cuda import CudaRunner
from pdserve.engine.sampler_triton import KernelSampler
from pdserve.engine.scheduler import Limits, Scheduler
from pdserve.engine.sequence import Job, Sampled, Sequence
from pdserve.engine.step import SampleSpec, StepPlan, StepResult
from pdserve.kernels.staging import Staging
from pdserve.model.family import Model
from pdserve.protocol.paging import Paging
from pdserve.protocol.sampling import SamplingParams

VOCAB, END, PAGE_SIZE = 64, 5, 16
ANSWERS = {(1, 2, 3, END), (1, 2, 60, 61, 62, END), (41, 42, 43, 44, 45, 46, END)}
LIMITS = Limits(max_num_seqs=6, max_num_batched_tokens=64, max_model_len=96, eos_token_ids=frozenset({END}))
SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16}


@pytest.fixture(scope="module")
def model() -> Model:
    return small_model(small_config(VOCAB, num_key_value_heads=1, **SIZES))


@dataclass
class Bench:
    """A scheduler over the kernels' runner, with steps in flight; or over the CPU's, one by one."""

    runner: CudaRunner | Runner
    num_pages: int
    answers: dict[tuple[int, int], list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(KvCache(self.num_pages, Paging.of(PAGE_SIZE), None), LIMITS)
        self.num_ahead = 0

    def add(self, number: int, params: SamplingParams, matcher: Listed | None = None, known: Seq[int] = ()) -> None:
        prompt = [random.Random(number).randrange(VOCAB) for _ in range(3 + 5 * number)]
        indices = tuple(range(params.n))
        new_matcher = None if matcher is None else lambda: matcher
        key = RequestId(number.to_bytes(16)), Attempt(0)
        tokens = [*prompt, *known]
        job = Job(*key, tuple(tokens), len(prompt), params, indices, new_matcher=new_matcher)
        self.scheduler.add(Sequence(job, indices, tokens, order=number))

    def run(self) -> None:
        in_flight = deque[StepPlan]()
        while True:
            depth = self.runner.max_in_flight if isinstance(self.runner, CudaRunner) else 1
            plan = self.scheduler.plan() if len(in_flight) < depth else None
            if plan is not None:
                self.num_ahead += len(in_flight)
                in_flight.append(plan)
                if isinstance(self.runner, CudaRunner):
                    self.runner.start(plan)
            elif in_flight:
                oldest = in_flight.popleft()
                done = self.runner.finish() if isinstance(self.runner, CudaRunner) else self.runner.run(oldest)
                self.commit(oldest, done)
            else:
                return

    def commit(self, plan: StepPlan, result: StepResult) -> None:
        for outcome in self.scheduler.commit(plan, result):
            if isinstance(outcome, Sampled):
                answer = self.answers.setdefault((outcome.sequence.order, outcome.index), [])
                answer.extend(token.token_id for token in outcome.tokens)


def benches(model: Model, num_pages: int = 40) -> tuple[Bench, Bench]:
    ours, plain = CudaRunner(model, num_pages, PAGE_SIZE, LIMITS), Runner(model, num_pages, PAGE_SIZE)
    return Bench(ours, num_pages), Bench(plain, num_pages)


def test_grammars_and_bad_words_draw_the_cpus_tokens_beside_others(model: Model) -> None:
    plain = Bench(Runner(model, 40, PAGE_SIZE), 40)
    greedy = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    plain.add(3, greedy)
    plain.run()
    _, second, third, *_ = plain.answers[3, 0]
    ours, theirs = benches(model)
    for bench in (ours, theirs):
        bench.add(1, SamplingParams(seed=1, max_tokens=12, ignore_eos=True))
        bench.add(2, SamplingParams(seed=2, temperature=2.0, n=2), Listed(ANSWERS, VOCAB))
        bench.add(3, SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, bad_word_ids=((second, third),)))
        bench.run()
    assert ours.answers == theirs.answers
    assert {tuple(ours.answers[2, index]) for index in range(2)} <= ANSWERS
    assert ours.answers[3, 0] != plain.answers[3, 0]
    assert ours.num_ahead > 9


PENALTIES = (
    SamplingParams(temperature=0.0, repetition_penalty=1.4, max_tokens=10, ignore_eos=True),
    SamplingParams(seed=3, presence_penalty=1.5, frequency_penalty=0.5, max_tokens=8, n=2, ignore_eos=True),
    SamplingParams(seed=4, temperature=0.8, top_p=0.9, repetition_penalty=0.8, frequency_penalty=-0.3, max_tokens=8),
)


@pytest.mark.parametrize("num_pages", [*long(40), 5])
def test_penalties_draw_the_cpus_tokens_without_a_step_that_waits(model: Model, num_pages: int) -> None:
    """With 5 pages sequences preempt each other, and what they computed is computed again."""
    ours, theirs = benches(model, num_pages)
    for bench in (ours, theirs):
        for number, params in enumerate(PENALTIES):
            bench.add(number, params)
        bench.add(3, SamplingParams(seed=5, presence_penalty=1.0, n=2), Listed(ANSWERS, VOCAB))
        bench.run()
    assert ours.answers == theirs.answers
    assert (ours.scheduler.num_preemptions > 0) == (num_pages == 5)
    assert ours.num_ahead > 7


def test_a_continuation_goes_on_where_another_worker_has_left_it(model: Model) -> None:
    params = replace(PENALTIES[0], frequency_penalty=0.7)
    whole, rest = (
        Bench(CudaRunner(model, 40, PAGE_SIZE, LIMITS), 40),
        Bench(CudaRunner(model, 40, PAGE_SIZE, LIMITS), 40),
    )
    whole.add(1, params)
    whole.run()
    rest.add(1, params, known=whole.answers[1, 0][:5])
    rest.run()
    assert rest.answers[1, 0] == whole.answers[1, 0][5:]
    assert rest.num_ahead == 4


def test_a_step_that_is_computed_again_counts_its_tokens_once(model: Model) -> None:
    once, twice = (Bench(CudaRunner(model, 40, PAGE_SIZE, LIMITS), 40) for _ in range(2))
    for bench in (once, twice):
        bench.add(0, replace(PENALTIES[0], frequency_penalty=0.7, max_tokens=5))
    once.run()
    runner = twice.runner
    while (plan := twice.scheduler.plan()) is not None:
        runner.run(plan)
        twice.commit(plan, runner.run(plan))
    assert twice.answers == once.answers


def test_what_is_sent_for_a_step_does_not_grow_with_the_prompt(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    send = Staging.send

    def counting(staging: Staging, *arrays: np.ndarray) -> list[torch.Tensor]:
        sent.append(sum(array.size for array in arrays))
        return send(staging, *arrays)

    monkeypatch.setattr(Staging, "send", counting)
    words: dict[int, list[int]] = {}
    for length in (4, 28):
        sampler, words[length] = KernelSampler((END,), VOCAB, 4, torch.device("cpu")), []
        for index in range(5):
            sent.clear()
            known, lacks = [7] * max(0, index - 1), index > 0
            sampler.sample(
                torch.zeros(1, VOCAB),
                [SampleSpec(PENALTIES[1], 1, index, [3] * length, known, False, (1, 0), None, lacks)],
            )
            words[length].append(sum(sent))
    assert words[28][0] - words[4][0] == 24
    assert words[28][1:] == words[4][1:]
    assert len(set(words[4][1:])) == 1, "nor with the answer"
