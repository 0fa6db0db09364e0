"""Vectors of prompts are the same however a prompt is cut into chunks, preempted, or begins as a cached one does."""

import random
from collections.abc import Sequence as Seq

import numpy as np
import pytest
import torch
from scheduled import sequence_of
from small_models import small_config, small_model
from whole_attention import torch_attention

from pdserve.base.ids import PageId
from pdserve.engine.kvcache import KvCache
from pdserve.engine.runner import Runner
from pdserve.engine.scheduler import Limits, Scheduler
from pdserve.engine.sequence import Broken, Pooled, Sequence
from pdserve.engine.step import Chunk, StepPlan, StepResult
from pdserve.executor.failing import Isolating
from pdserve.model.decoder import Decoder
from pdserve.model.family import Model
from pdserve.model.ops import Dense
from pdserve.protocol.paging import Paging
from pdserve.protocol.pooling import Pooling
from pdserve.protocol.prefix_hash import PrefixHasher
from pdserve.protocol.sampling import SamplingParams

VOCAB, PAGE_SIZE = 300, 8
KINDS = (Pooling("last"), Pooling("mean"), Pooling("last", normalizes=True), Pooling("logits", (7, 5, 200)))


@pytest.fixture(scope="module")
def model() -> Model:
    return small_model(small_config(VOCAB))


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(f"{length} {seed}")
    return [rng.randrange(VOCAB) for _ in range(length)]


class Bench:
    """A scheduler over a runner."""

    def __init__(self, model: Model, step_tokens: int = 64, num_pages: int = 60) -> None:
        self.runner = Runner(model, num_pages, PAGE_SIZE)
        hasher = PrefixHasher(b"secret", "model", PAGE_SIZE)
        limits = Limits(8, step_tokens, 512, frozenset())
        self.scheduler = Scheduler(KvCache(num_pages, Paging.of(PAGE_SIZE), hasher), limits)
        self._steps = Isolating(self.runner.run)
        self._num = 0

    def add(self, tokens: Seq[int], pooling: Pooling | None, priority: int = 0) -> Sequence:
        self._num += 1
        params = SamplingParams(max_tokens=1 if pooling else 20, temperature=0.0, ignore_eos=True, pooling=pooling)
        self.scheduler.add(sequence := sequence_of(self._num, tokens, params, priority=priority))
        return sequence

    def step(self) -> dict[Sequence, np.ndarray] | None:
        plan = self.scheduler.plan()
        if plan is None:
            return None
        found = {}
        for outcome in self.scheduler.commit(plan, self._steps.run(plan)):
            if isinstance(outcome, Pooled):
                found[outcome.sequence] = np.frombuffer(outcome.vector, "<f4")
                self.scheduler.remove(outcome.sequence)
        return found

    def run(self) -> dict[Sequence, np.ndarray]:
        found: dict[Sequence, np.ndarray] = {}
        while (more := self.step()) is not None:
            found |= more
        assert self.scheduler.cache.pool.num_free == self.scheduler.cache.pool.num_pages
        return found


