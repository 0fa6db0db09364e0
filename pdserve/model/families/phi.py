"""Phi-1, 1.5 and 2 (Li et al. 2023): attention and MLP side by side after one layer norm, and biases everywhere."""

from pdserve.model.design import Activation, Design, Head, LayerNorm, Parallel, PlainMlp, SelfAttention
from pdserve.model.families.reading import Family, repeated, require
from pdserve.model.fields import Fields
from pdserve.model.rope_config import read_rope


def _read(fields: Fields) -> Design:
    require(fields, hidden_act="gelu_new")  # GELU by tanh
    require(fields, qk_layernorm=False, tie_word_embeddings=False)
    layer = Parallel(
        SelfAttention(read_rope(fields, default_share=0.5), qkv_bias=True, o_bias=True, o="dense"),
        PlainMlp(fields.positive("intermediate_size"), Activation.GELU_TANH, bias=True, up="fc1", down="fc2"),
        LayerNorm(fields.number("layer_norm_eps", 1e-5)),
    )
    return Design(repeated(layer, fields), Head(layer.norm, "model.final_layernorm", bias=True))


PHI = Family(_read)
