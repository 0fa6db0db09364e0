"""Granite 3 (IBM 2024): a Llama with multipliers of embeddings, scores, what layers add, and logits."""

from pdserve.model.design import Design, Embedding, Head, RmsNorm, Scores, SelfAttention, Sequential
from pdserve.model.families.reading import Family, repeated, swiglu
from pdserve.model.fields import Fields
from pdserve.model.rope_config import read_rope


def _read(fields: Fields) -> Design:
    bias = fields.flag("attention_bias", default=False)
    scaling = fields.number("logits_scaling", 1.0)
    if scaling <= 0.0:
        raise fields.unsupported("logits_scaling", "above 0")
    layer = Sequential(
        SelfAttention(read_rope(fields), bias, bias, scores=Scores(fields.number("attention_multiplier", 1.0))),
        swiglu(fields, bias=fields.flag("mlp_bias", default=False)),
        RmsNorm(fields.number("rms_norm_eps", 1e-6)),
        residual_scale=fields.number("residual_multiplier", 1.0),
    )
    return Design(
        repeated(layer, fields),
        Head(layer.norm, scale=1.0 / scaling),
        Embedding(fields.number("embedding_multiplier", 1.0)),
    )


GRANITE = Family(_read)
