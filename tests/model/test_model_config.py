import math
import subprocess
import sys
from contextlib import suppress

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pdserve.base.errors import ConfigError
from pdserve.kernels.routing import Routing
from pdserve.model.config import FAMILIES, INERT, INERT_PREFIXES, ModelConfig
from pdserve.model.design import Activation, Experts, GatedMlp, HeadNorms, PlainMlp, RmsNorm, SelfAttention, Sequential
from pdserve.model.rope_config import NO_ROPE, Growth, LinearRope, Llama3Rope, LongRope, RopeConfig, YarnRope
from pdserve.model.state_design import ShortConv, StateSizes, StateSpace

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
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def read(**changes: object) -> ModelConfig:
    return ModelConfig.from_hf(LLAMA | changes)


def layer_of(**changes: object) -> Sequential:
    first, *others = read(**changes).design.layers
    assert isinstance(first, Sequential)
    assert all(other == first for other in others)
    return first


def rope_of(**changes: object) -> RopeConfig:
    return layer_of(**changes).attention.rope


def test_a_plain_llama_has_neither_biases_nor_norms_nor_a_window() -> None:
    config = read()
    assert config.head_dim == 16
    assert config.eos_token_ids == (3, 4)
    assert config.windows == (None,) * config.num_layers
    assert layer_of() == Sequential(SelfAttention(RopeConfig(10000.0)), GatedMlp(128), RmsNorm(1e-5))


def test_rope_reads_the_same_from_transformers_4_and_5() -> None:
    old = rope_of(rope_theta=5e5, rope_scaling={"type": "llama3", **LLAMA3})
    new = rope_of(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3})
    assert old == new
    assert old == RopeConfig(5e5, Llama3Rope(8.0, 1.0, 4.0, 8192))


def test_linear_and_yarn_scalings_are_read() -> None:
    assert rope_of(rope_scaling={"rope_type": "linear", "factor": 2}).scaling == LinearRope(2.0)
    yarn = rope_of(rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512})
    assert yarn.scaling == YarnRope(4.0, 512, 32.0, 1.0, 0.1 * math.log(4.0) + 1.0, True)


def test_yarn_scales_cosines_by_what_is_given_or_by_mscale() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    for stated, factor in (
        ({"attention_factor": 1.5, "mscale": 2.0, "mscale_all_dim": 1.0}, 1.5),
        ({"mscale": 2.0, "mscale_all_dim": 1.0}, (0.2 * math.log(4.0) + 1.0) / (0.1 * math.log(4.0) + 1.0)),
        ({"mscale": 2.0}, 0.1 * math.log(4.0) + 1.0),
    ):
        scaling = rope_of(rope_scaling=yarn | stated).scaling
        assert isinstance(scaling, YarnRope)
        assert math.isclose(scaling.attention_factor, factor)


def test_ropes_that_change_with_the_context_serve_contexts_in_which_they_do_not() -> None:
    plain = read(max_position_embeddings=4096)
    assert read(max_position_embeddings=4096, rope_scaling={"type": "dynamic", "factor": 2.0}) == plain
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 1024}
    config = read(max_position_embeddings=4096, rope_scaling={"type": "longrope", **factors})
    assert config.max_position_embeddings == 1024, "longer contexts turn every key in the pages otherwise"
    scaling = config.design.layers[0].attention.rope.scaling
    assert scaling == LongRope((1.0,) * 8, math.sqrt(1 + math.log(4.0) / math.log(1024)), 1024)


@pytest.mark.parametrize("factors", [[1.0] * 7, None, ["1"] * 8, 1.0])
def test_long_ropes_have_a_factor_for_each_pair_of_features(factors: object) -> None:
    rope = {"type": "longrope", "short_factor": factors, "long_factor": [1.0] * 8}
    with pytest.raises(ConfigError, match="short_factor"):
        read(rope_scaling=rope)


def test_qwen2_has_biases_on_qkv_alone_and_qwen3_norms_each_head() -> None:
    qwen2 = layer_of(architectures=["Qwen2ForCausalLM"]).attention
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.qk_norm) == (True, False, None)
    qwen3 = layer_of(architectures=["Qwen3ForCausalLM"]).attention
    assert (qwen3.qkv_bias, qwen3.qk_norm) == (False, HeadNorms(1e-5))


