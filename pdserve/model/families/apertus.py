"""Apertus (Swiss AI 2025): norms of q and k, and an MLP of xIELU without a gate."""

from pdserve.model.design import (
    Activation,
    Around,
    Design,
    Head,
    HeadNorms,
    PlainMlp,
    RmsNorm,
    SelfAttention,
    Sequential,
)
from pdserve.model.families.reading import Family, activation, repeated, require
from pdserve.model.fields import Fields
from pdserve.model.rope_config import Llama3Rope, RopeConfig, read_rope

_SCALING = Llama3Rope(8.0, 1.0, 4.0, 8192)  # of a config that has none


def _read(fields: Fields) -> Design:
    require(fields, mlp_bias=False, post_norm=False, qk_norm=True)
    eps, bias = fields.number("rms_norm_eps", 1e-5), fields.flag("attention_bias", default=False)
    if fields.has("rope_parameters") or fields.has("rope_scaling"):
        rope = read_rope(fields)
    else:
        rope = RopeConfig(fields.number("rope_theta"), _SCALING)
    layer = Sequential(
        SelfAttention(rope, bias, bias, HeadNorms(eps)),
        PlainMlp(fields.positive("intermediate_size"), activation(fields, Activation.XIELU)),
        RmsNorm(eps),
        around_attention=Around("attention_layernorm"),
        around_mlp=Around("feedforward_layernorm"),
    )
    return Design(repeated(layer, fields), Head(layer.norm))


APERTUS = Family(_read, {"rope_theta": 12e6, "max_position_embeddings": 65536})
