"""Small random models with states as GGUF files, written the way llama.cpp's converter does."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import gguf
import numpy as np
from gguf import MODEL_ARCH
from gguf_models import Array, Write, zoo_case

Tensors = list[tuple[str, Array]]
SIGMOID = gguf.ExpertGatingFuncType.SIGMOID
FULL, ATTENTION = "full_attention", ("full_attention", "attention")


def _by_layer(writer: gguf.GGUFWriter, config: Any, kinds: Sequence[str]) -> None:  # noqa: ANN401 - of each family
    writer.add_head_count_kv([config.num_key_value_heads if kind in ATTENTION else 0 for kind in kinds])


def _lfm2(writer: gguf.GGUFWriter, config: Any) -> None:  # noqa: ANN401
    _by_layer(writer, config, config.layer_types)
    writer.add_shortconv_l_cache(config.conv_L_cache)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    if config.model_type == "lfm2":
        size = int(2 * config.intermediate_size / 3)
        writer.add_feed_forward_length(-(-size // config.block_multiple_of) * config.block_multiple_of)


def _lfm2_moe(writer: gguf.GGUFWriter, config: Any) -> None:  # noqa: ANN401
    _lfm2(writer, config)
    _experts(writer, config, config.num_experts)
    writer.add_leading_dense_block_count(config.num_dense_layers)
    writer.add_expert_gating_func(SIGMOID)


def _experts(writer: gguf.GGUFWriter, config: Any, count: int) -> None:  # noqa: ANN401
    writer.add_expert_count(count)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if hasattr(config, "moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def _of_lfm2(name: str, values: Array, _: Any) -> Tensors:  # noqa: ANN401
    if name.endswith("conv.conv.weight"):
        return [("shortconv.conv.weight", values[:, 0])]
    return [("exp_probs_b.bias", values)] if name.endswith(".expert_bias") else []


def _space(writer: gguf.GGUFWriter, sizes: dict[str, int]) -> None:
    writer.add_ssm_conv_kernel(sizes["kernel"])
    writer.add_ssm_state_size(sizes["state"])
    writer.add_ssm_group_count(sizes["groups"])
    writer.add_ssm_inner_size(sizes["inner"])
    writer.add_ssm_time_step_rank(sizes["heads"])


def _granite(writer: gguf.GGUFWriter, config: Any) -> None:  # noqa: ANN401
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)
    writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
    _experts(writer, config, config.num_local_experts)
    if not config.num_local_experts:
        writer.add_expert_used_count(0)
        writer.add_feed_forward_length(config.shared_intermediate_size)
    inner, heads = config.mamba_expand * config.hidden_size, config.mamba_n_heads
    sizes = {"kernel": config.mamba_d_conv, "state": config.mamba_d_state, "groups": config.mamba_n_groups}
    _space(writer, {**sizes, "inner": inner, "heads": heads})
    _by_layer(writer, config, config.layer_types)
    has_states = any(kind not in ATTENTION for kind in config.layer_types)
    writer.add_rope_scaling_finetuned(not has_states)
    if has_states:
        writer.add_context_length(2**20)


def _of_space(name: str, values: Array, groups: int) -> Tensors:
    """Return what files have in place of a tensor of Mamba-2."""
    if name.endswith(".A_log"):
        return [("ssm_a", -np.exp(values)[:, None])]
    if name.endswith(".D"):
        return [("ssm_d", values[:, None])]
    if name.endswith(".dt_bias"):
        return [("ssm_dt.bias", values)]
    if name.endswith("conv1d.weight"):
        return [("ssm_conv1d.weight", values[:, 0])]
    return (
        [("ssm_norm.weight", values.reshape(groups, -1))]
        if name.endswith((".mamba.norm.weight", ".mixer.norm.weight"))
        else []
    )


def _of_granite(name: str, values: Array, config: Any) -> Tensors:  # noqa: ANN401
    end = "_shexp" if config.num_local_experts else ""
    if name.endswith("shared_mlp.input_linear.weight"):
        gate, up = np.split(values, 2)
        return [(f"ffn_gate{end}.weight", gate), (f"ffn_up{end}.weight", up)]
    if name.endswith("shared_mlp.output_linear.weight"):
        return [(f"ffn_down{end}.weight", values)]
    return _of_space(name, values, config.mamba_n_groups)


def _falcon(writer: gguf.GGUFWriter, config: Any) -> None:  # noqa: ANN401
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    sizes = {"kernel": config.mamba_d_conv, "state": config.mamba_d_state, "groups": config.mamba_n_groups}
    _space(writer, {**sizes, "inner": config.mamba_d_ssm, "heads": config.mamba_n_heads})


def _of_falcon(name: str, values: Array, config: Any) -> Tensors:  # noqa: ANN401
    """Multiply the matrices by what Falcon-H1's config multiplies their results or inputs with."""
    taken, factors = config.attention_in_multiplier, config.mlp_multipliers
    keys = config.mamba_n_groups * config.mamba_d_state
    widths = (config.mamba_d_ssm, config.mamba_d_ssm, keys, keys, config.mamba_n_heads)
    of_space = np.repeat(np.array(config.ssm_multipliers, np.float32), widths)[:, None] * config.ssm_in_multiplier
    scales: dict[str, tuple[str, Any]] = {
        "pre_ff_layernorm.weight": ("ffn_norm", 1.0),
        "embed_tokens.weight": ("token_embd.weight", config.embedding_multiplier),
        "lm_head.weight": ("output.weight", config.lm_head_multiplier),
        "feed_forward.down_proj.weight": ("ffn_down.weight", factors[1]),
        "feed_forward.gate_proj.weight": ("ffn_gate.weight", factors[0]),
        "self_attn.q_proj.weight": ("attn_q.weight", taken),
        "self_attn.k_proj.weight": ("attn_k.weight", taken * config.key_multiplier),
        "self_attn.v_proj.weight": ("attn_v.weight", taken),
        "self_attn.o_proj.weight": ("attn_output.weight", config.attention_out_multiplier),
        "mamba.out_proj.weight": ("ssm_out.weight", config.ssm_out_multiplier),
        "mamba.in_proj.weight": ("ssm_in.weight", of_space),
    }
    for end, (part, scale) in scales.items():
        if name.endswith(end):
            return [(part, (values * scale).astype(np.float32))]
    return _of_space(name, values, config.mamba_n_groups)


