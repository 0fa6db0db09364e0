"""Qwen3-Next (2025) and Qwen3.5 (2026): gated delta nets, and gated attention in each fourth layer.

Norms multiply by 1 + weight. Qwen3-Next has experts, and a shared one with a gate; so have larger models of Qwen3.5,
whose files hold all experts of a layer in two tensors, or each in its own.
"""

from dataclasses import replace

from pdserve.model.design import Activation, Design, Head, HeadNorms, RmsNorm, SelfAttention, Sequential, Stacked
from pdserve.model.families.experts import are_sparse, qwen_experts, with_experts, with_shared
from pdserve.model.families.reading import Family, kinds_of_layers, swiglu
from pdserve.model.fields import Fields
from pdserve.model.rope_config import read_rope
from pdserve.model.state_design import MOST_KEYS, GatedDelta

LINEAR, FULL = "linear_attention", "full_attention"
TURNING = 0.25  # of a head
OF_IMAGES = ("mrope_interleaved", "mrope_section")  # of ropes by several positions, which are alike in text
GUESSING = "mtp."  # begins names of tensors that guess tokens


def _read_next(fields: Fields) -> Design:
    fields.must_be("use_sliding_window", False)
    experts = with_shared(fields, qwen_experts(fields, 512, 10, usual_size=512, normalized=True), usual_size=512)
    return with_experts(_read(fields, by_key_head=True), experts, are_sparse(fields))


def _read_3_5_moe(fields: Fields) -> Design:
    fields.must_be("mlp_only_layers", [])
    fields.must_be("decoder_sparse_step", 1)
    experts = replace(
        with_shared(fields, qwen_experts(fields, 256, 8, usual_size=512, normalized=True), usual_size=512),
        stacked=Stacked("experts.gate_up_proj", "experts.down_proj"),
    )
    return with_experts(_read_3_5(fields), experts, lambda _: True)


def _read_3_5(fields: Fields) -> Design:
    fields.must_be("attn_output_gate", True)
    fields.must_be("mamba_ssm_dtype", "float32")
    fields.flag("mtp_use_dedicated_embeddings", default=False)
    fields.integer("mtp_num_hidden_layers", 0)
    return _read(fields, by_key_head=False)


def _read(fields: Fields, *, by_key_head: bool) -> Design:
    eps, bias = fields.number("rms_norm_eps", 1e-6), fields.flag("attention_bias", default=False)
    norm = RmsNorm(eps, plus=1.0)
    rope = read_rope(fields, default_share=TURNING, inert=() if by_key_head else OF_IMAGES)
    attention = SelfAttention(rope, bias, bias, HeadNorms(eps, plus=1.0), gated=True)
    full = Sequential(attention, swiglu(fields), norm)
    linear = replace(full, attention=_delta(fields, eps, by_key_head=by_key_head))
    interval = fields.positive("full_attention_interval", 4)
    kinds = kinds_of_layers(fields, (FULL, LINEAR), lambda layer: LINEAR if (layer + 1) % interval else FULL)
    return Design(tuple(full if kind == FULL else linear for kind in kinds), Head(norm), guessing=GUESSING)


def _delta(fields: Fields, eps: float, *, by_key_head: bool) -> GatedDelta:
    key_heads, value_heads = fields.positive("linear_num_key_heads", 16), fields.positive("linear_num_value_heads", 32)
    if value_heads % key_heads:
        raise fields.unsupported("linear_num_value_heads", f"a multiple of linear_num_key_heads {key_heads}")
    kernel = fields.positive("linear_conv_kernel_dim", 4)
    if kernel < 2:
        raise fields.unsupported("linear_conv_kernel_dim", "at least 2")
    if (key_dim := fields.positive("linear_key_head_dim", 128)) > MOST_KEYS:
        raise fields.unsupported("linear_key_head_dim", f"at most {MOST_KEYS}")
    return GatedDelta(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=fields.positive("linear_value_head_dim", 128),
        kernel=kernel,
        eps=eps,
        by_key_head=by_key_head,
    )


_SIZES = {"num_key_value_heads": 2, "head_dim": 256, "hidden_act": Activation.SILU}
QWEN3_NEXT = Family(_read_next, {**_SIZES, "intermediate_size": 5632})
QWEN3_5 = Family(_read_3_5, {**_SIZES, "num_key_value_heads": 4})
QWEN3_5_MOE = Family(_read_3_5_moe, {**_SIZES, "intermediate_size": 5632})
