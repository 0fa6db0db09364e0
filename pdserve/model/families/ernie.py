"""Ernie 4.5, the dense ones (Baidu 2025): a Llama whose rope turns neighbouring features."""

from pdserve.model.design import Design, Head, RmsNorm, SelfAttention, Sequential
from pdserve.model.families.reading import Family, repeated, swiglu
from pdserve.model.fields import Fields
from pdserve.model.rope_config import read_rope


def _read(fields: Fields) -> Design:
    bias = fields.flag("use_bias", default=False)
    layer = Sequential(
        SelfAttention(read_rope(fields, interleaved=True), bias, bias),
        swiglu(fields, bias=bias),
        RmsNorm(fields.number("rms_norm_eps", 1e-5)),
    )
    return Design(repeated(layer, fields), Head(layer.norm))


_DEFAULTS = {"num_key_value_heads": 2, "head_dim": 128, "rope_theta": 5e5, "tie_word_embeddings": True}
ERNIE = Family(_read, _DEFAULTS)