def whole(model: Model, tokens: Seq[int], pooling: Pooling) -> torch.Tensor:
    """Return the vector by one pass over the whole prompt."""
    kv = torch.zeros(Runner(model, 70, PAGE_SIZE).kv.shape)
    plan = StepPlan((Chunk(tokens, 0, [PageId(page) for page in range(-(-len(tokens) // PAGE_SIZE))], ()),))
    hidden = model.hidden(torch.tensor(tokens), torch_attention(model, kv, plan), None)
    match pooling.kind:
        case "last":
            vector = model.normed(hidden)[-1]
        case "mean":
            vector = model.normed(hidden).mean(0)
        case "logits":
            vector = model.logits(hidden[-1:])[0, list(pooling.token_ids)]
    return vector / vector.norm() if pooling.normalizes else vector


def assert_same(vector: np.ndarray, model: Model, tokens: Seq[int], pooling: Pooling) -> None:
    assert np.allclose(vector, whole(model, tokens, pooling).numpy(), atol=2e-5), (len(tokens), pooling)


@pytest.mark.parametrize("step_tokens", [5, 16, 400])
def test_chunks_do_not_change_a_vector(model: Model, step_tokens: int) -> None:
    bench = Bench(model, step_tokens)
    asked = {bench.add(prompt(length), kind): kind for length in (1, 2, 8, 9, 40, 101) for kind in KINDS}
    vectors = bench.run()
    assert vectors.keys() == asked.keys()
    for sequence, kind in asked.items():
        assert_same(vectors[sequence], model, sequence.tokens, kind)


def test_cached_prefixes_serve_the_last_token_and_never_a_mean(model: Model) -> None:
    bench, long = Bench(model), prompt(100)
    bench.add(long, Pooling("mean"))
    bench.run()
    for kind in KINDS:
        sequence = bench.add([*long, 7], kind)
        (vector,) = bench.run().values()
        assert sequence.num_cached_tokens == (0 if kind.reads_all else 96)
        assert_same(vector, model, sequence.tokens, kind)


def test_a_preempted_prompt_begins_its_mean_anew(model: Model) -> None:
    bench = Bench(model, step_tokens=16, num_pages=12)
    sequence = bench.add(prompt(60), Pooling("mean"))
    bench.step()
    assert sequence.pooled
    bench.scheduler._preempt(sequence)
    assert not sequence.pooled
    bench.add(prompt(30, 1), None, priority=1)
    vectors = bench.run()
    assert_same(vectors[sequence], model, sequence.tokens, Pooling("mean"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_vector_that_is_not_finite_ends_its_own_prompt(kind: Pooling) -> None:
    model, bad = small_model(small_config(VOCAB)), 7
    assert isinstance(model, Decoder)
    assert isinstance(model.embedding, Dense)
    model.embedding.data[bad] = float("nan")
    bench = Bench(model)
    good, broken = bench.add([3, 4, 5], Pooling("mean")), bench.add([3, bad, 5], kind)
    plan = bench.scheduler.plan()
    assert plan is not None
    outcomes = bench.scheduler.commit(plan, bench._steps.run(plan))
    (first,) = (each for each in outcomes if isinstance(each, Pooled))
    (second,) = (each for each in outcomes if isinstance(each, Broken))
    assert first.sequence is good
    assert_same(np.frombuffer(first.vector, "<f4"), model, good.tokens, Pooling("mean"))
    assert (second.sequence, second.reason) == (broken, "ArithmeticError: a prompt's vector is not finite")


def test_vectors_and_answers_come_from_one_step(model: Model) -> None:
    bench = Bench(model, step_tokens=64)
    answered = bench.add(prompt(20, 3), None)
    alone = Bench(model, step_tokens=64)
    alone_answered = alone.add(prompt(20, 3), None)
    alone.run()
    asked = {bench.add(prompt(number + 9, 4), kind): kind for number, kind in enumerate(KINDS)}
    vectors = bench.run()
    assert answered.tokens == alone_answered.tokens
    for sequence, kind in asked.items():
        assert_same(vectors[sequence], model, sequence.tokens, kind)


def test_a_step_that_fails_in_parts_keeps_the_vectors_of_the_others(model: Model) -> None:
    bench = Bench(model, step_tokens=200)
    compute = bench.runner.run

    def run(plan: StepPlan) -> StepResult:
        if any(len(chunk.token_ids) == 13 for chunk in plan.chunks):
            raise ArithmeticError
        return compute(plan)

    bench._steps = Isolating(run)
    bench.add(prompt(13), Pooling("last"))
    asked = {bench.add(prompt(20 + number), kind): kind for number, kind in enumerate(KINDS)}
    vectors = bench.step() or {}
    assert vectors.keys() == asked.keys()
    for sequence, kind in asked.items():
        assert_same(vectors[sequence], model, sequence.tokens, kind)


@torch.inference_mode()
def test_vectors_of_bfloat16_are_close(model: Model) -> None:
    rounded = small_model(small_config(VOCAB), torch.bfloat16)
    bench = Bench(rounded, step_tokens=16)
    asked = {bench.add(prompt(50), kind): kind for kind in KINDS[:2]}
    for sequence, vector in bench.run().items():
        exact = whole(model, sequence.tokens, asked[sequence]).numpy()
        assert vector @ exact / np.linalg.norm(vector) / np.linalg.norm(exact) > 0.99
