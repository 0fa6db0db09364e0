"""The one engine that answers are compared with knows which of them hang on how sums are rounded."""

import torch

from pdserve.engine.alone import LoneEngine
from pdserve.model.config import ModelConfig
from pdserve.model.loading import dummy_weights, load_model
from pdserve.sampling import SamplingParams

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


def engine(head: float) -> LoneEngine:
    """Return an engine whose logits are multiplied."""
    weights = ((name, w * (head if name == "lm_head.weight" else 4)) for name, w in dummy_weights(CONFIG))
    return LoneEngine(load_model(CONFIG, weights, torch.float32), (), 32)


def test_an_answer_is_tied_where_other_tokens_are_as_likely() -> None:
    assert not engine(4.0).is_tied((1, 2, 3), GREEDY)
    assert engine(0.0).is_tied((1, 2, 3), GREEDY)
    assert not engine(0.0).is_tied((1, 2, 3), SamplingParams(max_tokens=4, ignore_eos=True)), "noise decides"


def test_looking_for_ties_changes_no_answer() -> None:
    lone = engine(4.0)
    before = lone.answer((1, 2, 3), GREEDY)
    lone.is_tied((1, 2, 3), GREEDY)
    assert lone.answer((1, 2, 3), GREEDY) == before
    assert len(before[0]) == 4
