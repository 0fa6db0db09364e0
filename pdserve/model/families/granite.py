"""Granite 3 (IBM 2024): a Llama with multipliers of embeddings, scores, what layers add, and logits; or of experts."""

from pdserve.kernels.routing import Routing
from pdserve.model.design import (
    Design,
    Embedding,
    Experts,
    Head,
    Mlp,
    RmsNorm,
    Scores,
    SelfAttention,
    Sequential,
    Stacked,
)
from pdserve.model.families.experts import num_chosen, num_experts, pass_over_training
from pdserve.model.families.reading import Family, repeated, swiglu
from pdserve.model.fields import Fields
from pdserve.model.rope_config import read_rope


def _read_dense(fields: Fields) -> Design:
    return _read(fields, swiglu(fields, bias=fields.flag("mlp_bias", default=False)))


def _read_experts(fields: Fields) -> Design:
    pass_over_training(fields)
    count = num_experts(fields, "num_local_experts", 8)
    experts = Experts(
        count,
        swiglu(fields),
        Routing(num_chosen(fields, count, 2)),
        block="block_sparse_moe",
        router="router.layer",
        stacked=Stacked("input_linear.weight", "output_linear.weight"),
    )
    return _read(fields, experts)


def _read(fields: Fields, mlp: Mlp) -> Design:
    bias = fields.flag("attention_bias", default=False)
    scaling = fields.number("logits_scaling", 1.0)
    if scaling <= 0.0:
        raise fields.unsupported("logits_scaling", "above 0")
    layer = Sequential(
        SelfAttention(read_rope(fields), bias, bias, scores=Scores(fields.number("attention_multiplier", 1.0))),
        mlp,
        RmsNorm(fields.number("rms_norm_eps", 1e-6)),
        residual_scale=fields.number("residual_multiplier", 1.0),
    )
    return Design(
        repeated(layer, fields),
        Head(layer.norm, scale=1.0 / scaling),
        Embedding(fields.number("embedding_multiplier", 1.0)),
    )


GRANITE = Family(_read_dense)
GRANITE_MOE = Family(_read_experts)
