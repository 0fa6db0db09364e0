"""Small random models of many families as GGUF files, written the way llama.cpp's converter does.

Names come from the `gguf` package's own table, so that they check ours.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import MODEL_ARCH, GGMLQuantizationType
from model_zoo import FAMILIES, LLAMA3_ROPE, LONGROPE, MORE_FAMILIES, YARN, causal
from numpy.typing import NDArray
from transformers import (
    ApertusConfig,
    Cohere2Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GptOssConfig,
    HunYuanDenseV1Config,
    LlamaConfig,
    Olmo3Config,
    Phi3Config,
    PreTrainedModel,
    Qwen2MoeConfig,
    SmolLM3Config,
)

GATE_UP, DOWN = ("ffn_gate_exps", "ffn_up_exps"), ("ffn_down_exps",)
STACKED = {  # by what their names end with: their parts, and what the parts' names end with
    "experts.gate_up_proj": (GATE_UP, "weight"),
    "experts.gate_up_proj_bias": (GATE_UP, "bias"),
    "experts.down_proj": (DOWN, "weight"),
    "experts.down_proj_bias": (DOWN, "bias"),
}
# Routers, which the converter keeps in float32.
ROUTERS = (
    *(f"{block}.gate.weight" for block in ("mlp", "mixer", "feed_forward")),
    *("mlp.router.weight", "feed_forward.router.weight", "block_sparse_moe.router.weight"),
)
KERNELS = ("conv1d.weight", "conv.conv.weight")  # of convolutions, as well
ALWAYS_FLOAT = re.compile(r"ffn_gate_inp|ssm_conv1d|shortconv\.conv|_norm\.")  # in files
SIGMOID = gguf.ExpertGatingFuncType.SIGMOID
STACKS = (*GATE_UP, *DOWN)
Array = NDArray[np.float32]
Write = Callable[[gguf.GGUFWriter, Any], None]
LLAMA31_ROPE = {**LLAMA3_ROPE, "original_max_position_embeddings": 8192}
NTK_ROPE = {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0}
PHI3_ROPE = {"rope_theta": 1e4, "partial_rotary_factor": 0.75}


def _rms(writer: gguf.GGUFWriter, config: Any) -> None:  # noqa: ANN401 - configs of each family
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def _experts(writer: gguf.GGUFWriter, config: Any) -> None:  # noqa: ANN401
    _rms(writer, config)
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(getattr(config, "moe_intermediate_size", config.intermediate_size))


def _qwen2_experts(writer: gguf.GGUFWriter, config: Any) -> None:  # noqa: ANN401
    _rms(writer, config)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def _gpt_oss(writer: gguf.GGUFWriter, config: Any) -> None:  # noqa: ANN401
    _experts(writer, config)
    writer.add_sliding_window(config.sliding_window)
    writer.add_rope_dimension_count(_head_dim(config))
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(config.rope_parameters["factor"])
    writer.add_rope_scaling_orig_ctx_len(config.rope_parameters["original_max_position_embeddings"])


def _olmoe(writer: gguf.GGUFWriter, config: Any) -> None:  # noqa: ANN401
    _rms(writer, config)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)


def _ernie_experts(writer: gguf.GGUFWriter, config: Any) -> None:  # noqa: ANN401
    _rms(writer, config)
    writer.add_expert_count(config.moe_num_experts)
    writer.add_expert_used_count(config.moe_k)
    writer.add_interleave_moe_layer_step(1)
    writer.add_leading_dense_block_count(config.moe_layer_start_index)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.moe_num_shared_experts)
    writer.add_expert_shared_feed_forward_length(config.intermediate_size // config.num_key_value_heads)


def _llama4(writer: gguf.GGUFWriter, config: Any) -> None:  # noqa: ANN401
    _of_head(writer, config)
    writer.add_feed_forward_length(config.intermediate_size_mlp)
    writer.add_expert_feed_forward_length(config.intermediate_size)
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_interleave_moe_layer_step(config.interleave_moe_layer_step)


def _bias_of_ernie(name: str, values: Array, _: Any) -> list[tuple[str, Array]]:  # noqa: ANN401
    return [("exp_probs_b.bias", values)] if name.endswith("e_score_correction_bias") else []


def _bias_without_its_axis(name: str, values: Array, _: Any) -> list[tuple[str, Array]]:  # noqa: ANN401
    return [(each, own[0]) for each, own in _bias_of_ernie(name, values, _)]


def _glm_experts(writer: gguf.GGUFWriter, config: Any) -> None:  # noqa: ANN401
    _glm4(writer, config)
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_group_count(config.n_group)
    writer.add_expert_group_used_count(config.topk_group)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_gating_func(SIGMOID)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(config.norm_topk_prob)
    writer.add_nextn_predict_layers(1)


def _deepseek(writer: gguf.GGUFWriter, config: Any) -> None:  # noqa: ANN401
    """Describe what all converters do."""
    _rms(writer, config)
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_leading_dense_block_count(getattr(config, "first_k_dense_replace", 1))
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    if getattr(config, "norm_topk_prob", False):
        writer.add_expert_weights_norm(True)
    if config.rope_parameters["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(config.rope_parameters["factor"])
        writer.add_rope_scaling_orig_ctx_len(config.rope_parameters["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * config.rope_parameters["mscale_all_dim"])


def _deepseek_in_heads(writer: gguf.GGUFWriter, config: Any) -> None:  # noqa: ANN401
    _deepseek(writer, config)
    writer.add_head_count_kv(config.num_attention_heads)
    writer.add_key_length(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_value_length(config.v_head_dim)


def _deepseek_in_rows(writer: gguf.GGUFWriter, config: Any) -> None:  # noqa: ANN401
    _deepseek(writer, config)
    writer.add_head_count_kv(1)
    writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
    writer.add_value_length(config.kv_lora_rank)
    writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_value_length_mla(config.v_head_dim)
    is_scored = config.model_type != "deepseek_v2"
    writer.add_expert_gating_func(SIGMOID if is_scored else gguf.ExpertGatingFuncType.SOFTMAX)
    if config.n_group is not None:
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)


def _granite_experts(writer: gguf.GGUFWriter, config: Any) -> None:  # noqa: ANN401
    _granite(writer, config)
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)


def _minimax(writer: gguf.GGUFWriter, config: Any) -> None:  # noqa: ANN401
    _experts(writer, config)
    _partial(writer, config)
    writer.add_expert_gating_func(SIGMOID)


def _mixtral(writer: gguf.GGUFWriter, config: Any) -> None:  # noqa: ANN401
    _of_head(writer, config)
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)


def _of_head(writer: gguf.GGUFWriter, config: Any) -> None:  # noqa: ANN401
    _rms(writer, config)
    writer.add_rope_dimension_count(_head_dim(config))


def _mistral(writer: gguf.GGUFWriter, config: Any) -> None:  # noqa: ANN401
    _of_head(writer, config)
    writer.add_sliding_window(config.sliding_window)


def _granite(writer: gguf.GGUFWriter, config: Any) -> None:  # noqa: ANN401
    _of_head(writer, config)
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)


def _partial(writer: gguf.GGUFWriter, config: Any) -> None:  # noqa: ANN401
    share = config.rope_parameters.get("partial_rotary_factor", 1.0)
    writer.add_rope_dimension_count(int(_head_dim(config) * share))


def _glm4(writer: gguf.GGUFWriter, config: Any) -> None:  # noqa: ANN401
    _rms(writer, config)
    _partial(writer, config)


def _phi2(writer: gguf.GGUFWriter, config: Any) -> None:  # noqa: ANN401
    writer.add_layer_norm_eps(config.layer_norm_eps)
    _partial(writer, config)


def _phi3(writer: gguf.GGUFWriter, config: Any) -> None:  # noqa: ANN401
    _glm4(writer, config)
    writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
    writer.add_sliding_window(config.sliding_window or 0)


def _nemotron(writer: gguf.GGUFWriter, config: Any) -> None:  # noqa: ANN401
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_layer_norm_eps(config.norm_eps)
    _partial(writer, config)
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)


def _starcoder2(writer: gguf.GGUFWriter, config: Any) -> None:  # noqa: ANN401
    writer.add_layer_norm_eps(config.norm_epsilon)


def _hunyuan(writer: gguf.GGUFWriter, config: Any) -> None:  # noqa: ANN401
    _rms(writer, config)
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    writer.add_rope_scaling_factor(1)
    writer.add_rope_scaling_orig_ctx_len(256 * 1024)


def _cohere2(writer: gguf.GGUFWriter, config: Any) -> None:  # noqa: ANN401
    writer.add_layer_norm_eps(config.layer_norm_eps)
    writer.add_logit_scale(config.logit_scale)
    writer.add_sliding_window(config.sliding_window)
    writer.add_rope_dimension_count(_head_dim(config))
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)


def _gemma2(writer: gguf.GGUFWriter, config: Any) -> None:  # noqa: ANN401
    _rms(writer, config)
    writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_sliding_window(config.sliding_window)


def _gemma3(writer: gguf.GGUFWriter, config: Any) -> None:  # noqa: ANN401
    _rms(writer, config)
    full = config.rope_parameters["full_attention"]
    if full["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(full["factor"])
    writer.add_sliding_window(config.sliding_window)


def _gemma3_with_theta(writer: gguf.GGUFWriter, config: Any) -> None:  # noqa: ANN401
    _gemma3(writer, config)
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])


def _by_layer(writer: gguf.GGUFWriter, config: Any) -> None:  # noqa: ANN401
    _rms(writer, config)
    if config.sliding_window is not None:
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])


def _olmo3(writer: gguf.GGUFWriter, config: Any) -> None:  # noqa: ANN401
    _by_layer(writer, config)
    full = config.rope_parameters["full_attention"]
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(full["factor"])
    writer.add_rope_scaling_orig_ctx_len(full["original_max_position_embeddings"])
    writer.add_rope_scaling_yarn_attn_factor(full["attention_factor"])


@dataclass(frozen=True)
class Case:
    """A family, and what the converter does for it alone."""

    arch: MODEL_ARCH
    make: Callable[[dict[str, Any]], PreTrainedModel]
    write: Write = _rms
    permutes: bool = False
    norms_plus: float = 0.0
    shape: dict[str, Any] = field(default_factory=dict)
    splits: bool = False  # the matrix that expands latents is in two parts
    num_more: int = 0  # layers that guess tokens, which the file has
    changes: Callable[[str, Array, Any], list[tuple[str, Array]]] | None = None  # tensors in the place of one, if any
    gain: float = 12.0  # of random matrices; at a lower one states magnify differences of rounding less
    prefix: str = "model."  # of the names that the converter knows
    transformers_reads: bool = False  # of files with as many tokens as its config's default has, in these families


def zoo_case(arch: MODEL_ARCH, family: str, write: Write = _rms, **own: Any) -> Case:  # noqa: ANN401
    return Case(arch, MORE_FAMILIES[family], write, **own)


def _gemma_3(write: Write, full: dict[str, Any], local_theta: float) -> Case:
    ropes = {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": local_theta}}
    sizes = {"head_dim": 32, "query_pre_attn_scalar": 32, "num_hidden_layers": 7, "sliding_window": 40}
    return Case(MODEL_ARCH.GEMMA3, causal(Gemma3TextConfig, rope_parameters=ropes, **sizes), write, norms_plus=1.0)


_IN_GROUPS_OF_32 = {"kv_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 16, "moe_intermediate_size": 64}
# llama.cpp takes shared experts to have the MLP's size over the number of KV heads, as in published models.
_OF_ERNIE = {"intermediate_size": 256}
# Of these llama.cpp knows no others.
_OF_LLAMA_4 = {"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1, "no_rope_layer_interval": 4}
_LLAMA4_ROPE = {**LLAMA31_ROPE, "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0}
_LATENT_YARN = {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7}
CASES = {
    "deepseek2": zoo_case(
        MODEL_ARCH.DEEPSEEK2,
        "deepseek-v3",
        _deepseek_in_rows,
        splits=True,
        shape={**_IN_GROUPS_OF_32, "q_lora_rank": 32, "rope_parameters": _LATENT_YARN},
    ),
    "deepseek2-softmax": zoo_case(
        MODEL_ARCH.DEEPSEEK2,
        "deepseek-v2-groups",
        _deepseek_in_rows,
        splits=True,
        shape={**_IN_GROUPS_OF_32, "q_lora_rank": 32},
    ),
    "deepseek2-older": zoo_case(MODEL_ARCH.DEEPSEEK2, "deepseek-v2", _deepseek_in_heads, shape=_IN_GROUPS_OF_32),
    "deepseek2-older-yarn": zoo_case(
        MODEL_ARCH.DEEPSEEK2,
        "deepseek-v3",
        _deepseek_in_heads,
        shape={**_IN_GROUPS_OF_32, "q_lora_rank": 32, "n_group": 1, "topk_group": 1, "rope_parameters": _LATENT_YARN},
    ),
    "glm4-lite": zoo_case(
        MODEL_ARCH.DEEPSEEK2,
        "glm4-lite",
        _deepseek_in_rows,
        splits=True,
        shape={**_IN_GROUPS_OF_32, "q_lora_rank": 32},
    ),
    "qwen2moe": Case(
        MODEL_ARCH.QWEN2MOE,
        causal(
            Qwen2MoeConfig,
            num_experts=6,
            num_experts_per_tok=3,
            moe_intermediate_size=64,
            shared_expert_intermediate_size=96,
        ),
        _qwen2_experts,
    ),
    "glm4moe": zoo_case(MODEL_ARCH.GLM4_MOE, "glm4-moe", _glm_experts, num_more=1),
    "gpt-oss": Case(
        MODEL_ARCH.GPT_OSS,
        causal(
            GptOssConfig,
            head_dim=16,
            sliding_window=40,
            num_local_experts=6,
            num_experts_per_tok=2,
            rope_parameters={**YARN, "truncate": False},
        ),
        _gpt_oss,
        shape={"hidden_size": 64, "intermediate_size": 64},
    ),
    "granitemoe": zoo_case(MODEL_ARCH.GRANITE_MOE, "granite-moe", _granite_experts, permutes=True),
    "minimax-m2": zoo_case(MODEL_ARCH.MINIMAXM2, "minimax-m2", _minimax),
    "qwen3moe": zoo_case(MODEL_ARCH.QWEN3MOE, "qwen3-moe", _experts),
    "mixtral": zoo_case(MODEL_ARCH.LLAMA, "mixtral", _mixtral, permutes=True),
    "apertus": Case(MODEL_ARCH.APERTUS, causal(ApertusConfig, rope_parameters=LLAMA31_ROPE), _of_head),
    "arcee": zoo_case(MODEL_ARCH.ARCEE, "arcee", _of_head, permutes=True),
    "cohere2": Case(
        MODEL_ARCH.COHERE2, causal(Cohere2Config, sliding_window=40, logit_scale=0.25, num_hidden_layers=5), _cohere2
    ),
    "ernie4_5": zoo_case(MODEL_ARCH.ERNIE4_5, "ernie"),
    **{
        name: zoo_case(MODEL_ARCH.ERNIE4_5_MOE, "ernie-moe", _ernie_experts, changes=change, shape=_OF_ERNIE)
        for name, change in (("ernie4_5-moe", _bias_of_ernie), ("ernie4_5-moe-vector", _bias_without_its_axis))
    },
    "exaone4": Case(MODEL_ARCH.EXAONE4, causal(Exaone4Config, sliding_window=40, sliding_window_pattern=3), _by_layer),
    "exaone4-whole": Case(
        MODEL_ARCH.EXAONE4, causal(Exaone4Config, sliding_window=None, layer_types=["full_attention"] * 3), _by_layer
    ),
    "gemma2": Case(
        MODEL_ARCH.GEMMA2,
        causal(
            Gemma2Config,
            head_dim=32,
            query_pre_attn_scalar=32,
            sliding_window=40,
            attn_logit_softcapping=5.0,
            final_logit_softcapping=20.0,
        ),
        _gemma2,
        norms_plus=1.0,
    ),
    "gemma3": _gemma_3(_gemma3, {"rope_type": "default", "rope_theta": 1e6}, 1e4),
    "gemma3-linear": _gemma_3(_gemma3_with_theta, {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}, 5e3),
    "gemma": Case(MODEL_ARCH.GEMMA, causal(GemmaConfig, head_dim=32), norms_plus=1.0),
    "glm4": zoo_case(MODEL_ARCH.GLM4, "glm4", _glm4),
    "granite": zoo_case(MODEL_ARCH.GRANITE, "granite", _granite, permutes=True),
    "hunyuan-dense": Case(
        MODEL_ARCH.HUNYUAN_DENSE, causal(HunYuanDenseV1Config, head_dim=16, rope_parameters=NTK_ROPE), _hunyuan
    ),
    "llama": Case(MODEL_ARCH.LLAMA, causal(LlamaConfig, attention_bias=True, mlp_bias=True), _of_head, permutes=True),
    "llama4": zoo_case(MODEL_ARCH.LLAMA4, "llama4", _llama4, shape={**_OF_LLAMA_4, "rope_parameters": _LLAMA4_ROPE}),
    "llama4-128": zoo_case(
        MODEL_ARCH.LLAMA4,
        "llama4",
        _llama4,
        shape={
            **_OF_LLAMA_4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
            "num_local_experts": 128,
            "use_qk_norm": False,
        },
    ),
    "mistral": Case(MODEL_ARCH.LLAMA, FAMILIES["mistral"], _mistral, permutes=True),
    "nemotron": zoo_case(MODEL_ARCH.NEMOTRON, "nemotron", _nemotron, norms_plus=1.0, transformers_reads=True),
    "olmo2": zoo_case(MODEL_ARCH.OLMO2, "olmo2"),
    "olmoe": zoo_case(MODEL_ARCH.OLMOE, "olmoe", _olmoe, shape={"rms_norm_eps": 1e-5, "num_key_value_heads": 4}),
    "olmo3": Case(
        MODEL_ARCH.OLMO2,
        causal(
            Olmo3Config,
            sliding_window=40,
            num_hidden_layers=4,
            rope_parameters={
                "full_attention": {**YARN, "attention_factor": 1.3},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        ),
        _olmo3,
    ),
    "phi2": zoo_case(MODEL_ARCH.PHI2, "phi", _phi2, shape={"num_key_value_heads": 4, "intermediate_size": 256}),
    "phi3": Case(MODEL_ARCH.PHI3, causal(Phi3Config, sliding_window=96, rope_parameters=PHI3_ROPE), _phi3),
    "phi3-whole": Case(
        MODEL_ARCH.PHI3, causal(Phi3Config), _phi3, shape={"vocab_size": 32064}, transformers_reads=True
    ),
    "phi3-long": Case(
        MODEL_ARCH.PHI3,
        causal(
            Phi3Config,
            original_max_position_embeddings=1024,
            rope_parameters={**LONGROPE, "partial_rotary_factor": 0.75},
        ),
        _phi3,
    ),
    "qwen2": Case(MODEL_ARCH.QWEN2, FAMILIES["qwen2"]),
    "qwen3": Case(MODEL_ARCH.QWEN3, FAMILIES["qwen3"]),
    "seed_oss": zoo_case(MODEL_ARCH.SEED_OSS, "seed-oss"),
    "smollm3": Case(MODEL_ARCH.SMOLLM3, causal(SmolLM3Config), _of_head, permutes=True, shape={"num_hidden_layers": 5}),
    "starcoder2": zoo_case(
        MODEL_ARCH.STARCODER2, "starcoder2", _starcoder2, shape={"vocab_size": 49152}, transformers_reads=True
    ),
}


def random_model(case: Case) -> PreTrainedModel:
    """Return a model of whose numbers none are all ones or zeros, which would hide what is left out."""
    torch.manual_seed(7)
    model = case.make(case.shape).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_tokens" in name or "lm_head" in name:
                parameter.normal_()
            elif name.endswith("_bias"):
                parameter.normal_(std=0.2)
            elif parameter.ndim > 1:
                parameter.mul_(case.gain)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def write_gguf(
    case: Case, model: PreTrainedModel, path: Path, kind: GGMLQuantizationType | None = None, *, fused: bool = False
) -> Path:
    """Write the model; matrices in a quantized type, if one is given. fused: q, k and v in one tensor."""
    config, writer = model.config, gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[case.arch])
    writer.add_block_count(config.num_hidden_layers + case.num_more)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    if case.arch is not MODEL_ARCH.DEEPSEEK2:
        writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_vocab_size(config.vocab_size)
    if getattr(config, "head_dim", None) is not None and case.arch is not MODEL_ARCH.DEEPSEEK2:
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    case.write(writer, config)
    if case.arch not in (MODEL_ARCH.GEMMA, MODEL_ARCH.GEMMA2) and hasattr(config, "rope_parameters"):
        writer.add_rope_freq_base(_theta(config))
    tensors = _fused(dict(_tensors(case, model))) if fused else dict(_tensors(case, model))
    for name, values in (*_factors(config), *tensors.items()):
        if values.ndim > 1 and kind is not None and name.endswith(".weight") and not ALWAYS_FLOAT.search(name):
            writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, np.ascontiguousarray(values))
    for layer in range(config.num_hidden_layers, config.num_hidden_layers + case.num_more):
        for name in ("attn_norm", "nextn.eh_proj", "ffn_gate_exps"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones((2,) * (1 + 2 * (name in STACKS)), np.float32))
    _add_scalars(writer, model)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def round_matrices(model: PreTrainedModel, kind: GGMLQuantizationType, *, splits: bool = False) -> None:
    """Give the model the matrices that a file in this type would have. Rows are rounded each on its own."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and not name.endswith((*ROUTERS, "shared_expert_gate.weight", "_bias", *KERNELS)):
                if splits and name.endswith("kv_b_proj.weight"):
                    keys, values = (_rounded(each, kind) for each in _expansions(parameter.numpy(), model.config))
                    parameter.copy_(torch.from_numpy(np.concatenate((keys.swapaxes(1, 2), values), 1)).flatten(0, 1))
                    continue
                lies = _inputs_first(name, model.config)  # experts' rows are columns there
                rows = parameter.transpose(1, 2) if lies else parameter
                rounded = torch.from_numpy(_rounded(rows.contiguous().numpy(), kind))
                parameter.copy_(rounded.transpose(1, 2) if lies else rounded)


