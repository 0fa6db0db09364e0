"""DeepSeek-V3 (2024), and models of its architecture, such as Kimi K2: latent attention, and experts by sigmoid."""

import math
from dataclasses import replace

from pdserve.model.design import Design, Head, LatentAttention, RmsNorm, Scores, Sequential
from pdserve.model.families.experts import num_more, pass_over_training, scored_experts, with_experts
from pdserve.model.families.reading import Family, swiglu
from pdserve.model.fields import Fields
from pdserve.model.rope_config import RopeConfig, read_rope


def _read(fields: Fields) -> Design:
    eps = fields.number("rms_norm_eps", 1e-6)
    layer = Sequential(_attention(fields), swiglu(fields), RmsNorm(eps))
    first = fields.integer("first_k_dense_replace", 3)
    fields.must_be("moe_layer_freq", 1)
    fields.must_be("scoring_func", "sigmoid")
    fields.must_be("topk_method", "noaux_tc")
    fields.optional_int("ep_size")  # how others split it
    pass_over_training(fields)
    design = Design((layer,) * fields.num_layers, Head(layer.norm), num_more_layers=num_more(fields))
    return with_experts(design, scored_experts(fields), lambda index: index >= first)


def _attention(fields: Fields) -> LatentAttention:
    rank, turning = fields.positive("kv_lora_rank", 512), fields.positive("qk_rope_head_dim", 64)
    still = fields.positive("qk_nope_head_dim", 128)
    fields.must_be("qk_head_dim", still + turning)
    rope = read_rope(fields, interleaved=fields.flag("rope_interleave", default=True))
    return LatentAttention(
        rope=_of_the_first(turning, rank + turning, rope),
        q_rank=fields.positive("q_lora_rank") if fields.has("q_lora_rank") else None,
        kv_rank=rank,
        still=still,
        turning=turning,
        value_dim=fields.positive("v_head_dim", 128),
        eps=1e-6,  # whatever that of the other norms is
        bias=fields.flag("attention_bias", default=False),
        scores=Scores((still + turning) ** -0.5 * _sharpening(fields) ** 2),
    )


def _of_the_first(turning: int, width: int, rope: RopeConfig) -> RopeConfig:
    """Return the rope of the first features of a row, of so many."""
    share = 1.0 if turning == width else math.nextafter(turning / width, 1.0)  # whose product is not rounded down
    return replace(rope, share=share)


def _sharpening(fields: Fields) -> float:
    """Return what YaRN multiplies queries and keys with where the config says so: see `rope_config`."""
    rope = fields.section("rope_parameters" if fields.has("rope_parameters") else "rope_scaling")
    of_all = rope.number("mscale_all_dim", 0.0)
    return 0.1 * of_all * math.log(rope.number("factor")) + 1.0 if of_all and rope.number("factor") > 1.0 else 1.0


DEEPSEEK_V3 = Family(
    _read,
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
