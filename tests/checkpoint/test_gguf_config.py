"""GGUF metadata as a Hugging Face config."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pdserve.base.errors import ConfigError
from pdserve.checkpoint.gguf_config import hf_config
from pdserve.checkpoint.gguf_file import GgufFile, GgufTensor
from pdserve.checkpoint.open import open_checkpoint
from pdserve.model.config import ModelConfig
from pdserve.model.rope_config import LinearRope, Llama3Rope, RopeConfig, YarnRope

WriteGguf = Callable[[str, Mapping[str, object], Mapping[str, object]], Path]
Embedding = Mapping[str, object]

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}


def read(architecture: str, model: Mapping[str, object], *names: str) -> ModelConfig:
    metadata = {"general.architecture": architecture} | {f"{architecture}.{k}": v for k, v in model.items()}
    tensors = [GgufTensor(name, (100, 32), 0, 0) for name in ("token_embd.weight", *names)]
    return ModelConfig.from_hf(hf_config(GgufFile(Path("x.gguf"), metadata, tuple(tensors))))


def rope_of(config: ModelConfig) -> RopeConfig:
    return config.design.layers[0].attention.rope


@pytest.mark.parametrize(
    ("architecture", "name", "qkv_bias", "qk_norm"),
    [
        ("llama", "LlamaForCausalLM", False, False),
        ("qwen2", "Qwen2ForCausalLM", True, False),
        ("qwen3", "Qwen3ForCausalLM", False, True),
    ],
)
def test_each_architecture_is_named_as_on_hugging_face(
    tiny_model: dict[str, object], architecture: str, name: str, qkv_bias: bool, qk_norm: bool
) -> None:
    config = read(architecture, tiny_model)
    assert config.architecture == name
    attention = config.design.layers[0].attention
    assert (attention.qkv_bias, attention.qk_norm is not None) == (qkv_bias, qk_norm)
    assert (config.vocab_size, config.head_dim, config.num_kv_heads) == (100, 8, 2)


def test_a_head_may_be_wider_than_its_share_of_the_hidden_size(tiny_model: dict[str, object]) -> None:
    wide = {"attention.key_length": 16, "attention.value_length": 16}
    assert read("qwen3", tiny_model | wide).head_dim == 16


def test_embeddings_are_tied_where_there_is_no_output_tensor(tiny_model: dict[str, object]) -> None:
    assert read("llama", tiny_model).tie_word_embeddings
    assert not read("llama", tiny_model, "output.weight").tie_word_embeddings


def test_a_sliding_window_makes_a_llama_a_mistral(tiny_model: dict[str, object]) -> None:
    config = read("llama", tiny_model | {"attention.sliding_window": 16})
    assert config.architecture == "MistralForCausalLM"
    assert {layer.attention.scores.window for layer in config.design.layers} == {16}


def test_rope_scaling_is_carried_over(tiny_model: dict[str, object]) -> None:
    linear = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    assert rope_of(read("llama", tiny_model | linear)).scaling == LinearRope(4.0)
    yarn = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 32768,
    }
    scaling = rope_of(read("qwen2", tiny_model | yarn)).scaling
    assert isinstance(scaling, YarnRope)
    assert (scaling.factor, scaling.original_max_position_embeddings) == (4.0, 32768)


def rope_factors(head_dim: int) -> np.ndarray:
    """Return what llama.cpp's converter keeps of Llama 3.2's rope: each frequency without scaling over with it."""
    config = LlamaConfig(hidden_size=32, num_attention_heads=32 // head_dim, head_dim=head_dim, rope_parameters=LLAMA3)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 500000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    return (plain / scaled.double()).float().numpy()


def test_llama3_rope_is_recognized_by_its_factors(
    write_gguf: WriteGguf, tiny_model: dict[str, object], tokenizer_keys: dict[str, object], embedding: Embedding
) -> None:
    model = {f"llama.{k}": v for k, v in (tiny_model | {"rope.freq_base": 500000.0}).items()} | tokenizer_keys
    factors = rope_factors(head_dim=8)
    config = open_checkpoint(write_gguf("llama", model, {**embedding, "rope_freqs.weight": factors})).config
    scaling = rope_of(config).scaling
    assert isinstance(scaling, Llama3Rope)
    assert math.isclose(scaling.factor, 32.0, rel_tol=1e-6)
    assert scaling.original_max_position_embeddings == 8192
    factors[1] *= 1.5
    with pytest.raises(ConfigError, match=r"tiny\.gguf: rope_freqs\.weight: is not supported"):
        open_checkpoint(write_gguf("llama", model, {**embedding, "rope_freqs.weight": factors}))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"expert_count": 8}, r"llama\.expert_used_count: missing"),
        ({"attention.clamp_kqv": 8.0}, r"llama\.attention\.clamp_kqv: 8"),
        ({"attention.value_length": 4}, r"llama\.attention\.value_length: 4"),
        ({"rope.dimension_count": 4}, None),
        ({"rope.dimension_count": 4, "attention.key_length": 8}, r"llama\.rope\.dimension_count: 4"),
        ({"rope.scaling.type": "longrope"}, r"llama\.rope\.scaling\.type: 'longrope'"),
        ({"rope.scaling.type": "linear"}, r"llama\.rope\.scaling\.factor: missing"),
        ({"attention.head_count": [4, 2]}, r"llama\.attention\.head_count: \[4, 2\]"),
        ({"attention.causal": False}, r"llama\.attention\.causal: False"),
    ],
)
def test_what_a_config_cannot_say_is_refused_by_key(
    tiny_model: dict[str, object], changes: dict[str, object], complaint: str | None
) -> None:
    if complaint is None:
        assert read("llama", tiny_model | changes).head_dim == 4
        return
    with pytest.raises(ConfigError, match=complaint):
        read("llama", tiny_model | changes)


@pytest.mark.parametrize("key", ["block_count", "embedding_length", "context_length", "attention.head_count"])
def test_a_missing_figure_is_named(tiny_model: dict[str, object], key: str) -> None:
    del tiny_model[key]
    with pytest.raises(ConfigError, match=rf"llama\.{key}: missing"):
        read("llama", tiny_model)


def test_other_architectures_and_split_files_are_refused(tiny_model: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"general\.architecture: 'mamba' is not supported"):
        read("mamba", tiny_model)
    metadata = {"general.architecture": "llama", "split.count": 3}
    with pytest.raises(ConfigError, match=r"split\.count: 3"):
        hf_config(GgufFile(Path("x.gguf"), metadata, ()))