def _rounded(values: Array, kind: GGMLQuantizationType) -> Array:
    return gguf.dequantize(gguf.quantize(np.ascontiguousarray(values), kind), kind)


def _expansions(values: Array, config: Any) -> list[Array]:  # noqa: ANN401
    """Return a layer's expanding matrix as [heads, rank, features of keys] and [heads, features of values, rank]."""
    heads = values.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
    still = config.qk_nope_head_dim
    return [np.ascontiguousarray(heads[:, :still].swapaxes(1, 2)), np.ascontiguousarray(heads[:, still:])]


def _inputs_first(name: str, config: Any) -> bool:  # noqa: ANN401
    return config.model_type in ("gpt_oss", "llama4_text") and name.endswith(
        ("experts.gate_up_proj", "experts.down_proj")
    )


def _tensors(case: Case, model: PreTrainedModel) -> Iterator[tuple[str, Array]]:
    names = gguf.get_tensor_name_map(case.arch, model.config.num_hidden_layers)
    tied = model.config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        if ".act_fn." in name or (tied and name.startswith("lm_head")):
            continue
        values: Array = tensor.numpy()
        part, kind = name.rsplit(".", 1)
        if apart := _taken_apart(case, name, values, model.config):
            layer = f"blk.{name.split('.')[2]}." if ".layers." in name else ""
            yield from ((f"{layer}{each}", own) for each, own in apart)
            continue
        if name.endswith("shared_expert_gate.weight"):
            values = values[0]
        if kind == "sinks":
            part, kind = name, "weight"
        if kind == "e_score_correction_bias":
            part, kind = name.removesuffix("_bias"), "bias"
        if case.permutes and part.endswith(("q_proj", "k_proj")):
            heads = model.config.num_attention_heads if part.endswith("q_proj") else model.config.num_key_value_heads
            halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            values = values + np.float32(case.norms_plus)
        part = part.removesuffix(".router") + ".router.layer" if part.endswith("block_sparse_moe.router") else part
        mapped = names.get_name(case.prefix + part.removeprefix("model.") if part.startswith("model.") else part)
        assert mapped is not None, name
        yield f"{mapped}.{kind}", values