def test_only_mistral_has_a_window_unless_asked() -> None:
    mistral = {"architectures": ["MistralForCausalLM"]}
    assert read(**mistral).windows[0] == 4096
    assert read(**mistral, sliding_window=None).windows[0] is None
    assert read(**mistral, sliding_window=96).windows[0] == 96
    assert read(sliding_window=96).windows[0] is None


def test_qwen_windows_count_only_when_used() -> None:
    qwen = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 96}
    assert read(**qwen).windows[0] is None
    assert read(**qwen, use_sliding_window=True, max_window_layers=0).windows[0] == 96
    assert read(**qwen, use_sliding_window=True, max_window_layers=1).windows == (None, 96)
    kinds = ["sliding_attention", "full_attention"]
    assert read(**qwen, use_sliding_window=True, layer_types=kinds).windows == (96, None)
    for wrong in (kinds[:1], [*kinds, "full_attention"], ["sliding_attention", "chunked_attention"]):
        with pytest.raises(ConfigError, match=r"layer_types: .*full_attention or sliding_attention for each of 2"):
            read(**qwen, use_sliding_window=True, layer_types=wrong)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures"),
        ({"architectures": None}, "architectures"),
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"vocab_size": None}, "vocab_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, "num_attention_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"rope_scaling": {"rope_type": "mrope", "factor": 2.0}}, r"rope_scaling\.rope_type"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, r"rope_parameters\.low_freq_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "mscale": 1.0}}, r"rope_scaling\.mscale"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "mscales": 1.0}}, r"rope_scaling\.mscales"),
        ({"rope_interleaved": True}, "rope_interleaved"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(changes: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read(**changes)


def test_hunyuans_alpha_slows_the_rope_by_a_constant() -> None:
    scaling = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "mscale": 1.0}
    rope = rope_of(architectures=["HunYuanDenseV1ForCausalLM"], rope_scaling=scaling)
    assert rope == RopeConfig(10000.0 * 1000.0 ** (16 / 14))


def test_a_family_has_defaults_of_its_own() -> None:
    gemma = {"architectures": ["GemmaForCausalLM"], "num_attention_heads": 16, "num_key_value_heads": 16}
    config = read(**gemma, hidden_act="gelu")
    assert (config.head_dim, config.tie_word_embeddings) == (256, True)
    assert config.design.layers[0].mlp == GatedMlp(128, Activation.GELU_TANH)
    assert read(**gemma, head_dim=32, tie_word_embeddings=False).head_dim == 32


OWN_KEYS = {  # keys of the list below that a family knows
    "Cohere2ForCausalLM": {"use_qk_norm"},
    "DeepseekV2ForCausalLM": {"kv_lora_rank", "n_routed_experts"},
    "DeepseekV3ForCausalLM": {"kv_lora_rank", "n_routed_experts"},
    "Gemma2ForCausalLM": {"attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"},
    "Gemma3ForCausalLM": {"query_pre_attn_scalar"},
    "Gemma4ForCausalLM": {"final_logit_softcapping"},
    "Glm4MoeLiteForCausalLM": {"kv_lora_rank", "n_routed_experts"},
    "Glm4MoeForCausalLM": {"n_routed_experts", "use_qk_norm"},
    "FalconH1ForCausalLM": {"embedding_multiplier"},
    "GptOssForCausalLM": {"num_local_experts"},
    "GraniteMoeForCausalLM": {"embedding_multiplier", "residual_multiplier", "logits_scaling", "num_local_experts"},
    "GraniteMoeHybridForCausalLM": {
        "embedding_multiplier",
        "residual_multiplier",
        "logits_scaling",
        "num_local_experts",
    },
    "MiniMaxM2ForCausalLM": {"num_local_experts"},
    "NemotronHForCausalLM": {"n_routed_experts"},
    "MixtralForCausalLM": {"num_local_experts"},
    "Qwen2MoeForCausalLM": {"num_local_experts"},
    "Qwen3MoeForCausalLM": {"num_local_experts"},
    "Qwen3NextForCausalLM": {"num_local_experts"},
    "Qwen3_5MoeForCausalLM": {"num_local_experts"},
    "GraniteForCausalLM": {"embedding_multiplier", "residual_multiplier", "logits_scaling"},
    "Llama4ForCausalLM": {"attention_chunk_size", "no_rope_layers", "num_local_experts", "use_qk_norm"},
    "SmolLM3ForCausalLM": {"no_rope_layers"},
    "HunYuanDenseV1ForCausalLM": {"use_qk_norm"},
}
OWN_VALUES = {  # such as keys of norms in the place of `rms_norm_eps`
    "BambaForCausalLM": {"attn_layer_indices": [1]},
    "Cohere2ForCausalLM": {"rms_norm_eps": None},
    "Gemma4ForCausalLM": {"hidden_size_per_layer_input": 0},
    "GraniteMoeHybridForCausalLM": {"layer_types": ["mamba", "attention"]},
    "Lfm2ForCausalLM": {"rms_norm_eps": None},
    "Lfm2MoeForCausalLM": {"rms_norm_eps": None},
    "NemotronForCausalLM": {"rms_norm_eps": None},
    "NemotronHForCausalLM": {"rms_norm_eps": None, "hybrid_override_pattern": "M*"},
    "PhiForCausalLM": {"rms_norm_eps": None},
    "Qwen3NextForCausalLM": {"full_attention_interval": 2},
    "Qwen3_5ForCausalLM": {"full_attention_interval": 2},
    "Qwen3_5MoeForCausalLM": {"full_attention_interval": 2},
    "Starcoder2ForCausalLM": {"rms_norm_eps": None},
}


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize(
    "key",
    {
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "query_pre_attn_scalar": 256,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "logits_scaling": 8.0,
        "clip_qkv": 8.0,
        "num_local_experts": 8,
        "n_routed_experts": 64,
        "kv_lora_rank": 512,
        "no_rope_layers": [1, 1, 0],
        "use_qk_norm": False,
        "quantization": {"bits": 4},
        "vision_config": {},
    }.items(),
    ids=lambda item: item[0],
)
def test_a_key_that_a_family_does_not_know_is_refused_by_name(architecture: str, key: tuple[str, object]) -> None:
    if key[0] in OWN_KEYS.get(architecture, ()):
        return
    known = {"architectures": [architecture], **OWN_VALUES.get(architecture, {})}
    with pytest.raises(ConfigError, match=f"^{key[0]}: .* is not supported"):
        read(**known, **dict([key]))
    read(**known, **{key[0]: None})


def test_keys_that_change_no_result_are_passed_over() -> None:
    inert = dict.fromkeys(INERT - {"architectures", "dtype", "torch_dtype"}, 1)
    own_words = {"_name_or_path": "x", "unsloth_fixed": True, "transformers.js_config": {}, "rope_interleaved": False}
    own_words |= {"attention_dropout": 0.1, "embd_pdrop": 0.1, "tokenizer_class": "LlamaTokenizer", "pruned_heads": {}}
    assert read(**inert, **own_words) == read()


@given(st.text(min_size=1), st.one_of(st.booleans(), st.integers(), st.text(), st.lists(st.integers())))
def test_whatever_nobody_has_looked_up_is_refused(key: str, value: object) -> None:
    assume(not key.startswith(INERT_PREFIXES))
    with pytest.raises(ConfigError, match="is not supported"):
        read(**{f"{key}~": value})


def test_reading_a_config_does_not_import_torch() -> None:
    code = "import sys, pdserve.model.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


KEYS = [
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "original_max_position_embeddings"),
    *("rms_norm_eps", "layer_norm_eps", "norm_epsilon", "norm_eps", "rope_theta", "rope_parameters", "rope_scaling"),
    *("partial_rotary_factor", "sliding_window", "max_window_layers", "layer_types", "no_rope_layers"),
    *("no_rope_layer_interval", "hidden_act", "attention_multiplier", "logits_scaling", "residual_multiplier"),
    *("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar", "sliding_window_pattern"),
    *("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok", "n_group", "mlp_only_layers"),
    *("conv_L_cache", "full_attn_idxs", "block_ff_dim", "block_multiple_of", "block_ffn_dim_multiplier"),
    *("mamba_d_ssm", "mamba_n_heads", "mamba_d_head", "ssm_multipliers", "mlp_multipliers", "time_step_limit"),
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_conv_kernel_dim"),
    *("embedding_multiplier", "attention_bias", "mlp_bias", "tie_word_embeddings", "eos_token_id", "bos_token_id"),
]
VALUES = st.one_of(
    *(st.none(), st.booleans(), st.text(max_size=3), st.just([]), st.just({})),
    st.sampled_from([0, -1, 10**9, 10**400, -(10**400), 0.0, -1.5, 1e300, math.inf, math.nan]),
)