def _nemotron(writer: gguf.GGUFWriter, config: Any) -> None:  # noqa: ANN401
    kinds = config.layer_types
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    sizes = {"kernel": config.conv_kernel, "state": config.ssm_state_size, "groups": config.n_groups}
    inner = config.mamba_num_heads * config.mamba_head_dim
    _space(writer, {**sizes, "inner": inner, "heads": config.mamba_num_heads})
    _by_layer(writer, config, kinds)
    writer.add_rope_scaling_finetuned(False)
    writer.add_context_length(2**20)
    has_experts = "moe" in kinds
    width = config.moe_intermediate_size if has_experts else config.intermediate_size
    writer.add_feed_forward_length([width if kind in ("moe", "mlp") else 0 for kind in kinds])
    if has_experts:
        _experts(writer, config, config.n_routed_experts)
        writer.add_expert_shared_feed_forward_length(config.moe_shared_expert_intermediate_size)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
        if config.moe_latent_size is not None:
            writer.add_moe_latent_size(config.moe_latent_size)


def _of_nemotron(name: str, values: Array, config: Any) -> Tensors:  # noqa: ANN401
    if name.endswith("experts.up_proj"):
        return [("ffn_up_exps.weight", values)]
    if name.endswith("experts.down_proj"):
        return [("ffn_down_exps.weight", values)]
    return _of_space(name, values, config.n_groups)


