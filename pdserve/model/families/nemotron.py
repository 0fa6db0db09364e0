"""Nemotron-4 and Minitron (NVIDIA 2024): layer norms by 1 + weight, no gate, and half of each head turns."""

from pdserve.model.design import Activation, Design, Head, LayerNorm, PlainMlp, SelfAttention, Sequential
from pdserve.model.families.reading import Family, activation, repeated
from pdserve.model.fields import Fields
from pdserve.model.rope_config import read_rope


def _read(fields: Fields) -> Design:
    bias = fields.flag("attention_bias", default=False)
    layer = Sequential(
        SelfAttention(read_rope(fields, default_share=0.5), bias, bias),
        PlainMlp(
            fields.positive("intermediate_size"),
            activation(fields, Activation.SQUARED_RELU),
            fields.flag("mlp_bias", default=False),
        ),
        LayerNorm(fields.number("norm_eps", 1e-5), plus=1.0),
    )
    return Design(repeated(layer, fields), Head(layer.norm))


NEMOTRON = Family(_read)
