"""Seed-OSS (ByteDance 2025): a Llama with biases of q, k and v."""

from pdserve.model.design import Design, Head, RmsNorm, SelfAttention, Sequential
from pdserve.model.families.reading import Family, repeated, swiglu
from pdserve.model.fields import Fields
from pdserve.model.rope_config import read_rope


def _read(fields: Fields) -> Design:
    qkv_bias = fields.flag("attention_bias", default=True)
    layer = Sequential(
        SelfAttention(read_rope(fields), qkv_bias, fields.flag("attention_out_bias", default=False)),
        swiglu(fields, bias=fields.flag("mlp_bias", default=False)),
        RmsNorm(fields.number("rms_norm_eps", 1e-6)),
    )
    return Design(repeated(layer, fields), Head(layer.norm))


SEED_OSS = Family(_read, {"num_key_value_heads": 8, "head_dim": 128})
