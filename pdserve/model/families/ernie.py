"""Ernie 4.5 (Baidu 2025): a Llama whose rope turns neighbouring features; larger ones have experts, and shared ones."""

from dataclasses import replace

from pdserve.kernels.routing import Routing
from pdserve.model.design import Design, Experts, GatedMlp, Head, RmsNorm, SelfAttention, Sequential
from pdserve.model.families.experts import num_experts, pass_over_training, with_experts
from pdserve.model.families.reading import Family, repeated, require, swiglu
from pdserve.model.fields import Fields
from pdserve.model.rope_config import read_rope

MOST_NORM_MIN = 1e-9  # the least that weights are divided by: no sum of several scores is as small


def _read(fields: Fields) -> Design:
    bias = fields.flag("use_bias", default=False)
    layer = Sequential(
        SelfAttention(read_rope(fields, interleaved=True), bias, bias),
        swiglu(fields, bias=bias),
        RmsNorm(fields.number("rms_norm_eps", 1e-5)),
    )
    return Design(repeated(layer, fields), Head(layer.norm))


def _read_moe(fields: Fields) -> Design:
    pass_over_training(fields)
    require(fields, use_bias=False, moe_gate="topk", moe_gate_act="softmax", moe_use_aux_free=True, use_rmsnorm=True)
    if fields.has("moe_capacity"):
        fields.numbers("moe_capacity")  # of training
    fields.integer("num_nextn_predict_layers", 0)
    if fields.number("moe_norm_min", 1e-12) > MOST_NORM_MIN:
        raise fields.unsupported("moe_norm_min", f"at most {MOST_NORM_MIN:g}")
    count, inner = num_experts(fields, "moe_num_experts", 64), fields.positive("moe_intermediate_size", 1536)
    num_shared, step = fields.integer("moe_num_shared_experts", 2), fields.positive("moe_layer_interval", 1)
    first, last = fields.integer("moe_layer_start_index", 1), fields.integer("moe_layer_end_index", -1)
    last = fields.num_layers - 1 if last == -1 else last
    experts = Experts(
        count,
        GatedMlp(inner),
        Routing(fields.positive("moe_k", 6, count), bias="moe_statics.e_score_correction_bias"),
        GatedMlp(inner * num_shared) if num_shared > 0 else None,
        bias_in_row=True,
    )
    design = with_experts(_read(fields), experts, lambda index: first <= index <= last and (index + 1) % step == 0)
    return replace(design, guessing="model.mtp_")


_DEFAULTS = {"num_key_value_heads": 2, "head_dim": 128, "rope_theta": 5e5, "tie_word_embeddings": True}
ERNIE = Family(_read, _DEFAULTS)
ERNIE_MOE = Family(_read_moe, {**_DEFAULTS, "num_key_value_heads": 4, "head_dim": None})
