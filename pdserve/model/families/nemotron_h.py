"""Nemotron-H (NVIDIA 2025): each layer is Mamba-2, attention without rope, or an MLP without a gate.

Nemotron 3 has experts in the place of MLPs; those of Super and Ultra work in a latent space.
"""

from dataclasses import replace

from pdserve.model.design import (
    Activation,
    Around,
    Design,
    Experts,
    Head,
    Latent,
    Mixer,
    Mlp,
    PlainMlp,
    RmsNorm,
    SelfAttention,
    Sequential,
)
from pdserve.model.families.experts import pass_over_training, scored_experts
from pdserve.model.families.falcon_h1 import SpaceKeys, read_space
from pdserve.model.families.reading import Family, activation, require
from pdserve.model.fields import MOST_LAYERS, Fields
from pdserve.model.rope_config import NO_ROPE
from pdserve.model.state_design import StateSpace

MAMBA, FULL, MLP, EXPERTS = "linear_attention", "full_attention", "mlp", "moe"
NAMES = {"M": MAMBA, "mamba": MAMBA, "*": FULL, "attention": FULL, "-": MLP, "E": EXPERTS}  # in older configs
SPACE_KEYS = SpaceKeys("mamba_num_heads", "n_groups", "conv_kernel", "ssm_state_size", "use_conv_bias", "chunk_size")
BLOCK, AROUND = "mixer", Around("norm")


def _read(fields: Fields) -> Design:
    norm = RmsNorm(fields.number("layer_norm_epsilon", 1e-5))
    _pass_over(fields, norm.eps)
    layers = {
        MAMBA: _layer(_space(fields, norm.eps), None, norm),
        FULL: _layer(SelfAttention(NO_ROPE, block=BLOCK), None, norm),
        MLP: _layer(None, _mlp(fields, "intermediate_size"), norm),
        EXPERTS: _layer(None, _experts(fields), norm),
    }
    design = Design(tuple([layers[kind] for kind in _kinds(fields)]), Head(norm, "model.norm_f"), guessing="mtp.")
    fields.must_be("num_hidden_layers", len(design.layers))
    return design


def _layer(mixer: Mixer | None, mlp: Mlp | None, norm: RmsNorm) -> Sequential:
    return Sequential(mixer, mlp, norm, around_attention=AROUND, around_mlp=AROUND, mlp_name=BLOCK)


def _kinds(fields: Fields) -> tuple[str, ...]:
    """Return what each layer is: by a list, or by a pattern that has a character for each of them."""
    pattern = fields.text("hybrid_override_pattern", "")
    given = {key: fields.texts(key) for key in ("layers_block_type", "layer_types")}
    key = next((key for key, names in given.items() if names), "hybrid_override_pattern")
    kinds = tuple([NAMES.get(name, name) for name in given.get(key, tuple(pattern))])
    if not 0 < len(kinds) <= MOST_LAYERS or not {MAMBA, FULL, MLP, EXPERTS}.issuperset(kinds):
        raise fields.unsupported(key, f"{MAMBA}, {FULL}, {MLP} or {EXPERTS} for each of at most {MOST_LAYERS} layers")
    if FULL not in kinds:
        raise fields.unsupported(key, "attention in at least one layer")
    return kinds


def _space(fields: Fields, eps: float) -> StateSpace:
    inner = fields.positive("mamba_num_heads") * fields.positive("mamba_head_dim")
    return replace(read_space(fields, inner, eps, SPACE_KEYS), block=BLOCK)


def _mlp(fields: Fields, size: str) -> PlainMlp:
    kind = activation(fields, Activation.SQUARED_RELU, key="mlp_hidden_act")
    return PlainMlp(fields.positive(size), kind, fields.flag("mlp_bias", default=False))


def _experts(fields: Fields) -> Experts:
    pass_over_training(fields)
    require(fields, n_shared_experts=1)
    expert = replace(_mlp(fields, "moe_intermediate_size"), bias=False)
    shared = _mlp(fields, "moe_shared_expert_intermediate_size")
    experts = replace(scored_experts(fields), expert=expert, shared=shared, block=BLOCK)
    if not fields.has("moe_latent_size"):
        return experts
    require(fields, mlp_bias=False)
    return replace(experts, latent=Latent(fields.positive("moe_latent_size")))


def _pass_over(fields: Fields, eps: float) -> None:
    """Raise ConfigError where a key asks for what is not computed; read keys that change nothing."""
    require(fields, attention_bias=False, use_bias=False, residual_in_fp32=False, tie_word_embeddings=False)
    require(fields, sliding_window=None, mamba_hidden_act="silu", mamba_ssm_cache_dtype="float32")
    require(fields, norm_eps=eps, rms_norm_eps=eps, attention_head_dim=fields.positive("head_dim"))
    for key in ("expand", "num_logits_to_keep", "num_nextn_predict_layers", "time_step_rank"):
        fields.optional_int(key)
    for key in ("partial_rotary_factor", "rope_theta", "time_step_floor", "time_step_max", "time_step_min"):
        fields.optional_number(key)  # of ropes that it has not; the others of training
    for key in ("moe_shared_expert_overlap", "rescale_prenorm_residual", "use_mamba_kernels"):
        fields.flag(key, default=True)
    fields.texts("mtp_layers_block_type")
    fields.text("mtp_hybrid_override_pattern", "")


NEMOTRON_H = Family(
    _read,
    {
        "head_dim": 128,
        "num_key_value_heads": 8,
        "intermediate_size": 21504,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "ssm_state_size": 128,
    },
)
