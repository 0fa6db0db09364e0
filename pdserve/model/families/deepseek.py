"""Latent attention and experts: DeepSeek-V2 and V3 (2024), GLM-4.7-Flash (2026).

DeepSeek-V2 weighs experts by softmax, the others by sigmoid. Kimi K2 has DeepSeek-V3's architecture.
"""

import math
from collections.abc import Callable

from pdserve.kernels.routing import Routing
from pdserve.model.design import Design, Experts, GatedMlp, Head, LatentAttention, RmsNorm, Scores, Sequential
from pdserve.model.families.experts import (
    expert_groups,
    num_chosen,
    num_experts,
    num_more,
    pass_over_training,
    scored_experts,
    with_experts,
)
from pdserve.model.families.reading import Family, require, swiglu
from pdserve.model.fields import Fields
from pdserve.model.rope_config import read_rope


def _read_v3(fields: Fields) -> Design:
    require(fields, moe_layer_freq=1, scoring_func="sigmoid", topk_method="noaux_tc")
    first = fields.integer("first_k_dense_replace", 3)
    return _with_experts(fields, scored_experts(fields), lambda index: index >= first)


def _read_v2(fields: Fields) -> Design:
    require(fields, moe_layer_freq=1, scoring_func="softmax", norm_topk_prob=False, mlp_bias=False)
    count, first = num_experts(fields, "n_routed_experts", 64), fields.integer("first_k_dense_replace", 0)
    inner, num_shared = fields.positive("moe_intermediate_size", 1407), fields.positive("n_shared_experts", 2)
    scale = fields.number("routed_scaling_factor", 1.0)
    groups = _groups(fields, count)
    most = count // groups[0] * groups[1]
    routing = Routing(num_chosen(fields, most, 6), groups=groups, group_best=1, normalized=False, scale=scale)
    experts = Experts(count, GatedMlp(inner), routing, GatedMlp(inner * num_shared))
    return _with_experts(fields, experts, lambda index: index >= first)


def _groups(fields: Fields, count: int) -> tuple[int, int]:
    """Return how many groups of experts there are, and how many of them a token chooses from: by their best ones."""
    method = fields.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise fields.unsupported("topk_method", "greedy or group_limited_greedy")
    if method == "greedy":
        fields.optional_int("n_group")
        fields.optional_int("topk_group")
        return 1, 1
    return expert_groups(fields, count)


def _read_glm(fields: Fields) -> Design:
    kinds = fields.texts("mlp_layer_types") or ("dense", *("sparse",) * (fields.num_layers - 1))
    if len(kinds) != fields.num_layers or not {"dense", "sparse"}.issuperset(kinds):
        raise fields.unsupported("mlp_layer_types", f"dense or sparse for each of {fields.num_layers} layers")
    fields.optional_int("first_k_dense_replace")  # as older configs say it
    return _with_experts(fields, scored_experts(fields), lambda index: kinds[index] == "sparse")


def _with_experts(fields: Fields, experts: Experts, has_experts: Callable[[int], bool]) -> Design:
    pass_over_training(fields)
    fields.optional_int("ep_size")  # how others split it
    layer = Sequential(_attention(fields), swiglu(fields), RmsNorm(fields.number("rms_norm_eps", 1e-6)))
    design = Design((layer,) * fields.num_layers, Head(layer.norm), num_more_layers=num_more(fields))
    return with_experts(design, experts, has_experts)


def _attention(fields: Fields) -> LatentAttention:
    rank, turning = fields.positive("kv_lora_rank", 512), fields.positive("qk_rope_head_dim", 64)
    still = fields.positive("qk_nope_head_dim", 128)
    fields.must_be("qk_head_dim", still + turning)
    return LatentAttention(
        rope=read_rope(fields, interleaved=fields.flag("rope_interleave", default=True)),
        q_rank=fields.positive("q_lora_rank") if fields.has("q_lora_rank") else None,
        kv_rank=rank,
        still=still,
        turning=turning,
        value_dim=fields.positive("v_head_dim", 128),
        eps=1e-6,  # whatever that of the other norms is
        bias=fields.flag("attention_bias", default=False),
        scores=Scores((still + turning) ** -0.5 * _sharpening(fields) ** 2),
    )


def _sharpening(fields: Fields) -> float:
    """Return what YaRN multiplies queries and keys with where the config says so: see `rope_config`."""
    rope = fields.section("rope_parameters" if fields.has("rope_parameters") else "rope_scaling")
    of_all = rope.number("mscale_all_dim", 0.0)
    return 0.1 * of_all * math.log(rope.number("factor")) + 1.0 if of_all and rope.number("factor") > 1.0 else 1.0


DEEPSEEK_V2 = Family(_read_v2, {"head_dim": 64, "q_lora_rank": 1536})
DEEPSEEK_V3 = Family(
    _read_v3,
    {
        "head_dim": 64,
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "n_routed_experts": 256,
        "q_lora_rank": 1536,
        "routed_scaling_factor": 2.5,
        "topk_group": 4,
    },
)
GLM4_MOE_LITE = Family(
    _read_glm,
    {
        "head_dim": 64,
        "moe_intermediate_size": 1536,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 1.8,
        "v_head_dim": 256,
    },
)
