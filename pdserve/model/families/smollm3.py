"""SmolLM3 (Hugging Face 2025): a Llama without rope in each fourth layer (Yang et al. 2025, RNoPE)."""

from pdserve.model.design import Design, Head, RmsNorm, SelfAttention, Sequential
from pdserve.model.families.reading import Family, require, rotating, swiglu, with_rope
from pdserve.model.fields import Fields
from pdserve.model.rope_config import NO_ROPE, read_rope


def _read(fields: Fields) -> Design:
    require(fields, use_sliding_window=False)  # windows would be those of the layers without rope alone
    fields.optional_int("sliding_window")
    fields.optional_int("max_window_layers")
    if set(fields.texts("layer_types")) - {"full_attention"}:
        raise fields.unsupported("layer_types", "full_attention in every layer")
    bias = fields.flag("attention_bias", default=False)
    layer = Sequential(
        SelfAttention(read_rope(fields), bias, bias),
        swiglu(fields, bias=fields.flag("mlp_bias", default=False)),
        RmsNorm(fields.number("rms_norm_eps", 1e-6)),
    )
    unrotated = with_rope(layer, NO_ROPE)
    return Design(tuple(layer if rotates else unrotated for rotates in rotating(fields)), Head(layer.norm))


SMOLLM3 = Family(_read, {"rope_theta": 2e6, "tie_word_embeddings": True, "num_key_value_heads": 4})
