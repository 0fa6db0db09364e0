"""EXAONE 4 (LG AI Research 2025): norms after attention and MLP alone, and norms of each head of q and of k.

The larger model has a window in three of four layers, and no rope in the fourth. In the smaller one all layers see all
tokens, with rope.
"""

from collections.abc import Callable

from pdserve.model.design import Around, Design, Head, HeadNorms, RmsNorm, SelfAttention, Sequential
from pdserve.model.families.reading import Family, layers_by_window, swiglu, windows, with_rope
from pdserve.model.fields import Fields
from pdserve.model.rope_config import NO_ROPE, read_rope


def _read(fields: Fields) -> Design:
    eps = fields.number("rms_norm_eps", 1e-5)
    sliding = Sequential(
        SelfAttention(read_rope(fields), qk_norm=HeadNorms(eps)),
        swiglu(fields),
        RmsNorm(eps),
        around_attention=Around(None, "post_attention_layernorm"),
        around_mlp=Around(None, "post_feedforward_layernorm"),
    )
    if not fields.has("sliding_window"):
        fields.must_be("sliding_window_pattern", 0)
        return Design(layers_by_window(windows(fields, lambda _: False), sliding, sliding), Head(sliding.norm))
    full = with_rope(sliding, NO_ROPE)
    of_layers = windows(fields, _by_pattern(fields))
    return Design(layers_by_window(of_layers, full, sliding), Head(sliding.norm))


def _by_pattern(fields: Fields) -> Callable[[int], bool]:
    """Return what says of a layer whether it has a window, where `layer_types` does not."""
    if fields.has("layer_types"):
        fields.skip("sliding_window_pattern")  # a number, or letters such as LLLG
        return lambda _: True
    every = fields.positive("sliding_window_pattern", 4)
    return lambda index: (index + 1) % every != 0


EXAONE4 = Family(_read, {"num_key_value_heads": 32, "sliding_window": 4096})