@pytest.mark.parametrize("architecture", FAMILIES)
@given(data=st.data())
def test_whatever_a_key_holds_a_config_is_read_or_refused_by_name(architecture: str, data: st.DataObject) -> None:
    known = {"architectures": [architecture], **OWN_VALUES.get(architecture, {})}
    read(**known)
    with suppress(ConfigError):
        config = read(**(known | {data.draw(st.sampled_from(KEYS)): data.draw(VALUES)}))
        assert len(config.design.layers) == config.num_layers < 10_000


DEEPSEEK_V3 = {  # as it is published, as far as we know, but for `auto_map` and `quantization_config`
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "aux_loss_alpha": 0.001,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "pretraining_tp": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}


def test_deepseek_v3_is_read_as_it_is_published() -> None:
    config = ModelConfig.from_hf(DEEPSEEK_V3)
    assert (config.num_kv_heads, config.head_dim, config.kv_parts) == (1, 576, 1)
    first, last = config.design.layers[0], config.design.layers[-1]
    assert isinstance(first.mlp, GatedMlp)
    assert not isinstance(last.mlp, GatedMlp)
    scale = first.attention.scores.scale
    assert scale is not None
    assert math.isclose(scale, 192**-0.5 * (0.1 * math.log(40) + 1) ** 2)


