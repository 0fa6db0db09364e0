"""The engine over the kernels computes what the engine in plain torch computes."""

import math
import random

import pytest
import torch
from greedy_runs import greedy_texts, spec
from held_weights import scaled
from launch_grids import Grids
from long_cases import long, long_but
from small_shapes import MISTRAL, QWEN_3, SMALL
from torch import Tensor
from whole_attention import torch_attention
from whole_triton import triton_attention

from pdserve.base.errors import InvariantError
from pdserve.base.ids import PageId
from pdserve.engine.attention_triton import graph_sizes
from pdserve.engine.batch import Batch, PoolShape
from pdserve.engine.runner import Runner
from pdserve.engine.runner_cuda import CudaRunner
from pdserve.engine.scheduler import Limits
from pdserve.engine.step import Chunk, Phase, StepPlan
from pdserve.engine.warm_up_steps import prompt_steps
from pdserve.kernels.device import attention as device_attention
from pdserve.model.config import ModelConfig
from pdserve.model.family import Model
from pdserve.model.loading import dummy_weights, load_model
from pdserve.protocol.sampling import SamplingParams

PAGE_SIZE = 16
NUM_PAGES = 60
VOCAB = 300
LIMITS = Limits(max_num_seqs=6, max_num_batched_tokens=256, max_model_len=256, eos_token_ids=frozenset({5}))
LOGPROBS = SamplingParams(temperature=0.9, top_p=0.8, logprobs=2)
SHAPE = {**SMALL, "vocab_size": VOCAB}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
NINE_HEADS = {"num_attention_heads": 9, "num_key_value_heads": 3}
FAMILIES: dict[str, dict[str, object]] = {
    "qwen3": QWEN_3,
    "llama3": {"architectures": ["LlamaForCausalLM"], **NINE_HEADS, "rope_scaling": LLAMA3_ROPE},
    "mistral": MISTRAL,
}
SMALLEST = "one layer"  # for what does not depend on the model
MODELS = {**FAMILIES, SMALLEST: {**FAMILIES["qwen3"], "num_hidden_layers": 1}}


IN_EACH_RUN = "llama3"


@pytest.fixture(scope="module", params=long_but((IN_EACH_RUN,), FAMILIES))
def model(request: pytest.FixtureRequest) -> Model:
    return load(request.param)


def load(family: str) -> Model:
    """Build a random model whose greedy text does not settle on one token."""
    config = ModelConfig.from_hf({**SHAPE, **MODELS[family]})
    weights = scaled(dummy_weights(config))
    return load_model(config, weights, torch.float32)


