import subprocess
import sys

import pytest

from pdserve.errors import ConfigError
from pdserve.model.config import LinearRope, Llama3Rope, ModelConfig, YarnRope

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "eos_token_id": [3, 4],
    "bos_token_id": 1,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read(**changes: object) -> ModelConfig:
    return ModelConfig.from_hf(LLAMA | changes)


def test_a_plain_llama_has_neither_biases_nor_norms_nor_a_window() -> None:
    config = read()
    assert config.head_dim == 16
    assert config.eos_token_ids == (3, 4)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm) == (False, False, False, False)
    assert config.sliding_window is None
    assert config.rope_scaling is None


def test_rope_reads_the_same_from_transformers_4_and_5() -> None:
    old = read(rope_theta=5e5, rope_scaling={"type": "llama3", **LLAMA3})
    new = read(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3})
    assert old == new
    assert (old.rope_theta, old.rope_scaling) == (5e5, Llama3Rope(8.0, 1.0, 4.0, 8192))


def test_linear_and_yarn_scalings_are_read() -> None:
    assert read(rope_scaling={"rope_type": "linear", "factor": 2}).rope_scaling == LinearRope(2.0)
    yarn = read(rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512})
    assert yarn.rope_scaling == YarnRope(4.0, 512, 32.0, 1.0, None, True)


def test_qwen2_has_biases_on_qkv_alone_and_qwen3_norms_each_head() -> None:
    qwen2 = read(architectures=["Qwen2ForCausalLM"])
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.qk_norm) == (True, False, False)
    qwen3 = read(architectures=["Qwen3ForCausalLM"], head_dim=32)
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 32)


def test_only_mistral_has_a_window_unless_asked() -> None:
    mistral = {"architectures": ["MistralForCausalLM"]}
    assert read(**mistral).sliding_window == 4096
    assert read(**mistral, sliding_window=None).sliding_window is None
    assert read(**mistral, sliding_window=96).sliding_window == 96
    assert read(sliding_window=96).sliding_window is None


def test_qwen_windows_count_only_when_used_in_every_layer() -> None:
    qwen = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 96}
    assert read(**qwen).sliding_window is None
    assert read(**qwen, use_sliding_window=True, max_window_layers=0).sliding_window == 96
    assert read(**qwen, use_sliding_window=True, max_window_layers=2).sliding_window is None
    with pytest.raises(ConfigError, match="layer_types"):
        read(**qwen, use_sliding_window=True, layer_types=["full_attention", "sliding_attention"])


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures"),
        ({"architectures": None}, "architectures"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"vocab_size": None}, "vocab_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, "num_attention_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, r"rope_scaling\.rope_type"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, r"rope_parameters\.low_freq_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(changes: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read(**changes)


def test_reading_a_config_does_not_import_torch() -> None:
    code = "import sys, pdserve.model.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
