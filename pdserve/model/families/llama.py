"""Llama (Touvron et al. 2023) with Mistral, Qwen2 and Qwen3: RMS norms before attention and a gated MLP, and rope.

Mistral adds a window, Qwen2 biases of q, k and v, Qwen3 norms of q and k.
"""

from pdserve.model.design import Activation, Design, GatedMlp, Head, HeadNorms, RmsNorm, SelfAttention, Sequential
from pdserve.model.families.reading import Family, activation, repeated
from pdserve.model.fields import Fields
from pdserve.model.rope_config import read_rope

MISTRAL_SLIDING_WINDOW = 4096  # what a MistralForCausalLM means when its config has no such key
QWEN_SLIDING_WINDOW = 4096  # the same of a Qwen that uses windows


def _read_llama(fields: Fields) -> Design:
    fields.optional_int("sliding_window")  # a Llama has no window, whatever its config says
    return _read(fields, qkv_bias=_attention_bias(fields), o_bias=_attention_bias(fields))


def _read_mistral(fields: Fields) -> Design:
    window = fields.optional_int("sliding_window") if fields.given("sliding_window") else MISTRAL_SLIDING_WINDOW
    window = None if window is None else fields.positive("sliding_window", window)
    return _read(fields, qkv_bias=_attention_bias(fields), o_bias=_attention_bias(fields), sliding_window=window)


def _read_qwen2(fields: Fields) -> Design:
    _attention_bias(fields)  # q, k and v have biases, whatever the config says
    return _read(fields, qkv_bias=True, o_bias=False, sliding_window=_qwen_window(fields))


def _read_qwen3(fields: Fields) -> Design:
    bias = _attention_bias(fields)
    return _read(fields, qkv_bias=bias, o_bias=bias, qk_norm=True, sliding_window=_qwen_window(fields))


LLAMA, MISTRAL, QWEN2, QWEN3 = map(Family, (_read_llama, _read_mistral, _read_qwen2, _read_qwen3))


def _read(
    fields: Fields, *, qkv_bias: bool, o_bias: bool, qk_norm: bool = False, sliding_window: int | None = None
) -> Design:
    eps = fields.number("rms_norm_eps", 1e-6)
    kind = activation(fields, Activation.SILU, Activation.GELU, Activation.GELU_TANH)
    layer = Sequential(
        SelfAttention(read_rope(fields), qkv_bias, o_bias, HeadNorms(eps) if qk_norm else None),
        GatedMlp(fields.positive("intermediate_size"), kind, fields.flag("mlp_bias", default=False)),
        RmsNorm(eps),
    )
    return Design(repeated(layer, fields), Head(layer.norm), sliding_window=sliding_window)


def _attention_bias(fields: Fields) -> bool:
    return fields.flag("attention_bias", default=False)


def _qwen_window(fields: Fields) -> int | None:
    window, first = fields.optional_int("sliding_window"), fields.integer("max_window_layers", 28)
    kinds = set(fields.texts("layer_types"))
    if not fields.flag("use_sliding_window", default=False):
        return None
    if not kinds:
        layers = range(fields.num_layers)
        kinds = {"sliding_attention" if layer >= first else "full_attention" for layer in layers}
    if kinds == {"full_attention"}:
        return None
    if kinds != {"sliding_attention"}:
        raise fields.unsupported("layer_types", "the same kind of attention in every layer")
    return fields.positive("sliding_window", QWEN_SLIDING_WINDOW if window is None else window)
