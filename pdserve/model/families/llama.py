"""Llama (Touvron et al. 2023) with Mistral, Qwen2 and Qwen3: RMS norms before attention and a gated MLP, and rope.

Mistral adds a window, Ministral one of some layers, and Ministral 3 queries that grow in long contexts; Qwen2 adds
biases of q, k and v, Qwen3 norms of q and k.
"""

from pdserve.model.design import Activation, Design, GatedMlp, Head, HeadNorms, RmsNorm, SelfAttention, Sequential
from pdserve.model.families.reading import Family, activation, layers_by_window, window, windows
from pdserve.model.fields import Fields
from pdserve.model.rope_config import read_rope

MISTRAL_SLIDING_WINDOW = 4096  # what a MistralForCausalLM means when its config has no such key


def _read_llama(fields: Fields) -> Design:
    fields.optional_int("sliding_window")  # a Llama has no window, whatever its config says
    windows = (None,) * fields.num_layers
    return _read(fields, windows, qkv_bias=_attention_bias(fields), o_bias=_attention_bias(fields))


def _read_mistral(fields: Fields) -> Design:
    size = fields.optional_int("sliding_window") if fields.given("sliding_window") else MISTRAL_SLIDING_WINDOW
    size = None if size is None else fields.positive("sliding_window", size)
    bias = _attention_bias(fields)
    return _read(fields, (size,) * fields.num_layers, qkv_bias=bias, o_bias=bias)


def _read_ministral(fields: Fields) -> Design:
    slides = fields.has("sliding_window") or not fields.given("sliding_window")
    return _read(fields, windows(fields, lambda _: slides), qkv_bias=False, o_bias=False)


def _read_ministral_3(fields: Fields) -> Design:
    return _read(fields, (window(fields),) * fields.num_layers, qkv_bias=False, o_bias=False)


def _read_qwen2(fields: Fields) -> Design:
    _attention_bias(fields)  # q, k and v have biases, whatever the config says
    return _read(fields, _qwen_windows(fields), qkv_bias=True, o_bias=False)


def _read_qwen3(fields: Fields) -> Design:
    bias = _attention_bias(fields)
    return _read(fields, _qwen_windows(fields), qkv_bias=bias, o_bias=bias, qk_norm=True)


LLAMA, MISTRAL = Family(_read_llama), Family(_read_mistral)
QWEN2, QWEN3 = (Family(read, {"sliding_window": 4096}) for read in (_read_qwen2, _read_qwen3))
MINISTRAL_3 = Family(
    _read_ministral_3,
    {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_scaling": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
)
MINISTRAL = Family(_read_ministral, {"num_key_value_heads": 8, "sliding_window": 4096})


def _read(
    fields: Fields, of_layers: tuple[int | None, ...], *, qkv_bias: bool, o_bias: bool, qk_norm: bool = False
) -> Design:
    eps = fields.number("rms_norm_eps", 1e-6)
    kind = activation(fields, Activation.SILU, Activation.GELU, Activation.GELU_TANH)
    layer = Sequential(
        SelfAttention(read_rope(fields), qkv_bias, o_bias, HeadNorms(eps) if qk_norm else None),
        GatedMlp(fields.positive("intermediate_size"), kind, fields.flag("mlp_bias", default=False)),
        RmsNorm(eps),
    )
    return Design(layers_by_window(of_layers, layer, layer), Head(layer.norm))


def _attention_bias(fields: Fields) -> bool:
    return fields.flag("attention_bias", default=False)


def _qwen_windows(fields: Fields) -> tuple[int | None, ...]:
    first = fields.integer("max_window_layers", 28)
    if fields.flag("use_sliding_window", default=False):
        return windows(fields, lambda layer: layer >= first)
    fields.optional_int("sliding_window")
    fields.texts("layer_types")
    return (None,) * fields.num_layers