LLAMA_4 = {  # Scout's, as it is published, as far as we know
    "architectures": ["Llama4ForConditionalGeneration"],
    "boi_token_index": 200080,
    "eoi_token_index": 200081,
    "image_token_index": 200092,
    "model_type": "llama4",
    "text_config": {
        "_attn_implementation_autoset": True,
        "attention_bias": False,
        "attention_chunk_size": 8192,
        "attention_dropout": 0.0,
        "attn_scale": 0.1,
        "attn_temperature_tuning": 4,
        "bos_token_id": 200000,
        "eos_token_id": [200001, 200007, 200008],
        "floor_scale": 8192,
        "for_llm_compressor": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "initializer_range": 0.02,
        "interleave_moe_layer_step": 1,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "max_position_embeddings": 10485760,
        "model_type": "llama4_text",
        "no_rope_layers": [],
        "num_attention_heads": 40,
        "num_experts_per_tok": 1,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "num_local_experts": 16,
        "output_router_logits": False,
        "pad_token_id": 200018,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 16.0,
            "high_freq_factor": 1.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "router_aux_loss_coef": 0.001,
        "router_jitter_noise": 0.0,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_qk_norm": True,
        "vocab_size": 202048,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0.dev0",
    "vision_config": {"model_type": "llama4_vision_model"},
}


def test_llama_4_is_read_as_it_is_published() -> None:
    config = ModelConfig.from_hf(LLAMA_4)
    assert config.windows == (8192, 8192, 8192, None) * 12, "blocks where there is rope"
    rope, still = config.design.layers[0].attention.rope, config.design.layers[3].attention.rope
    assert (rope.growth, still.growth) == (None, Growth(0.1, 8192, first=1))
    assert all(isinstance(layer.mlp, Experts) for layer in config.design.layers)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"attention_chunk_size": 0}, "attention_chunk_size: 0 is not an integer from 1"),
        ({"floor_scale": 0}, "floor_scale: 0 is not an integer from 1"),
        ({"attn_temperature_tuning": "yes"}, "attn_temperature_tuning: 'yes' is not"),
        ({"moe_layers": [48]}, "moe_layers: .48. is not supported"),
        (
            {"layer_types": ["sliding_attention"] * 48},
            "layer_types: .* is not supported .chunked_attention or full_attention",
        ),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers: .1, 0. is not supported"),
    ],
)
def test_another_llama_4_is_refused(changes: dict[str, object], named: str) -> None:
    text = LLAMA_4["text_config"]
    assert isinstance(text, dict)
    with pytest.raises(ConfigError, match=named):
        ModelConfig.from_hf(LLAMA_4 | {"text_config": text | changes})