def _delta(writer: gguf.GGUFWriter, config: Any) -> None:  # noqa: ANN401
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    sizes = {"kernel": config.linear_conv_kernel_dim, "state": config.linear_key_head_dim, "groups": keys}
    _space(writer, {**sizes, "inner": values * config.linear_value_head_dim, "heads": values})
    writer.add_full_attention_interval(4)
    writer.add_rope_dimension_count(int(config.head_dim * config.rope_parameters["partial_rotary_factor"]))
    if hasattr(config, "num_experts"):
        _experts(writer, config, config.num_experts)
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if config.model_type.startswith("qwen3_5"):
        writer.add_rope_dimension_sections([11, 11, 10, 0])


def _of_next(name: str, values: Array, config: Any) -> Tensors:  # noqa: ANN401
    if name.endswith("in_proj_qkvz.weight"):
        heads, keys = config.linear_num_key_heads, config.linear_key_head_dim
        width = config.linear_num_value_heads // heads * config.linear_value_head_dim
        by_head = values.reshape(heads, -1, values.shape[-1])
        q, k, v, z = np.split(by_head, (keys, 2 * keys, 2 * keys + width), axis=1)
        qkv = np.concatenate([each.reshape(-1, values.shape[-1]) for each in (q, k, v)])
        return [("attn_qkv.weight", qkv), ("attn_gate.weight", z.reshape(-1, values.shape[-1]))]
    if name.endswith(".A_log"):
        return [("ssm_a", -np.exp(values))]
    return _of_space(name, values, 1)


def _of_3_5(name: str, values: Array, config: Any) -> Tensors:  # noqa: ANN401
    """Put value heads that share a key head as far apart as there are key heads."""
    if "linear_attn." not in name or name.endswith("norm.weight"):
        return []
    part, width = name.rsplit("linear_attn.", 1)[1], config.linear_value_head_dim
    keys = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    if part == "conv1d.weight":
        return [("ssm_conv1d.weight", np.concatenate((values[:keys, 0], _apart(values[keys:, 0], width, config))))]
    if part == "in_proj_qkv.weight":
        return [("attn_qkv.weight", np.concatenate((values[:keys], _apart(values[keys:], width, config))))]
    if part == "out_proj.weight":
        return [("ssm_out.weight", np.ascontiguousarray(_apart(values.T, width, config).T))]
    if part == "in_proj_z.weight":
        return [("attn_gate.weight", _apart(values, width, config))]
    if part == "A_log":
        return [("ssm_a", _apart(-np.exp(values), 1, config))]
    names = {"in_proj_b.weight": "ssm_beta.weight", "in_proj_a.weight": "ssm_alpha.weight", "dt_bias": "ssm_dt.bias"}
    return [(names[part], _apart(values, 1, config))]


def _apart(values: Array, width: int, config: Any) -> Array:  # noqa: ANN401
    """values: [value heads * width, ...], of which neighbours share a key head."""
    by_head = values.reshape(config.linear_num_key_heads, -1, width, *values.shape[1:])
    return by_head.swapaxes(0, 1).reshape(values.shape)


def _with_more(write: Write) -> Write:
    """Return what writes the same of a file in which another layer, behind the others, guesses tokens."""

    def written(writer: gguf.GGUFWriter, config: Any) -> None:  # noqa: ANN401
        write(writer, config)
        writer.add_nextn_predict_layers(1)
        if config.model_type == "nemotron_h":  # lists by layer count the other one, too, which has both
            kinds = [*config.layer_types, "moe"]
            writer.add_feed_forward_length([config.moe_intermediate_size if kind == "moe" else 0 for kind in kinds])
            _by_layer(writer, config, [*config.layer_types, FULL])

    return written


