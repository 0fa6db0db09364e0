"""Arcee's AFM (2025): a Llama whose MLP squares what is above zero, and has no gate (So et al. 2021)."""

from pdserve.model.design import Activation, Design, Head, PlainMlp, RmsNorm, SelfAttention, Sequential
from pdserve.model.families.reading import Family, activation, repeated
from pdserve.model.fields import Fields
from pdserve.model.rope_config import read_rope


def _read(fields: Fields) -> Design:
    bias = fields.flag("attention_bias", default=False)
    layer = Sequential(
        SelfAttention(read_rope(fields), bias, bias),
        PlainMlp(
            fields.positive("intermediate_size"),
            activation(fields, Activation.SQUARED_RELU),
            fields.flag("mlp_bias", default=False),
        ),
        RmsNorm(fields.number("rms_norm_eps", 1e-5)),
    )
    return Design(repeated(layer, fields), Head(layer.norm))


ARCEE = Family(_read)
