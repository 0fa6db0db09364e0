"""Llama 4, its text part (Meta 2025): experts whose inputs are weighed, and layers without rope that see everything.

Layers with rope see the tokens of their own block of `attention_chunk_size`. In the others, queries grow with their
position, so that attention over long contexts stays as sharp (Nakanishi 2025, scalable softmax).
"""

from dataclasses import replace

from pdserve.kernels.routing import Routing
from pdserve.model.design import (
    Design,
    Experts,
    GatedMlp,
    Head,
    HeadNorms,
    RmsNorm,
    Scores,
    SelfAttention,
    Sequential,
    Stacked,
)
from pdserve.model.families.experts import num_chosen, num_experts, pass_over_training, with_experts
from pdserve.model.families.reading import FULL, Family, kinds_of_layers, rotating, swiglu
from pdserve.model.fields import Fields
from pdserve.model.rope_config import NO_ROPE, Growth, read_rope

CHUNKED = "chunked_attention"


def _read(fields: Fields) -> Design:
    pass_over_training(fields)
    fields.flag("for_llm_compressor", default=False)  # how another tool had the experts apart
    eps, bias = fields.number("rms_norm_eps", 1e-5), fields.flag("attention_bias", default=False)
    norms = HeadNorms(eps, after_rope=True, has_weights=False) if fields.flag("use_qk_norm", default=True) else None
    expert, rotates = swiglu(fields), rotating(fields)
    kinds = kinds_of_layers(fields, (CHUNKED, FULL), lambda layer: CHUNKED if rotates[layer] else FULL)
    block = fields.positive("attention_chunk_size", 8192)
    growth = Growth(fields.number("attn_scale", 0.1), fields.positive("floor_scale", 8192), first=1)
    still = replace(NO_ROPE, growth=growth if fields.truth("attn_temperature_tuning", default=True) else None)
    dense = replace(expert, inner_size=fields.positive("intermediate_size_mlp", 16384))
    rope, norm = read_rope(fields, interleaved=True), RmsNorm(eps)
    layers = []
    for turns, kind in zip(rotates, kinds, strict=True):
        scores = Scores(window=block, aligned=True) if kind == CHUNKED else Scores()
        attention = SelfAttention(rope if turns else still, bias, bias, norms if turns else None, scores=scores)
        layers.append(Sequential(attention, dense, norm, mlp_name="feed_forward"))
    sparse = _sparse(fields)
    return with_experts(Design(tuple(layers), Head(norm)), _experts(fields, expert), lambda layer: layer in sparse)


def _experts(fields: Fields, expert: GatedMlp) -> Experts:
    count = num_experts(fields, "num_local_experts", 16)
    return Experts(
        count,
        expert,
        Routing(num_chosen(fields, count, 1), by_sigmoid=True, normalized=False),
        shared=expert,
        shared_name="shared_expert",
        block="feed_forward",
        router="router",
        stacked=Stacked("experts.gate_up_proj", "experts.down_proj", inputs_first=True),
        weighs_inputs=True,
    )


def _sparse(fields: Fields) -> frozenset[int]:
    """Return the layers with experts."""
    step, count = fields.positive("interleave_moe_layer_step", 1), fields.num_layers
    given = fields.numbers("moe_layers") if fields.has("moe_layers") else range(step - 1, count, step)
    layers = frozenset(map(int, given))
    if not layers.issubset(range(count)):
        raise fields.unsupported("moe_layers", f"places of {count} layers")
    return layers


_DEFAULTS = {"head_dim": 128, "num_key_value_heads": 8, "rope_theta": 5e5, "intermediate_size": 8192}
LLAMA_4 = Family(_read, _DEFAULTS)
