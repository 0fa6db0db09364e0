"""GLM-4-0414 (Zhipu 2025): norms before and after attention and MLP; half of each head turns, by neighbours."""

from pdserve.model.design import Around, Design, Head, RmsNorm, SelfAttention, Sequential
from pdserve.model.families.reading import Family, repeated, swiglu
from pdserve.model.fields import Fields
from pdserve.model.rope_config import read_rope


def _read(fields: Fields) -> Design:
    layer = Sequential(
        SelfAttention(
            read_rope(fields, default_share=0.5, interleaved=True), qkv_bias=fields.flag("attention_bias", default=True)
        ),
        swiglu(fields, fused=True),
        RmsNorm(fields.number("rms_norm_eps", 1.5625e-7)),
        around_attention=Around("input_layernorm", "post_self_attn_layernorm"),
        around_mlp=Around("post_attention_layernorm", "post_mlp_layernorm"),
    )
    return Design(repeated(layer, fields), Head(layer.norm))


GLM4 = Family(_read, {"num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072})
