"""OLMo 2 and 3 (Ai2 2024, 2025): norms after attention and MLP alone, and norms over all heads of q and of k.

OLMo 3 adds a window in three of four layers, where its rope is not scaled.
"""

from pdserve.model.design import Around, Design, Head, RmsNorm, SelfAttention, Sequential, WideNorms
from pdserve.model.families.reading import Family, layers_by_window, repeated, swiglu, windows, with_rope
from pdserve.model.fields import Fields
from pdserve.model.rope_config import RopeConfig, read_rope, read_ropes


def _read(fields: Fields) -> Design:
    layer = _layer(fields, read_rope(fields))
    return Design(repeated(layer, fields), Head(layer.norm))


def _read_3(fields: Fields) -> Design:
    full, local = read_ropes(fields)
    layer = _layer(fields, full)
    sliding = with_rope(layer, local)
    of_layers = windows(fields, lambda index: (index + 1) % 4 != 0)
    return Design(layers_by_window(of_layers, layer, sliding), Head(layer.norm))


def _layer(fields: Fields, rope: RopeConfig) -> Sequential:
    eps, bias = fields.number("rms_norm_eps", 1e-5), fields.flag("attention_bias", default=False)
    return Sequential(
        SelfAttention(rope, bias, bias, WideNorms(eps)),
        swiglu(fields),
        RmsNorm(eps),
        around_attention=Around(None, "post_attention_layernorm"),
        around_mlp=Around(None, "post_feedforward_layernorm"),
    )


OLMO2 = Family(_read)
OLMO3 = Family(_read_3, {"rope_theta": 5e5, "sliding_window": 4096})
