"""Phi-3 and Phi-4 (Microsoft 2024): a Llama whose files have q, k and v in one matrix, and gate and up in another."""

from pdserve.model.design import Design, Head, RmsNorm, Scores, SelfAttention, Sequential
from pdserve.model.families.reading import Family, repeated, require, swiglu, window
from pdserve.model.fields import Fields
from pdserve.model.rope_config import read_rope


def _read(fields: Fields) -> Design:
    require(fields, attention_bias=False, mlp_bias=False, lm_head_bias=False, full_attn_mod=1, interpolate_factor=1)
    fields.optional_int("original_max_position_embeddings")  # of a rope that has scaling
    layer = Sequential(
        SelfAttention(read_rope(fields, default_share=1.0), fused=True, scores=Scores(window=window(fields))),
        swiglu(fields, fused=True),
        RmsNorm(fields.number("rms_norm_eps", 1e-5)),
    )
    return Design(repeated(layer, fields), Head(layer.norm))


PHI3 = Family(_read)