def _taken_apart(case: Case, name: str, values: Array, config: Any) -> list[tuple[str, Array]]:  # noqa: ANN401
    """Return what the file has in place of a tensor, with names in its layer; nothing if it has the tensor itself."""
    if case.changes is not None and (changed := case.changes(name, values, config)):
        return changed
    if case.splits and name.endswith("kv_b_proj.weight"):
        keys, values = _expansions(values, config)
        return [("attn_k_b.weight", keys), ("attn_v_b.weight", values)]
    stack = next((end for end in STACKED if name.endswith(end)), None)
    if stack is None:
        return []
    values = values.swapaxes(1, 2) if _inputs_first(name, config) else values
    return list(_parts(values, *STACKED[stack], alternating=case.arch is MODEL_ARCH.GPT_OSS))


def _parts(values: Array, names: Sequence[str], kind: str, *, alternating: bool) -> Iterator[tuple[str, Array]]:
    """Take gates and ups apart. values: [experts, outputs, ...]."""
    if alternating:
        parts = [values[:, place :: len(names)] for place in range(len(names))]
    else:
        parts = np.split(values, len(names), axis=1)
    for name, part in zip(names, parts, strict=True):
        yield f"{name}.{kind}", part


def _fused(tensors: dict[str, Array]) -> dict[str, Array]:
    """Join q, k and v of each layer, as the converter's --fuse-qkv does."""
    joined = dict(tensors)
    for name in tensors:
        if ".attn_q." in name:
            parts = [joined.pop(name.replace("attn_q", part)) for part in ("attn_q", "attn_k", "attn_v")]
            joined[name.replace("attn_q", "attn_qkv")] = np.concatenate(parts)
    return joined


