"""Granite 3 (IBM 2024): a Llama with multipliers of embeddings, scores, what layers add, and logits; or of experts.

Granite 4 (2025) adds Mamba-2 in place of attention in most layers, and an MLP that all tokens take, with experts or
without.
"""

from dataclasses import replace

from pdserve.kernels.routing import Routing
from pdserve.model.design import (
    Activation,
    Design,
    Embedding,
    Experts,
    GatedMlp,
    Head,
    Layer,
    Mlp,
    Norm,
    RmsNorm,
    Scores,
    SelfAttention,
    Sequential,
    Stacked,
)
from pdserve.model.families.experts import num_chosen, num_experts, pass_over_training
from pdserve.model.families.falcon_h1 import expanded, read_space
from pdserve.model.families.reading import Family, activation, kinds_of_layers, repeated, require, swiglu, with_rope
from pdserve.model.fields import Fields
from pdserve.model.rope_config import NO_ROPE, read_rope

MAMBA, FULL = ("mamba", "linear_attention"), ("attention", "full_attention")  # as older and newer configs name them
POSITIONS = NOPE, ROPE = "nope", "rope"
SHARED_MLP, SHARED = "shared_mlp", ("input_linear", "input_linear", "output_linear")


def _read_dense(fields: Fields) -> Design:
    return _read(fields, swiglu(fields, bias=fields.flag("mlp_bias", default=False)))


def _read_experts(fields: Fields) -> Design:
    pass_over_training(fields)
    return _read(fields, _experts(fields))


def _experts(fields: Fields) -> Experts:
    count = num_experts(fields, "num_local_experts", 8)
    return Experts(
        count,
        swiglu(fields),
        Routing(num_chosen(fields, count, 2)),
        block="block_sparse_moe",
        router="router.layer",
        stacked=Stacked("input_linear.weight", "output_linear.weight"),
    )


def _read_hybrid(fields: Fields) -> Design:
    pass_over_training(fields)
    require(fields, normalization_function="rmsnorm")
    fields.text("init_method", "")
    fields.must_be("position_embedding_type", *POSITIONS)
    shared = GatedMlp(
        fields.positive("shared_intermediate_size", 1024), activation(fields, Activation.SILU), fused=True, names=SHARED
    )
    mlp: Mlp = shared
    if fields.integer("num_local_experts", 8) > 0:
        mlp = replace(_experts(fields), shared=shared, shared_name=SHARED_MLP, shared_is_outside=True)
    else:
        fields.integer("intermediate_size", 0)
        fields.integer("num_experts_per_tok", 0)
    full = replace(_layer(fields, mlp), mlp_name=SHARED_MLP)
    if fields.text("position_embedding_type", NOPE) == NOPE:
        full = with_rope(full, NO_ROPE)
    kinds = kinds_of_layers(fields, (*MAMBA, *FULL), lambda _: MAMBA[0])
    space = replace(full, attention=read_space(fields, expanded(fields), fields.number("rms_norm_eps", 1e-6)))
    return _with_multipliers(fields, tuple([space if kind in MAMBA else full for kind in kinds]), full.norm)


def _read(fields: Fields, mlp: Mlp) -> Design:
    layer = _layer(fields, mlp)
    return _with_multipliers(fields, repeated(layer, fields), layer.norm)


def _layer(fields: Fields, mlp: Mlp) -> Sequential:
    bias = fields.flag("attention_bias", default=False)
    return Sequential(
        SelfAttention(read_rope(fields), bias, bias, scores=Scores(fields.number("attention_multiplier", 1.0))),
        mlp,
        RmsNorm(fields.number("rms_norm_eps", 1e-6)),
        residual_scale=fields.number("residual_multiplier", 1.0),
    )


def _with_multipliers(fields: Fields, layers: tuple[Layer, ...], norm: Norm) -> Design:
    scaling = fields.number("logits_scaling", 1.0)
    if scaling <= 0.0:
        raise fields.unsupported("logits_scaling", "above 0")
    return Design(layers, Head(norm, scale=1.0 / scaling), Embedding(fields.number("embedding_multiplier", 1.0)))


GRANITE = Family(_read_dense)
GRANITE_MOE = Family(_read_experts)
GRANITE_HYBRID = Family(_read_hybrid)
