"""In float32 a model computes what transformers computes, however its tokens are batched and chunked."""

import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from greedy_runs import greedy_texts, spec
from loaded_models import loaded_model
from long_cases import long
from model_zoo import FAMILIES, VOCAB, first_disagreement, load_oracle, write_model
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from whole_attention import torch_attention

from pdserve.base.ids import Attempt, RequestId
from pdserve.engine import sampler
from pdserve.engine.kvcache import KvCache
from pdserve.engine.runner import Runner
from pdserve.engine.scheduler import Limits, Scheduler
from pdserve.engine.sequence import Job, Scored, Sequence
from pdserve.engine.step import Chunk, StepPlan
from pdserve.model.family import Model
from pdserve.protocol.paging import Paging
from pdserve.protocol.prefix_hash import PrefixHasher
from pdserve.protocol.sampling import SamplingParams, TokenLogprobs

pytestmark = pytest.mark.slow

PAGE_SIZE = 16
NUM_PAGES = 200
NUM_TOKENS = 64


@dataclass(frozen=True)
class Pair:
    oracle: PreTrainedModel
    model: Model


def write_smollm2_shape(folder: Path) -> None:
    """Write a random model with SmolLM2's odd head counts and its shared embedding."""
    torch.manual_seed(3)
    sizes = {"hidden_size": 72, "intermediate_size": 192, "num_hidden_layers": 4, "vocab_size": VOCAB}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True, "rope_theta": 100000.0}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads, initializer_range=0.1)).save_pretrained(folder)


@pytest.fixture(scope="module", params=[*FAMILIES, "smollm2"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "smollm2":
        write_smollm2_shape(folder)
    else:
        write_model(request.param, folder)
    return Pair(load_oracle(folder), loaded_model(folder))


def prompts_of(*lengths: int) -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(2, VOCAB) for _ in range(length)] for length in lengths]


@torch.inference_mode()
def test_logits_of_every_position_are_those_of_transformers(pair: Pair) -> None:
    prompt = prompts_of(150)[0]
    kv = Runner(pair.model, 10, PAGE_SIZE).kv
    plan = StepPlan((Chunk(prompt, 0, tuple(range(10)), (spec(),)),))
    attention = torch_attention(pair.model, kv, plan)
    ours = pair.model.forward(torch.tensor(prompt), attention, None)
    torch.testing.assert_close(ours, pair.oracle(torch.tensor([prompt])).logits[0], atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("chunk_tokens", [*long(*(PAGE_SIZE + more for more in (-1, 0))), PAGE_SIZE + 1, 10**6])
def test_a_ragged_batch_draws_the_greedy_tokens_of_transformers(pair: Pair, chunk_tokens: int) -> None:
    prompts = prompts_of(1, PAGE_SIZE - 1, PAGE_SIZE, PAGE_SIZE + 1, 3 * PAGE_SIZE, 140, 140, 300)
    answers = greedy_texts(Runner(pair.model, NUM_PAGES, PAGE_SIZE), prompts, NUM_TOKENS, chunk_tokens)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer) == NUM_TOKENS
        assert first_disagreement(pair.oracle, prompt, answer) is None


def test_the_random_models_say_more_than_one_thing(pair: Pair) -> None:
    (answer,) = greedy_texts(Runner(pair.model, NUM_PAGES, PAGE_SIZE), prompts_of(20), NUM_TOKENS)
    assert len(set(answer)) > 2


@torch.inference_mode()
@pytest.mark.parametrize("chunk_tokens", [PAGE_SIZE + 1, 10**6])
def test_prompts_are_scored_as_by_transformers_whatever_is_cached(
    pair: Pair, chunk_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "SLICE_BYTES", 4 * VOCAB * 7)  # seven rows a slice
    prompt, other = prompts_of(70, 40)
    limits = Limits(4, chunk_tokens, 200, frozenset())
    scheduler = Scheduler(KvCache(NUM_PAGES, Paging.of(PAGE_SIZE), PrefixHasher(b"secret", "model")), limits)
    runner, scores = Runner(pair.model, NUM_PAGES, PAGE_SIZE), dict[int, list[TokenLogprobs]]()
    for number, tokens in enumerate((prompt, other, prompt)):
        job = Job(RequestId(bytes([number] * 16)), Attempt(0), tokens, len(tokens), SamplingParams(max_tokens=2), (0,))
        scheduler.add(Sequence(job, (0,), list(tokens), number, prompt_logprobs=None if number == 1 else 3))
        while (plan := scheduler.plan()) is not None:
            for outcome in scheduler.commit(plan, runner.run(plan)):
                if isinstance(outcome, Scored):
                    assert outcome.position == 1 + len(scores.setdefault(number, []))
                    scores[number] += outcome.logprobs.entries()
    expected = pair.oracle(torch.tensor([prompt])).logits[0].log_softmax(-1)
    assert scores.keys() == {0, 2}
    for scored in scores.values():
        chosen = torch.tensor([each.chosen for each in scored])
        torch.testing.assert_close(chosen, expected[range(69), prompt[1:]], atol=1e-3, rtol=0)
        best = expected[:-1].topk(3)
        assert [[token for token, _ in each.top] for each in scored] == best.indices.tolist()
        values = torch.tensor([[value for _, value in each.top] for each in scored])
        torch.testing.assert_close(values, best.values, atol=1e-3, rtol=0)
