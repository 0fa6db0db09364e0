"""Mixtures of experts (Shazeer et al. 2017) over attention that other families have.

Mixtral (Jiang et al. 2024), Qwen2-MoE and Qwen3-MoE weigh experts by softmax. GLM-4.5 and MiniMax-M2 (2025) score them
by sigmoid, as DeepSeek-V3 does, and choose by scores and a bias.
OLMoE (Muennighoff et al. 2024) has the norms of q and k of OLMo 2.
"""

from collections.abc import Callable
from dataclasses import replace

from pdserve.kernels.routing import MOST_EXPERTS, Routing
from pdserve.model.design import (
    Activation,
    Design,
    Experts,
    GatedMlp,
    Head,
    HeadNorms,
    Mlp,
    RmsNorm,
    SelfAttention,
    Sequential,
    WideNorms,
)
from pdserve.model.families import llama
from pdserve.model.families.reading import Family, activation, repeated, require, swiglu
from pdserve.model.fields import Fields
from pdserve.model.rope_config import read_rope

IN_MIXTRAL = ("w1", "w3", "w2")  # gate, up and down


def _read_mixtral(fields: Fields) -> Design:
    pass_over_training(fields)
    count = num_experts(fields, "num_local_experts", 8)
    experts = Experts(
        count,
        replace(swiglu(fields), names=IN_MIXTRAL),
        Routing(num_chosen(fields, count, 2)),
        block="block_sparse_moe",
    )
    return with_experts(llama.MISTRAL.read(fields), experts, lambda _: True)


def _read_qwen3(fields: Fields) -> Design:
    return with_experts(llama.QWEN3.read(fields), qwen_experts(fields, 128, 8), are_sparse(fields))


def _read_qwen2(fields: Fields) -> Design:
    require(fields, qkv_bias=True)
    experts = with_shared(fields, qwen_experts(fields, 60, 4), usual_size=5632)
    return with_experts(llama.QWEN2.read(fields), experts, are_sparse(fields))


def with_shared(fields: Fields, experts: Experts, usual_size: int) -> Experts:
    """Return experts with the shared one of Qwen2-MoE."""
    shared = GatedMlp(fields.positive("shared_expert_intermediate_size", usual_size))
    return replace(experts, shared=shared, shared_name="shared_expert", shared_gate="shared_expert_gate")


def qwen_experts(
    fields: Fields, usual_count: int, usually_chosen: int, usual_size: int = 1408, *, normalized: bool = False
) -> Experts:
    """Read the experts of Qwen's models, without a shared one. normalized: where the config does not say."""
    pass_over_training(fields)
    activation(fields, Activation.SILU)
    count = num_experts(fields, "num_experts" if fields.has("num_experts") else "num_local_experts", usual_count)
    routing = Routing(
        num_chosen(fields, count, usually_chosen), normalized=fields.flag("norm_topk_prob", default=normalized)
    )
    return Experts(count, GatedMlp(fields.positive("moe_intermediate_size", usual_size)), routing)


def are_sparse(fields: Fields) -> Callable[[int], bool]:
    """Return what says of a layer whether it has experts."""
    dense = fields.numbers("mlp_only_layers") if fields.has("mlp_only_layers") else ()
    step = fields.positive("decoder_sparse_step", 1)
    return lambda index: index not in dense and (index + 1) % step == 0


def _read_glm4(fields: Fields) -> Design:
    pass_over_training(fields)
    eps, bias = fields.number("rms_norm_eps", 1e-5), fields.flag("attention_bias", default=False)
    norms = HeadNorms(eps) if fields.flag("use_qk_norm", default=False) else None
    attention = SelfAttention(read_rope(fields, default_share=0.5), bias, qk_norm=norms)
    layer = Sequential(attention, swiglu(fields), RmsNorm(eps))
    first = fields.integer("first_k_dense_replace", 1)
    design = Design((layer,) * fields.num_layers, Head(layer.norm), num_more_layers=num_more(fields))
    return with_experts(design, scored_experts(fields), lambda index: index >= first)