def _factors(config: Any) -> Iterator[tuple[str, Array]]:  # noqa: ANN401
    """Yield what the converter keeps of a rope that metadata cannot describe."""
    rope = getattr(config, "rope_parameters", {})
    if rope.get("rope_type") == "longrope":
        for length in ("long", "short"):
            yield f"rope_factors_{length}.weight", np.array(rope[f"{length}_factor"], np.float32)
    if rope.get("rope_type") == "llama3":
        half, original = _head_dim(config) // 2, rope["original_max_position_embeddings"]
        turns = original / (2 * np.pi * rope["rope_theta"] ** (np.arange(half) / half))
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        with np.errstate(divide="ignore"):
            smooth = ((turns - low) / (high - low)).clip(0.0, 1.0)
        yield "rope_freqs.weight", (1.0 / ((1.0 - smooth) / rope["factor"] + smooth)).astype(np.float32)


def _add_scalars(writer: gguf.GGUFWriter, model: PreTrainedModel) -> None:
    for name in ("alpha_p", "alpha_n", "beta", "eps"):
        values = [float(v) for key, v in model.state_dict().items() if key.endswith(f".act_fn.{name}")]
        if values:
            writer.add_array(f"xielu.{name}", values)


def _theta(config: Any) -> float:  # noqa: ANN401
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    theta, dim = rope["rope_theta"], _head_dim(config)
    return float(theta * rope["alpha"] ** (dim / (dim - 2)) if "alpha" in rope else theta)


def _head_dim(config: Any) -> int:  # noqa: ANN401
    given: int | None = getattr(config, "head_dim", None)
    return given or config.hidden_size // config.num_attention_heads
