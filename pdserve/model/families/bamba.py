"""Bamba (IBM, Princeton, CMU, UIUC 2024): Mamba-2 in most layers, and attention in some, with rope of half a head."""

from dataclasses import replace

from pdserve.model.design import Around, Design, Head, RmsNorm, SelfAttention, Sequential
from pdserve.model.families.falcon_h1 import expanded, read_space
from pdserve.model.families.reading import Family, require, swiglu
from pdserve.model.fields import Fields
from pdserve.model.rope_config import read_rope

TURNING = 0.5  # of a head


def _read(fields: Fields) -> Design:
    require(fields, mlp_bias=False, use_mamba_kernels=True, output_router_logits=False)
    fields.optional_int("num_logits_to_keep")
    fields.optional_number("z_loss_coefficient")  # of training
    eps, bias = fields.number("rms_norm_eps", 1e-5), fields.flag("attention_bias", default=False)
    head_dim = fields.positive("hidden_size") // fields.positive("num_attention_heads")
    fields.must_be("attn_rotary_emb", int(head_dim * TURNING))
    fields.must_be("partial_rotary_factor", TURNING)
    full = Sequential(
        SelfAttention(read_rope(fields, default_share=TURNING), bias, bias),
        swiglu(fields),
        RmsNorm(eps),
        around_mlp=Around("pre_ff_layernorm"),
        mlp_name="feed_forward",
    )
    space = replace(full, attention=read_space(fields, expanded(fields), eps))
    attending = set(fields.integers("attn_layer_indices"))
    layers = tuple([full if index in attending else space for index in range(fields.num_layers)])
    if full not in layers:
        raise fields.unsupported("attn_layer_indices", "attention in at least one layer")
    return Design(layers, Head(full.norm, "model.final_layernorm"))


BAMBA = Family(_read, {"num_key_value_heads": 8})