ERNIE_MOE = {  # with the keys of the published ones, as far as we know
    "architectures": ["Ernie4_5_MoeForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "max_position_embeddings": 131072,
    "model_type": "ernie4_5_moe",
    "moe_capacity": [64, 64, 64],
    "moe_gate": "topk",
    "moe_intermediate_size": 1536,
    "moe_k": 6,
    "moe_layer_interval": 1,
    "moe_layer_start_index": 1,
    "moe_num_experts": 64,
    "moe_num_shared_experts": 2,
    "moe_use_aux_free": True,
    "num_attention_heads": 20,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 1,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000,
    "tie_word_embeddings": True,
    "use_bias": False,
    "use_cache": False,
    "use_rmsnorm": True,
    "vocab_size": 103424,
}
LFM2_MOE = {
    "architectures": ["Lfm2MoeForCausalLM"],
    "bos_token_id": 1,
    "conv_L_cache": 3,
    "conv_bias": False,
    "dtype": "bfloat16",
    "eos_token_id": 7,
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 7168,
    "layer_types": ["conv", "conv", "full_attention", *["conv", "conv", "conv", "full_attention"] * 5, "conv"],
    "max_position_embeddings": 128000,
    "model_type": "lfm2_moe",
    "moe_intermediate_size": 1792,
    "norm_eps": 1e-05,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_dense_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "pad_token_id": 0,
    "rope_theta": 1000000.0,
    "routed_scaling_factor": 1.0,
    "use_cache": True,
    "use_expert_bias": True,
    "vocab_size": 65536,
}


MAMBA_2 = {
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_proj_bias": False,
}
GRANITE_4_H = {  # Tiny's
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_multiplier": 0.0078125,
    "bos_token_id": 100257,
    "embedding_multiplier": 12,
    "eos_token_id": 100257,
    "hidden_act": "silu",
    "hidden_size": 1536,
    "init_method": "mup",
    "initializer_range": 0.1,
    "intermediate_size": 512,
    "layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4,
    "logits_scaling": 6,
    **MAMBA_2,
    "mamba_n_heads": 48,
    "max_position_embeddings": 131072,
    "model_type": "granitemoehybrid",
    "normalization_function": "rmsnorm",
    "num_attention_heads": 12,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 40,
    "num_key_value_heads": 4,
    "num_local_experts": 64,
    "output_router_logits": False,
    "pad_token_id": 100256,
    "position_embedding_type": "nope",
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000,
    "router_aux_loss_coef": 0.0,
    "shared_intermediate_size": 1024,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 100352,
}


BAMBA = {  # 9B's
    "architectures": ["BambaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_layer_indices": [9, 18, 27],
    "attn_rotary_emb": 64,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    **MAMBA_2,
    "mamba_n_heads": 128,
    "max_position_embeddings": 4096,
    "mlp_bias": False,
    "model_type": "bamba",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_logits_to_keep": 1,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_mamba_kernels": True,
    "vocab_size": 128256,
}


def test_bamba_is_read_as_it_is_published() -> None:
    layers = ModelConfig.from_hf(BAMBA).design.layers
    attending = [index for index, layer in enumerate(layers) if isinstance(layer.attention, SelfAttention)]
    assert (len(layers), attending) == (32, [9, 18, 27])
    assert layers[9].attention.rope.turning(128) == 64
    assert layers[0].attention == StateSpace(128, 64, 128, 1, 4, conv_bias=True, eps=1e-5, norm_first=False)


OF_NEMOTRON_H = {
    "architectures": ["NemotronHForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_nemotron_h.NemotronHConfig"},
    "bos_token_id": 1,
    "chunk_size": 128,
    "conv_kernel": 4,
    "expand": 2,
    "hidden_dropout": 0.0,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "mamba_hidden_act": "silu",
    "mamba_proj_bias": False,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "model_type": "nemotron_h",
    "n_groups": 8,
    "num_logits_to_keep": 1,
    "pad_token_id": 0,
    "rescale_prenorm_residual": True,
    "residual_in_fp32": False,
    "ssm_state_size": 128,
    "tie_word_embeddings": False,
    "use_bias": False,
    "use_cache": True,
    "use_conv_bias": True,
    "use_mamba_kernels": True,
    "vocab_size": 131072,
}
PATTERN = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
NEMOTRON_H = {  # 8B's
    **OF_NEMOTRON_H,
    "attention_head_dim": 128,
    "eos_token_id": 2,
    "hidden_size": 4096,
    "hybrid_override_pattern": PATTERN,
    "intermediate_size": 21504,
    "mamba_head_dim": 64,
    "mamba_num_heads": 128,
    "max_position_embeddings": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 52,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
}
NEMOTRON_3_NANO = {  # 30B-A3B's
    **OF_NEMOTRON_H,
    "eos_token_id": 11,
    "head_dim": 128,
    "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "intermediate_size": 1856,
    "mamba_head_dim": 64,
    "mamba_num_heads": 64,
    "mamba_ssm_cache_dtype": "float32",
    "max_position_embeddings": 262144,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_eps": 1e-05,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 52,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 1.0,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "sliding_window": None,
    "time_step_floor": 0.0001,
    "time_step_limit": [0.0, math.inf],
    "time_step_max": 0.1,
    "time_step_min": 0.001,
    "topk_group": 1,
}


def test_nemotron_h_is_read_as_it_is_published() -> None:
    config = ModelConfig.from_hf(NEMOTRON_H)
    layers = config.design.layers
    assert (config.num_layers, config.head_dim) == (52, 128)
    assert [index for index, each in enumerate(config.design.attentions) if each is not None] == [7, 18, 29, 40]
    assert layers[0].attention == StateSpace(128, 64, 128, 8, 4, True, 1e-5, norm_first=False, block="mixer")
    assert layers[1].mlp == PlainMlp(21504, Activation.SQUARED_RELU)
    assert [(layer.attention is None) != (layer.mlp is None) for layer in layers] == [True] * 52
    assert [size > 0 for size in config.state_sizes] == [sign == "M" for sign in PATTERN]


def test_nemotron_3_is_read_as_it_is_published() -> None:
    of = ModelConfig.from_hf(NEMOTRON_3_NANO).design
    (mixture,) = set(of.mlps)
    assert isinstance(mixture, Experts)
    assert (len(of.layers), len(of.mlps), mixture.num_experts) == (52, 23, 128)
    assert mixture.expert == PlainMlp(1856, Activation.SQUARED_RELU)
    assert mixture.shared == PlainMlp(3712, Activation.SQUARED_RELU)
    assert mixture.routing == Routing(6, by_sigmoid=True, bias="gate.e_score_correction_bias", scale=2.5)


def test_nemotron_h_has_a_list_or_a_pattern_of_its_layers() -> None:
    shape = {**NEMOTRON_H, "hybrid_override_pattern": None, "num_hidden_layers": None}
    of_pattern = ModelConfig.from_hf({**shape, "hybrid_override_pattern": "ME*-"})
    for names in (["mamba", "moe", "attention", "mlp"], ["linear_attention", "moe", "full_attention", "mlp"]):
        assert ModelConfig.from_hf({**shape, "layers_block_type": names}) == of_pattern
    both = {**shape, "layers_block_type": ["mamba", "attention"], "hybrid_override_pattern": "ME*-"}
    assert ModelConfig.from_hf(both).num_layers == 2, "as transformers has it"


@pytest.mark.parametrize(("num_experts", "position"), [(64, "nope"), (0, "rope")])
def test_granite_4_is_read_as_it_is_published(num_experts: int, position: str) -> None:
    own = {"num_local_experts": num_experts, "position_embedding_type": position}
    config = ModelConfig.from_hf(GRANITE_4_H | own)
    first, full = config.design.layers[0], config.design.layers[5]
    assert isinstance(first.attention, StateSpace)
    assert (first.attention.heads, first.attention.head_dim, first.attention.eps) == (48, 64, 1e-5)
    assert isinstance(full.attention, SelfAttention)
    assert (full.attention.rope == NO_ROPE) == (position == "nope")
    assert (full.attention.scores.scale, full.residual_scale) == (0.0078125, 0.22)
    shared = full.mlp.shared if isinstance(full.mlp, Experts) else full.mlp
    assert isinstance(shared, GatedMlp)
    assert shared.inner_size == 1024
    assert isinstance(full.mlp, Experts) == (num_experts > 0)


@pytest.mark.parametrize(("published", "num_dense"), [(ERNIE_MOE, 1), (LFM2_MOE, 2)])
def test_mixtures_are_read_as_they_are_published(published: dict[str, object], num_dense: int) -> None:
    config = ModelConfig.from_hf(published)
    first, *others = config.design.layers
    assert (config.head_dim, first.mlp.inner_size) == (128 if num_dense == 1 else 64, published["intermediate_size"])
    assert [isinstance(layer.mlp, Experts) for layer in (first, *others)].index(True) == num_dense
    experts = others[-1].mlp
    assert isinstance(experts, Experts)
    assert experts.expert.inner_size == published["moe_intermediate_size"]
    assert (experts.shared is None) == (num_dense == 2)


@pytest.mark.parametrize(
    ("changes", "sparse"),
    [
        ({}, {1, 2, 3, 4, 5}),
        ({"moe_layer_end_index": 3}, {1, 2, 3}),
        ({"moe_layer_start_index": 2, "moe_layer_interval": 2}, {3, 5}),
    ],
)
def test_ernies_experts_are_in_the_layers_that_the_config_says(changes: dict[str, int], sparse: set[int]) -> None:
    layers = ModelConfig.from_hf(ERNIE_MOE | {"num_hidden_layers": 6} | changes).design.layers
    assert {index for index, layer in enumerate(layers) if isinstance(layer.mlp, Experts)} == sparse


def test_layers_with_a_state_are_read_with_the_sizes_of_their_states() -> None:
    conv, full = ModelConfig.from_hf(
        LLAMA | {"architectures": ["Lfm2ForCausalLM"], "rms_norm_eps": None, "layer_types": ["conv", "full_attention"]}
    ).design.layers
    assert conv.attention == ShortConv(channels=64, kernel=3)
    assert (conv.attention.sizes, full.mlp) == (StateSizes(128), GatedMlp(256, names=("w1", "w3", "w2")))
    config = read(architectures=["Qwen3NextForCausalLM"], num_hidden_layers=48, num_experts=512)
    state = 32 * 128 * 128 + 3 * (2 * 16 * 128 + 32 * 128)
    assert config.state_sizes == (state, state, state, 0) * 12


REFUSED: dict[str, list[dict[str, object]]] = {  # by the name of its first key: what a family does not compute
    "SmolLM3ForCausalLM": [
        *({"use_sliding_window": True}, {"layer_types": ["sliding_attention"] * 2}, {"no_rope_layers": [1]})
    ],
    "GemmaForCausalLM": [{"use_bidirectional_attention": True}, {"hidden_act": "relu"}],
    "PhiForCausalLM": [{"qk_layernorm": True}, {"tie_word_embeddings": True}],
    "Phi3ForCausalLM": [{"attention_bias": True}, {"partial_rotary_factor": 0.0}, {"partial_rotary_factor": 0.2}],
    "GraniteForCausalLM": [{"logits_scaling": 0.0}],
    "HunYuanDenseV1ForCausalLM": [{"use_cla": True}],
    "ApertusForCausalLM": [{"post_norm": True, "hidden_act": "xielu"}],
    "ArceeForCausalLM": [{"hidden_act": "silu"}],
    "MixtralForCausalLM": [{"num_local_experts": 0}, {"num_local_experts": 10**9}, {"num_experts_per_tok": 9}],
    "Qwen2MoeForCausalLM": [{"qkv_bias": False}],
    "Qwen3MoeForCausalLM": [{"hidden_act": "relu"}, {"decoder_sparse_step": 0}],
    "Glm4MoeForCausalLM": [{"n_group": 7}, {"n_group": 2, "topk_group": 3}],
    "OlmoeForCausalLM": [{"clip_qkv": 8.0}, {"num_experts_per_tok": 8, "num_experts": 4}],
    "Ernie4_5_MoeForCausalLM": [
        *({"moe_gate": "top2"}, {"moe_use_aux_free": False}, {"moe_norm_min": 0.1}, {"moe_k": 65})
    ],
    "MiniMaxM2ForCausalLM": [{"scoring_func": "softmax"}],
    "Cohere2ForCausalLM": [{"use_qk_norm": True}],
    "Gemma2ForCausalLM": [
        *({"attn_logit_softcapping": 0.0}, {"final_logit_softcapping": math.nan}, {"query_pre_attn_scalar": -1})
    ],
    "Gemma3ForCausalLM": [{"attn_logit_softcapping": 50.0}, {"rope_parameters": {"rope_theta": 1e4}}],
    "Olmo3ForCausalLM": [{"layer_types": ["linear_attention"] * 2}],
    "Exaone4ForCausalLM": [{"layer_types": ["full_attention"], "sliding_window": None}],
    "Lfm2ForCausalLM": [
        *({"conv_L_cache": 1}, {"conv_dim": 32}, {"block_ffn_dim_multiplier": 1e9}),
        *({"layer_types": ["conv", "sliding_attention"]}, {"layer_types": ["conv", "conv"]}),
    ],
    "GraniteMoeHybridForCausalLM": [
        *({"position_embedding_type": "alibi"}, {"layer_types": ["mamba", "mamba"]}, {"mamba_proj_bias": True}),
        {"normalization_function": "layernorm"},
    ],
    "BambaForCausalLM": [{"attn_layer_indices": []}, {"attn_rotary_emb": 3}, {"mlp_bias": True}],
    "NemotronHForCausalLM": [
        *({"hybrid_override_pattern": ""}, {"hybrid_override_pattern": "M*X"}),
        *({"layers_block_type": ["mamba", "sliding_attention"]}, {"hybrid_override_pattern": "M-"}),
        *({"num_hidden_layers": 3}, {"n_shared_experts": 2}, {"mlp_bias": True, "moe_latent_size": 32}),
        *({"mamba_num_heads": 100}, {"conv_kernel": 1}, {"ssm_state_size": 2049}, {"attention_head_dim": 64}),
        *({"mlp_hidden_act": "silu"}, {"mamba_hidden_act": "gelu"}, {"mamba_ssm_cache_dtype": "bfloat16"}),
        *({"time_step_limit": [1e-4, 0.1]}, {"rms_norm_eps": 1e-6}, {"residual_in_fp32": True}),
        {"use_bias": True},
    ],
    "FalconH1ForCausalLM": [
        *({"mamba_n_heads": 100}, {"mamba_d_head": 7}, {"mamba_proj_bias": True}, {"time_step_limit": [0.0, 1.0]}),
        *({"ssm_multipliers": [1.0]}, {"mlp_multipliers": [0.0, 1.0]}),
    ],
    "Qwen3NextForCausalLM": [
        *({"linear_num_value_heads": 3}, {"linear_conv_kernel_dim": 1}, {"linear_key_head_dim": 2049})
    ],
    "Qwen3_5ForCausalLM": [{"attn_output_gate": False}, {"mamba_ssm_dtype": "bfloat16"}],
    "Qwen3_5MoeForCausalLM": [{"mlp_only_layers": [1]}],
}


@pytest.mark.parametrize(
    ("architecture", "changes"), [(architecture, each) for architecture, all_of in REFUSED.items() for each in all_of]
)
def test_what_a_family_does_not_compute_is_refused_by_name(architecture: str, changes: dict[str, object]) -> None:
    own = {"architectures": [architecture], **OWN_VALUES.get(architecture, {})}
    with pytest.raises(ConfigError, match=f"^{next(iter(changes))}"):
        read(**{**own, **changes})
