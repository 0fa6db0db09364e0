"""The one engine that answers are compared with knows which of them hang on how sums are rounded."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from held_weights import scaled
from loaded_models import loaded_model
from model_zoo import first_disagreement, load_oracle, prompt, write_model

from pdserve.engine.offline import LoneEngine
from pdserve.model.config import ModelConfig
from pdserve.model.loading import dummy_weights, load_model
from pdserve.protocol.kvlayout import KvCode
from pdserve.protocol.sampling import SamplingParams

CONFIG = ModelConfig.from_hf(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "tie_word_embeddings": False,
    }
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


def engine(head: float, code: KvCode | None = None) -> LoneEngine:
    """Return an engine whose logits are multiplied."""
    weights = scaled(dummy_weights(CONFIG), lm_head=head)
    return LoneEngine(load_model(CONFIG, weights, torch.float32), (), 32, code)


def test_an_answer_is_tied_where_other_tokens_are_as_likely() -> None:
    assert not engine(4.0).is_tied((1, 2, 3), GREEDY)
    assert engine(0.0).is_tied((1, 2, 3), GREEDY)
    assert not engine(0.0).is_tied((1, 2, 3), SamplingParams(max_tokens=4, ignore_eos=True)), "noise decides"


@pytest.mark.parametrize("code", ["int8", "fp8_e4m3"])
def test_coded_rows_are_tied_where_rows_as_computed_are_not(code: KvCode) -> None:
    assert not engine(40.0, code).is_tied((1, 2, 3), GREEDY)
    assert engine(0.1, code).is_tied((1, 2, 3), GREEDY), "a code may be another one"
    assert not engine(0.1).is_tied((1, 2, 3), GREEDY)


@pytest.mark.parametrize("family", ["gemma2", "lfm2"])
def test_models_with_windows_and_with_states_answer_as_transformers_do(tmp_path: Path, family: str) -> None:
    lone = LoneEngine(loaded_model(write_model(family, tmp_path)), (), 330)
    (answer,) = lone.answer(prompt(310), replace(GREEDY, max_tokens=20)).values()
    assert first_disagreement(load_oracle(tmp_path), prompt(310), list(answer)) is None


def test_looking_for_ties_changes_no_answer() -> None:
    lone = engine(4.0)
    before = lone.answer((1, 2, 3), GREEDY)
    lone.is_tied((1, 2, 3), GREEDY)
    assert lone.answer((1, 2, 3), GREEDY) == before
    assert len(before[0]) == 4


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_bad_word_is_not_completed_and_nothing_before_its_end_changes(length: int) -> None:
    lone, params = engine(4.0), replace(GREEDY, max_tokens=12)
    (plain,) = lone.answer((1, 2, 3), params).values()
    word = plain[5 - length + 1 : 6]
    start = next(place for place in range(12) if plain[place : place + length] == word) + length - 1
    (answer,) = lone.answer((1, 2, 3), replace(params, bad_word_ids=((63, 62), word))).values()
    assert answer[:start] == plain[:start]
    assert answer[start] != plain[start]
    assert word not in [answer[place : place + length] for place in range(12)]


def test_only_allowed_tokens_are_sampled() -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True, allowed_token_ids=(4, 60), seed=5)
    (answer,) = engine(4.0).answer((1, 2, 3), params).values()
    assert {*answer} == {4, 60}
