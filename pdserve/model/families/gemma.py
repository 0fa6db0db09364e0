"""Gemma (Gemma team 2024): norms multiply by 1 + weight, the gate is GELU, and embeddings are scaled by √hidden."""

from pdserve.model.design import Activation, Design, Embedding, GatedMlp, Head, RmsNorm, SelfAttention, Sequential
from pdserve.model.families.reading import Family, activation, repeated, require
from pdserve.model.fields import Fields
from pdserve.model.rope_config import read_rope


def _read(fields: Fields) -> Design:
    require(fields, use_bidirectional_attention=False, hidden_activation=Activation.GELU_TANH.value)
    activation(fields, Activation.GELU_TANH, Activation.GELU)  # either name means the one by tanh
    bias = fields.flag("attention_bias", default=False)
    layer = Sequential(
        SelfAttention(read_rope(fields), bias, bias),
        GatedMlp(fields.positive("intermediate_size"), Activation.GELU_TANH),
        RmsNorm(fields.number("rms_norm_eps", 1e-6), plus=1.0),
    )
    embedding = Embedding(fields.positive("hidden_size") ** 0.5, rounds_scale=True)
    return Design(repeated(layer, fields), Head(layer.norm), embedding)


_DEFAULTS = {"num_key_value_heads": 16, "head_dim": 256, "max_position_embeddings": 8192, "tie_word_embeddings": True}
GEMMA = Family(_read, _DEFAULTS)
