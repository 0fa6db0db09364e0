"""HunYuan, the dense ones (Tencent 2025): a Llama with norms of q and k after rope."""

from pdserve.model.design import Design, Head, HeadNorms, RmsNorm, SelfAttention, Sequential
from pdserve.model.families.reading import Family, repeated, require, swiglu
from pdserve.model.fields import Fields
from pdserve.model.rope_config import DEFAULT_THETA, RopeConfig, read_rope


def _read(fields: Fields) -> Design:
    require(fields, mlp_bias=False, use_cla=False, use_qk_norm=True, use_rotary_pos_emb=True, norm_type="rms")
    fields.optional_int("eod_token_id")
    eps, bias = fields.number("rms_norm_eps", 1e-5), fields.flag("attention_bias", default=False)
    norms = HeadNorms(eps, "query_layernorm", "key_layernorm", after_rope=True)
    layer = Sequential(SelfAttention(_rope(fields), bias, bias, norms), swiglu(fields), RmsNorm(eps))
    return Design(repeated(layer, fields), Head(layer.norm))


def _rope(fields: Fields) -> RopeConfig:
    """Read the rope. With `alpha` it is slower by a constant, and not dynamic, whatever its type says."""
    newer, older = fields.section("rope_parameters"), fields.section("rope_scaling")
    section = newer if fields.has("rope_parameters") else older
    if not section.has("alpha"):
        return read_rope(fields)
    if section.text("rope_type", section.text("type", "dynamic")) != "dynamic":
        raise section.unsupported("alpha", "only with the type dynamic")
    theta, alpha = section.number("rope_theta", fields.number("rope_theta", DEFAULT_THETA)), section.number("alpha")
    if alpha <= 0.0:
        raise section.unsupported("alpha", "above 0")
    for unused in ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
        section.optional_number(unused)
    if unread := section.unread():
        raise section.unsupported(unread[0], "this rope has no such key")
    heads = fields.positive("num_attention_heads")
    head_dim = fields.positive("head_dim", fields.positive("hidden_size") // heads)
    return RopeConfig(theta * alpha ** (head_dim / (head_dim - 2)))


HUNYUAN = Family(_read)