# Multiplied by powers of two, matrices are rounded as the others are.
_BY_POWERS_OF_TWO = {
    "tie_word_embeddings": False,
    "lm_head_multiplier": 0.5,
    "embedding_multiplier": 2.0,
    "mlp_multipliers": [0.5, 0.25],
    "key_multiplier": 0.25,
    "attention_in_multiplier": 0.5,
    "attention_out_multiplier": 2.0,
    "ssm_multipliers": [0.5, 2.0, 0.25, 1.0, 4.0],
    "ssm_in_multiplier": 0.5,
    "ssm_out_multiplier": 4.0,
}
# llama.cpp has keys and values of the same size in delta nets.
_OF_DELTA = {
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "num_hidden_layers": 4,
    "layer_types": [*["linear_attention"] * 3, FULL],
}
_EXPANDED = {"mamba_expand": 2}  # llama.cpp knows no other
_IN_GROUPS_OF_32 = {**_OF_DELTA, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
_QWEN = {"changes": _of_3_5, "norms_plus": 1.0, "gain": 6.0}
STATE_CASES = {
    "falcon-h1": zoo_case(MODEL_ARCH.FALCON_H1, "falcon-h1", _falcon, changes=_of_falcon, shape=_BY_POWERS_OF_TWO),
    "granitehybrid": zoo_case(
        MODEL_ARCH.GRANITE_HYBRID, "granite-hybrid", _granite, changes=_of_granite, permutes=True, shape=_EXPANDED
    ),
    "granitehybrid-dense": zoo_case(
        MODEL_ARCH.GRANITE_HYBRID,
        "granite-hybrid-dense",
        _granite,
        changes=_of_granite,
        permutes=True,
        shape={**_EXPANDED, "position_embedding_type": "nope"},
    ),
    "granite-4": zoo_case(MODEL_ARCH.GRANITE, "granite-4-attention", _granite, changes=_of_granite, permutes=True),
    "lfm2": zoo_case(MODEL_ARCH.LFM2, "lfm2", _lfm2, changes=_of_lfm2, shape={"conv_bias": False}),
    "lfm2moe": zoo_case(
        MODEL_ARCH.LFM2MOE, "lfm2-moe", _lfm2_moe, changes=_of_lfm2, shape={"routed_scaling_factor": 1.0}
    ),
    **{
        name: zoo_case(arch, family, _nemotron, changes=_of_nemotron, permutes=True, prefix="backbone.")
        for name, arch, family in (
            ("nemotron_h", MODEL_ARCH.NEMOTRON_H, "nemotron-h"),
            ("nemotron_h_moe", MODEL_ARCH.NEMOTRON_H_MOE, "nemotron-h-moe"),
            ("nemotron_h_moe-latent", MODEL_ARCH.NEMOTRON_H_MOE, "nemotron-h-latent"),
        )
    },
    "nemotron_h_moe-more": zoo_case(
        MODEL_ARCH.NEMOTRON_H_MOE,
        "nemotron-h-moe",
        _with_more(_nemotron),
        changes=_of_nemotron,
        permutes=True,
        prefix="backbone.",
        num_more=1,
    ),
    "qwen3next": zoo_case(
        MODEL_ARCH.QWEN3NEXT, "qwen3-next", _delta, **{**_QWEN, "changes": _of_next}, shape=_IN_GROUPS_OF_32
    ),
    "qwen35": zoo_case(MODEL_ARCH.QWEN35, "qwen3.5", _delta, **_QWEN, shape=_OF_DELTA),
    "qwen35-more": zoo_case(MODEL_ARCH.QWEN35, "qwen3.5", _with_more(_delta), **_QWEN, shape=_OF_DELTA, num_more=1),
    "qwen35moe": zoo_case(MODEL_ARCH.QWEN35MOE, "qwen3.5-moe", _delta, **_QWEN, shape=_IN_GROUPS_OF_32),
}
# Heads that are no whole groups of codes: the file's groups have other inputs than those of a matrix rounded before.
NARROW = replace(STATE_CASES["qwen35"], shape={**_OF_DELTA, "linear_key_head_dim": 16, "linear_value_head_dim": 16})
