"""OLMo 2 (Ai2 2024): norms after attention and MLP alone, and norms over all heads of q and of k."""

from pdserve.model.design import (
    Around,
    Design,
    Head,
    RmsNorm,
    SelfAttention,
    Sequential,
    WideNorms,
)
from pdserve.model.families.reading import Family, repeated, swiglu
from pdserve.model.fields import Fields
from pdserve.model.rope_config import read_rope


def _read(fields: Fields) -> Design:
    eps, bias = fields.number("rms_norm_eps", 1e-5), fields.flag("attention_bias", default=False)
    layer = Sequential(
        SelfAttention(read_rope(fields), bias, bias, WideNorms(eps)),
        swiglu(fields),
        RmsNorm(eps),
        around_attention=Around(None, "post_attention_layernorm"),
        around_mlp=Around(None, "post_feedforward_layernorm"),
    )
    return Design(repeated(layer, fields), Head(layer.norm))


OLMO2 = Family(_read)
