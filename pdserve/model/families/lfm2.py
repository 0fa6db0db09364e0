"""LFM2 (Liquid AI, 2025): gated convolutions over few tokens, and attention in some layers; LFM2-MoE has experts."""

from dataclasses import replace

from pdserve.kernels.routing import Routing
from pdserve.model.design import Around, Design, Experts, GatedMlp, Head, HeadNorms, RmsNorm, SelfAttention, Sequential
from pdserve.model.families.experts import num_chosen, num_experts, pass_over_training, with_experts
from pdserve.model.families.reading import Family, kinds_of_layers, require
from pdserve.model.fields import Fields
from pdserve.model.rope_config import read_rope
from pdserve.model.state_design import ShortConv

MOST_FACTOR = 64.0
CONV, FULL = "conv", "full_attention"
BLOCK, NAMES = "feed_forward", ("w1", "w3", "w2")


def _read(fields: Fields) -> Design:
    return _with_mlps_of(fields, _inner_size(fields))


def _read_moe(fields: Fields) -> Design:
    pass_over_training(fields)
    design = _with_mlps_of(fields, fields.positive("intermediate_size", 7168))
    first = fields.integer("num_dense_layers", 2)
    count = num_experts(fields, "num_experts", 32)
    routing = Routing(
        num_chosen(fields, count, 4),
        by_sigmoid=True,
        bias="expert_bias" if fields.flag("use_expert_bias", default=True) else None,
        normalized=fields.flag("norm_topk_prob", default=True),
        scale=fields.number("routed_scaling_factor", 1.0),
        added=1e-6,
    )
    expert = GatedMlp(fields.positive("moe_intermediate_size", 1792), names=NAMES)
    return with_experts(design, Experts(count, expert, routing, block=BLOCK), lambda index: index >= first)


def _with_mlps_of(fields: Fields, inner_size: int) -> Design:
    eps, count = fields.number("norm_eps", 1e-5), fields.num_layers
    norms = HeadNorms(eps, "q_layernorm", "k_layernorm")
    full = Sequential(
        SelfAttention(read_rope(fields), qk_norm=norms, o="out_proj"),
        GatedMlp(inner_size, names=NAMES),
        RmsNorm(eps),
        around_attention=Around("operator_norm"),
        around_mlp=Around("ffn_norm"),
        mlp_name=BLOCK,
    )
    hidden, kernel = fields.positive("hidden_size"), fields.positive("conv_L_cache", 3)
    if kernel < 2:
        raise fields.unsupported("conv_L_cache", "at least 2")
    _pass_over_twins(fields, hidden, eps)
    conv = replace(full, attention=ShortConv(hidden, kernel, fields.flag("conv_bias", default=False)))
    attending = fields.numbers("full_attn_idxs") if fields.has("full_attn_idxs") else range(count)
    kinds = kinds_of_layers(fields, (FULL, CONV), lambda layer: FULL if layer in attending else CONV)
    layers = tuple(full if kind == FULL else conv for kind in kinds)
    return Design(layers, Head(full.norm, "model.embedding_norm"))


def _pass_over_twins(fields: Fields, hidden_size: int, eps: float) -> None:
    """Raise ConfigError if keys that say again what others say, as published configs have them, say something else."""
    require(fields, block_dim=hidden_size, conv_dim=hidden_size, conv_dim_out=hidden_size, block_norm_eps=eps)
    require(fields, num_heads=fields.positive("num_attention_heads"), theta=fields.number("rope_theta", 1e6))
    require(fields, block_use_swiglu=True, use_pos_enc=True)
    for key in ("block_mlp_init_scale", "block_out_init_scale"):
        fields.optional_number(key)
    for key in ("block_use_xavier_init", "conv_use_xavier_init"):
        fields.flag(key, default=True)


def _inner_size(fields: Fields) -> int:
    """Return how many features the MLPs have; the config states another number, unless it says that this is it."""
    size = fields.positive("block_ff_dim", fields.positive("intermediate_size", 12288))
    multiple, factor = fields.positive("block_multiple_of", 256), fields.number("block_ffn_dim_multiplier", 1.0)
    if not fields.flag("block_auto_adjust_ff_dim", default=True):
        return size
    if not 0.0 < factor <= MOST_FACTOR:
        raise fields.unsupported("block_ffn_dim_multiplier", f"above 0 and at most {MOST_FACTOR:g}")
    size = max(1, int(factor * int(2 * size / 3)))
    return -(-size // multiple) * multiple


LFM2 = Family(_read, {"tie_word_embeddings": True, "rope_theta": 1e6, "num_key_value_heads": 8})
LFM2_MOE = Family(_read_moe, LFM2.defaults)
