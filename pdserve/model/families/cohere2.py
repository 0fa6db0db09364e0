"""Command R7B, Command A (Cohere 2024, 2025): attention and MLP side by side over a layer norm without bias.

Three of four layers have a window and rope of neighbouring features; the fourth sees all tokens, without rope.
"""

from pdserve.model.design import Design, Head, LayerNorm, Parallel, SelfAttention
from pdserve.model.families.reading import Family, layers_by_window, require, swiglu, windows, with_rope
from pdserve.model.fields import Fields
from pdserve.model.rope_config import NO_ROPE, read_rope


def _read(fields: Fields) -> Design:
    require(fields, use_qk_norm=False, use_parallel_block=True, use_gated_activation=True, rotary_pct=1.0)
    require(fields, position_embedding_type="rope_gptj", order_of_interleaved_layers="local_attn_first")
    bias = fields.flag("attention_bias", default=False)
    sliding = Parallel(
        SelfAttention(read_rope(fields, interleaved=True), bias, bias),
        swiglu(fields),
        LayerNorm(fields.number("layer_norm_eps", 1e-5), bias=False),
    )
    full = with_rope(sliding, NO_ROPE)
    every = fields.positive("sliding_window_pattern", 4)
    of_layers = windows(fields, lambda index: (index + 1) % every != 0)
    head = Head(sliding.norm, scale=fields.number("logit_scale", 0.0625))
    return Design(layers_by_window(of_layers, full, sliding), head)


COHERE2 = Family(_read, {"tie_word_embeddings": True, "sliding_window": 4096, "max_position_embeddings": 8192})