def scored_experts(fields: Fields) -> Experts:
    """Read the experts of DeepSeek-V3 and GLM-4.5."""
    count = num_experts(fields, "n_routed_experts", 128)
    inner, num_shared = fields.positive("moe_intermediate_size", 1408), fields.integer("n_shared_experts", 1)
    groups = expert_groups(fields, count)
    routing = Routing(
        num_chosen(fields, count // groups[0] * groups[1], 8),
        by_sigmoid=True,
        bias="gate.e_score_correction_bias",
        groups=groups,
        normalized=fields.flag("norm_topk_prob", default=True),
        scale=fields.number("routed_scaling_factor", 1.0),
    )
    return Experts(count, GatedMlp(inner), routing, GatedMlp(inner * num_shared) if num_shared > 0 else None)


def expert_groups(fields: Fields, count: int) -> tuple[int, int]:
    """Return how many groups so many experts are in, and how many of them a token chooses from."""
    groups = fields.positive("n_group", 1), fields.positive("topk_group", 1)
    if count % groups[0] or groups[1] > groups[0]:
        raise fields.unsupported("n_group", f"a divisor of {count} experts, and not below topk_group")
    return groups


def _read_minimax(fields: Fields) -> Design:
    pass_over_training(fields)
    require(fields, scoring_func="sigmoid", use_qk_norm=True, qk_norm_type="per_layer", use_routing_bias=True)
    require(fields, shared_intermediate_size=0)
    eps, head_dim = fields.number("rms_norm_eps", 1e-6), fields.positive("head_dim")
    share = fields.positive("rotary_dim", head_dim) / head_dim
    count = num_experts(fields, "num_local_experts", 256)
    experts = Experts(
        count,
        replace(swiglu(fields), names=IN_MIXTRAL),
        Routing(num_chosen(fields, count, 8), by_sigmoid=True, bias="e_score_correction_bias"),
        block="block_sparse_moe",
    )
    attention = SelfAttention(read_rope(fields, default_share=share), qk_norm=WideNorms(eps))
    layer = Sequential(attention, experts, RmsNorm(eps))
    return Design((layer,) * fields.num_layers, Head(layer.norm), num_more_layers=num_more(fields))


def _read_olmoe(fields: Fields) -> Design:
    pass_over_training(fields)
    fields.must_be("clip_qkv", None)
    eps, bias = fields.number("rms_norm_eps", 1e-5), fields.flag("attention_bias", default=False)
    count = num_experts(fields, "num_experts", 64)
    routing = Routing(num_chosen(fields, count, 8), normalized=fields.flag("norm_topk_prob", default=False))
    attention = SelfAttention(read_rope(fields), bias, bias, WideNorms(eps))
    layer = Sequential(attention, Experts(count, swiglu(fields), routing), RmsNorm(eps))
    return Design(repeated(layer, fields), Head(layer.norm))


def num_more(fields: Fields) -> int:
    """Return how many layers the file may hold that guess tokens."""
    given = [fields.integer(key, 1) for key in ("num_nextn_predict_layers", "num_mtp_layers", "num_mtp_modules")]
    fields.flag("use_mtp", default=False)
    return max(0, min(MOST_EXPERTS, max(given)))


def with_experts(design: Design, experts: Mlp, has_experts: Callable[[int], bool]) -> Design:
    layers = [replace(layer, mlp=experts) if has_experts(index) else layer for index, layer in enumerate(design.layers)]
    return replace(design, layers=tuple(layers))


def num_experts(fields: Fields, key: str, default: int) -> int:
    return fields.positive(key, default, MOST_EXPERTS)


def num_chosen(fields: Fields, most: int, default: int) -> int:
    return fields.positive("num_experts_per_tok", default, most)


def pass_over_training(fields: Fields) -> None:
    fields.flag("output_router_logits", default=False)
    fields.flag("seq_aux", default=False)
    for key in ("aux_loss_alpha", "router_aux_loss_coef", "router_jitter_noise"):
        fields.optional_number(key)


MIXTRAL = Family(_read_mixtral, {"num_key_value_heads": 8, "sliding_window": None, "rope_theta": 1e6})
QWEN2_MOE = Family(_read_qwen2, {"num_key_value_heads": 16, "sliding_window": 4096})
QWEN3_MOE = Family(_read_qwen3, {"num_key_value_heads": 4, "sliding_window": 4096})
GLM4_MOE = Family(_read_glm4, {"num_key_value_heads": 8})
OLMOE = Family(_read_olmoe)
MINIMAX_M2 = Family(_read_minimax, {"num_key_value_heads": 8, "head_dim": 128, "rope_theta": 5e6})
