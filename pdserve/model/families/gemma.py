"""Gemma (Gemma team 2024): norms multiply by 1 + weight, the gate is GELU, and embeddings are scaled by √hidden.

Gemma 2 adds norms after attention and MLP, a window in each second layer, and soft caps of scores and logits. Gemma 3
has norms of q and k in place of the caps, a window in five of six layers, and a faster rope where there is a window.
"""

import math
from dataclasses import replace

from pdserve.model.design import (
    Activation,
    Around,
    Design,
    Embedding,
    GatedMlp,
    Head,
    HeadNorms,
    RmsNorm,
    Scores,
    SelfAttention,
    Sequential,
)
from pdserve.model.families.reading import Family, activation, layers_by_window, repeated, require, windows
from pdserve.model.fields import Fields
from pdserve.model.rope_config import RopeConfig, read_rope, read_ropes

SCORE_CAP, LOGIT_CAP = 50.0, 30.0  # Gemma 2's, where its config does not say


def _read(fields: Fields) -> Design:
    require(fields, hidden_activation=Activation.GELU_TANH.value)
    activation(fields, Activation.GELU_TANH, Activation.GELU)  # either name means the one by tanh
    layer = _layer(fields, read_rope(fields))
    return Design(repeated(layer, fields), Head(layer.norm), _embedding(fields))


def _read_2(fields: Fields) -> Design:
    activation(fields, Activation.GELU_TANH, key="hidden_activation")
    cap = _cap(fields, "attn_logit_softcapping", SCORE_CAP)
    layer = _between_norms(_layer(fields, read_rope(fields), Scores(_scale(fields), soft_cap=cap)))
    of_layers = windows(fields, lambda index: index % 2 == 0)
    head = Head(layer.norm, soft_cap=_cap(fields, "final_logit_softcapping", LOGIT_CAP))
    return Design(layers_by_window(of_layers, layer, layer), head, _embedding(fields))


def _read_3(fields: Fields) -> Design:
    activation(fields, Activation.GELU_TANH, key="hidden_activation")
    require(fields, attn_logit_softcapping=None, final_logit_softcapping=None)
    full, local = read_ropes(fields, "rope_local_base_freq", 1e4)
    layer = _between_norms(_layer(fields, full, Scores(_scale(fields))))
    norms = HeadNorms(layer.norm.eps, plus=1.0)
    assert isinstance(layer.attention, SelfAttention)
    attention = replace(layer.attention, qk_norm=norms)
    layer, sliding = (replace(layer, attention=each) for each in (attention, replace(attention, rope=local)))
    every = fields.positive("sliding_window_pattern", 6)
    of_layers = windows(fields, lambda index: (index + 1) % every != 0)
    return Design(layers_by_window(of_layers, layer, sliding), Head(layer.norm), _embedding(fields))


def _layer(fields: Fields, rope: RopeConfig, scores: Scores = Scores()) -> Sequential:  # noqa: B008 - it is frozen
    require(fields, use_bidirectional_attention=False)
    bias = fields.flag("attention_bias", default=False)
    return Sequential(
        SelfAttention(rope, bias, bias, scores=scores),
        GatedMlp(fields.positive("intermediate_size"), Activation.GELU_TANH),
        RmsNorm(fields.number("rms_norm_eps", 1e-6), plus=1.0),
    )


def _between_norms(layer: Sequential) -> Sequential:
    return replace(
        layer,
        around_attention=Around("input_layernorm", "post_attention_layernorm"),
        around_mlp=Around("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    )


def _embedding(fields: Fields) -> Embedding:
    return Embedding(fields.positive("hidden_size") ** 0.5, rounds_scale=True)


def _scale(fields: Fields) -> float:
    size = fields.number("query_pre_attn_scalar", 256.0)
    if not 0.0 < size < math.inf:
        raise fields.unsupported("query_pre_attn_scalar", "above 0")
    return float(size**-0.5)


def _cap(fields: Fields, key: str, default: float) -> float | None:
    cap = fields.number(key, default) if fields.has(key) or not fields.given(key) else None
    if cap is not None and not 0.0 < cap < math.inf:
        raise fields.unsupported(key, "above 0")
    return cap


_TIED = {"head_dim": 256, "tie_word_embeddings": True}
GEMMA = Family(_read, {"num_key_value_heads": 16, "max_position_embeddings": 8192, **_TIED})
_NEWER = {"num_key_value_heads": 4, "sliding_window": 4096, **_TIED}
GEMMA_2 = Family(_read_2, {"max_position_embeddings": 8192, **_NEWER})
GEMMA_3 = Family(_read_3, {"max_position_embeddings": 131072, "rope_theta": 1e6, **_NEWER})