def tokens_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def pages_of(first: int, num_tokens: int) -> tuple[PageId, ...]:
    return tuple(PageId(first + i) for i in range(-(-num_tokens // PAGE_SIZE)))


# Contexts of 40, 17, 1 and 33 tokens are in pages before the step that is compared.
CONTEXTS = (40, 17, 1, 33)
FILLING = StepPlan(tuple(Chunk(tokens_of(n, seed), 0, pages_of(5 * seed, n), ()) for seed, n in enumerate(CONTEXTS)))


def after(seed: int, count: int) -> Chunk:
    """Continue context `seed` by `count` tokens."""
    start = CONTEXTS[seed]
    return Chunk(tokens_of(count, 10 + seed), start, pages_of(5 * seed, start + count), (spec(),))


STEPS = {
    "one token each": (after(0, 1), after(1, 1), after(2, 1), after(3, 1)),
    "tokens and chunks": (after(0, 1), after(1, 20), after(2, 1), after(3, 1)),
    "chunks alone": (after(0, 17), after(2, 30)),
    "few tokens beside many singles": (after(0, 1), after(1, 2), after(2, 1), after(3, 1)),
}


ALWAYS = ("one token each", "tokens and chunks")


def logits_with_torch(model: Model, kv: Tensor, plan: StepPlan) -> Tensor:
    attention, batch = torch_attention(model, kv, plan), Batch.of(plan, PoolShape(NUM_PAGES, PAGE_SIZE, VOCAB))
    return model.forward(torch.from_numpy(batch.token_ids), attention, None)


def logits_with_triton(model: Model, kv: Tensor, plan: StepPlan, room: int) -> Tensor:
    """Return the logits of the plan's tokens, computed with `room` tokens of padding behind them."""
    sizes = graph_sizes(LIMITS.max_num_seqs)
    token_ids, attention = triton_attention(model, kv, plan, (LIMITS.max_model_len, sizes), room)
    return model.forward(token_ids, attention, None)[: plan.num_tokens]


@pytest.mark.parametrize(
    "chunks",
    [pytest.param(chunks, id=name, marks=() if name in ALWAYS else pytest.mark.long) for name, chunks in STEPS.items()],
)
@pytest.mark.parametrize("left_behind", [*long(0.0), math.nan, *long(math.inf)])
@torch.inference_mode()
def test_a_ragged_step_gives_the_logits_and_pages_of_plain_torch(
    model: Model, chunks: tuple[Chunk, ...], left_behind: float
) -> None:
    torch_runner = Runner(model, NUM_PAGES, PAGE_SIZE)
    torch_runner.kv.fill_(left_behind)
    torch_runner.run(FILLING)
    kv = torch_runner.kv.clone()
    expected = logits_with_torch(model, torch_runner.kv, StepPlan(chunks))
    ours = logits_with_triton(model, kv, StepPlan(chunks), room=0)
    assert expected.isfinite().all()
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(kv, torch_runner.kv, atol=1e-4, rtol=1e-4, equal_nan=True)


@torch.inference_mode()
def test_padding_changes_neither_pages_nor_logits(model: Model) -> None:
    torch_runner = Runner(model, NUM_PAGES, PAGE_SIZE)
    torch_runner.run(FILLING)
    plan = StepPlan((after(0, 1), after(1, 1), after(2, 1)))
    before, exact, padded = (torch_runner.kv.clone() for _ in range(3))
    expected = logits_with_triton(model, exact, plan, room=0)
    ours = logits_with_triton(model, padded, plan, room=1)
    # Close, not equal: a CPU's matrix product may round otherwise for another number of rows.
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(padded, exact, atol=1e-5, rtol=1e-5)
    is_written = (exact != before).any(dim=-1)
    assert is_written.any()
    assert torch.equal(padded[~is_written], before[~is_written])


def test_greedy_texts_are_those_of_plain_torch(model: Model) -> None:
    prompts = [tokens_of(length) for length in (16, 25)]
    expected = greedy_texts(Runner(model, NUM_PAGES, PAGE_SIZE), prompts, 2, chunk_tokens=20)
    ours = greedy_texts(CudaRunner(model, NUM_PAGES, PAGE_SIZE, LIMITS), prompts, 2, chunk_tokens=20)
    assert ours == expected


@pytest.fixture
def runner(model: Model) -> CudaRunner:
    return CudaRunner(model, NUM_PAGES, PAGE_SIZE, LIMITS)


@pytest.mark.parametrize("model", [SMALLEST], indirect=True)
def test_samples_come_with_their_chunks_whatever_a_step_asks_for(runner: CudaRunner, model: Model) -> None:
    twice = (spec((), LOGPROBS, seed=1), spec((), LOGPROBS, seed=2))
    plan = StepPlan(
        (Chunk([7], 0, (PageId(1),), twice), Chunk([8], 0, (PageId(2),), ()), Chunk([9], 0, (PageId(3),), (spec(),)))
    )
    ours, expected = (each.run(plan).tokens for each in (runner, Runner(model, NUM_PAGES, PAGE_SIZE)))
    assert [[token.token_id for (token,) in drawn] for drawn in ours] == [
        [token.token_id for (token,) in drawn] for drawn in expected
    ]
    assert [len(drawn) for drawn in ours] == [2, 0, 1]
    for (token,), (wanted,) in zip(ours[0], expected[0], strict=True):
        assert token.logprobs is not None
        assert wanted.logprobs is not None
        assert token.logprobs.chosen == pytest.approx(wanted.logprobs.chosen, abs=1e-4)
    assert runner.run(StepPlan((plan.chunks[1],))).tokens == ((),)


@pytest.mark.parametrize("model", [SMALLEST], indirect=True)
def test_what_a_runner_is_not_set_up_for_is_our_own_fault(runner: CudaRunner) -> None:
    too_long = Chunk([1], LIMITS.max_model_len, pages_of(0, LIMITS.max_model_len + 1), ())
    too_many = Chunk(tokens_of(LIMITS.max_model_len), 0, pages_of(0, LIMITS.max_model_len), ())
    for chunks in ((too_long,), (too_many, too_many)):
        with pytest.raises(InvariantError):
            runner.run(StepPlan(chunks))


@pytest.mark.parametrize("model", [SMALLEST], indirect=True)
def test_a_step_may_be_started_while_one_of_other_sequences_runs(runner: CudaRunner, model: Model) -> None:
    plans = [StepPlan((Chunk([7 + i], 0, (PageId(i),), (spec((), LOGPROBS),)),)) for i in range(3)]
    results = []
    for plan in plans[:2]:
        runner.start(plan)
    with pytest.raises(InvariantError, match="2 are in flight"):
        runner.start(plans[2])
    results.append(runner.finish())
    runner.start(plans[2])
    results += [runner.finish(), runner.finish()]
    overlapped = [result.tokens[0][0][0] for result in results]
    alone = CudaRunner(model, NUM_PAGES, PAGE_SIZE, LIMITS)
    assert overlapped == [alone.run(plan).tokens[0][0][0] for plan in plans]
    assert len({token.logprobs for token in overlapped}) == 3


@pytest.mark.parametrize("model", [SMALLEST], indirect=True)
def test_a_step_may_need_tokens_that_are_not_known_yet(runner: CudaRunner, model: Model) -> None:
    sampled = SamplingParams(temperature=1.3, logprobs=1)
    prompts = [tokens_of(length, length) for length in (5, 17, 1)]

    def chunks(drawn: list[int] | None, previous: tuple[int | None, ...]) -> StepPlan:
        places = enumerate(previous)
        return StepPlan(
            tuple(
                Chunk(
                    (0 if drawn is None else drawn[i],),
                    len(prompts[i]),
                    pages_of(4 * i, len(prompts[i]) + 1),
                    (spec((1,), sampled, seed=i),),
                    Phase.DECODE,
                    previous=place,
                )
                for i, place in places
            )
        )

    first = StepPlan(
        tuple(Chunk(p, 0, pages_of(4 * i, len(p)), (spec((), sampled, seed=i),)) for i, p in enumerate(prompts))
    )
    runner.start(first)
    runner.start(chunks(None, (0, 1, 2)))
    drawn, ahead = ([tokens[0][0] for tokens in runner.finish().tokens] for _ in range(2))
    alone = CudaRunner(model, NUM_PAGES, PAGE_SIZE, LIMITS)
    ids = [tokens[0][0].token_id for tokens in alone.run(first).tokens]
    known = [tokens[0][0] for tokens in alone.run(chunks(ids, (None,) * 3)).tokens]
    assert [token.token_id for token in drawn] == ids
    assert len(set(ids)) == 3
    assert ahead == known  # with their log probabilities: those tell which token a context ends in


@pytest.mark.parametrize("model", [SMALLEST], indirect=True)
def test_needing_a_token_of_a_step_that_sampled_nothing_is_our_own_fault(runner: CudaRunner) -> None:
    runner.run(StepPlan((Chunk([7], 0, (PageId(1),), ()),)))
    with pytest.raises(InvariantError, match="sampled nothing"):
        runner.start(StepPlan((Chunk((0,), 1, (PageId(1),), (spec(),), Phase.DECODE, previous=0),)))


@pytest.mark.parametrize("model", [SMALLEST], indirect=True)
def test_steps_that_warm_up_split_keys_fill_the_largest_step_and_keep_to_page_0(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    combines = Grids.of(monkeypatch, device_attention, "combine")
    limits = Limits(max_num_seqs=6, max_num_batched_tokens=20, max_model_len=256, eos_token_ids=frozenset({5}))
    runner = CudaRunner(model, NUM_PAGES, PAGE_SIZE, limits)
    plans = list(prompt_steps(20, 256, PoolShape(1, PAGE_SIZE, VOCAB)))
    for plan in plans:
        runner.run(plan)
    assert combines.seen, "the first long prompt would compile what combines splits"
    assert [plan.num_tokens for plan in plans] == [2, 1, 2, 4, 8, 16, 20]
    assert not runner.kv[1:].any()
    assert [plan.num_tokens for plan in prompt_steps(512, 200, PoolShape(1, PAGE_SIZE, VOCAB))][-1] == 512
