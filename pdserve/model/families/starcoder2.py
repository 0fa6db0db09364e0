"""StarCoder2 (Lozhkov et al. 2024): layer norms, biases everywhere, an MLP of GELU without a gate, and a window."""

from pdserve.model.design import Activation, Design, Head, LayerNorm, PlainMlp, Scores, SelfAttention, Sequential
from pdserve.model.families.reading import Family, activation, repeated, require, window
from pdserve.model.fields import Fields
from pdserve.model.rope_config import read_rope


def _read(fields: Fields) -> Design:
    require(fields, mlp_type="default", norm_type="layer_norm")
    bias = fields.flag("use_bias", default=True)
    kind = activation(fields, Activation.GELU_TANH, Activation.GELU)
    layer = Sequential(
        SelfAttention(read_rope(fields), bias, bias, scores=Scores(window=window(fields))),
        PlainMlp(fields.positive("intermediate_size"), kind, bias, "c_fc", "c_proj"),
        LayerNorm(fields.number("norm_epsilon", 1e-5)),
    )
    return Design(repeated(layer, fields), Head(layer.norm))


STARCODER2 = Family(_read, {"num_key_value_heads": 2, "tie_word_embeddings": True})
