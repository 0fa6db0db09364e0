"""Gemma 4 (Gemma team 2026): Gemma 3's layers with heads of another size where layers see all tokens.

In layers with a window all features of a head turn; in the others only the fastest quarter of those that would. Values
have a norm, too, without weights, and in some models are keys before their norm and their rope. A learnt number
multiplies what each layer returns.

In a model with experts, each layer has them beside its MLP. Their router sees the layer's input by a norm of its own.
"""

import math
from dataclasses import replace

from pdserve.kernels.routing import MOST_EXPERTS, Routing
from pdserve.model.design import (
    Activation,
    Around,
    BesideExperts,
    Design,
    Embedding,
    Experts,
    GatedMlp,
    Head,
    HeadNorms,
    RmsNorm,
    Scores,
    SelfAttention,
    Sequential,
    Stacked,
)
from pdserve.model.families.reading import FULL, SLIDING, Family, activation, kinds_of_layers, require
from pdserve.model.fields import Fields
from pdserve.model.kv_heads import Heads
from pdserve.model.rope_config import DEFAULT_THETA, LinearRope, RopeConfig

BEFORE_MLP = "pre_feedforward_layernorm"
OF_EXPERTS = ("num_experts", "top_k_experts", "moe_intermediate_size")
ROPES = (RopeConfig(1e6, share=0.25, is_cut=True), RopeConfig(DEFAULT_THETA))  # where the config does not say


def _read(fields: Fields) -> Design:
    require(fields, use_bidirectional_attention="vision")  # images are not served
    for key in ("hidden_size_per_layer_input", "num_kv_shared_layers"):
        if fields.integer(key, 0 if key.startswith("num") else 256):
            raise fields.unsupported(key, "0")
    _pass_over_unused(fields)
    eps, bias = fields.number("rms_norm_eps", 1e-6), fields.flag("attention_bias", default=False)
    shares_keys = fields.flag("attention_k_eq_v", default=False)
    kinds, window = _kinds(fields), fields.positive("sliding_window", 512)
    (full, sliding), mlp = _ropes(fields), _mlp(fields, eps)
    before_mlp = None if isinstance(mlp, BesideExperts) else BEFORE_MLP
    heads = _heads(fields, kinds, shares_keys=shares_keys)

    def layer(kind: str) -> Sequential:
        is_full = kind == FULL
        attention = SelfAttention(
            full if is_full else sliding,
            bias,
            bias,
            HeadNorms(eps, of_values=True),
            scores=Scores(1.0, None if is_full else window),
            heads=heads[kind],
            has_values=not (is_full and shares_keys),
        )
        return Sequential(
            attention,
            mlp,
            RmsNorm(eps),
            around_attention=Around("input_layernorm", "post_attention_layernorm"),
            around_mlp=Around(before_mlp, "post_feedforward_layernorm"),
            scalar="layer_scalar",
        )

    head = Head(RmsNorm(eps), soft_cap=_cap(fields))
    return Design(tuple(map(layer, kinds)), head, Embedding(fields.positive("hidden_size") ** 0.5, rounds_scale=True))


def _pass_over_unused(fields: Fields) -> None:
    """Look up keys of what is not served, and is not there."""
    for key in ("vocab_size_per_layer_input", *OF_EXPERTS):
        fields.optional_int(key)
    fields.flag("use_double_wide_mlp", default=False)  # of layers that share keys and values


def _kinds(fields: Fields) -> tuple[str, ...]:
    """Return the kind of each layer. The last one sees all tokens, whatever the config says."""
    kinds = kinds_of_layers(fields, (FULL, SLIDING), lambda index: SLIDING if (index + 1) % 6 else FULL)
    return (*kinds[:-1], FULL)


def _mlp(fields: Fields, eps: float) -> GatedMlp | BesideExperts:
    mlp = GatedMlp(
        fields.positive("intermediate_size"), activation(fields, Activation.GELU_TANH, key="hidden_activation")
    )
    if not fields.flag("enable_moe_block", default=False):
        return mlp
    of_all, of_token, inner = OF_EXPERTS
    count = fields.positive(of_all, most=MOST_EXPERTS)
    experts = Experts(
        count,
        replace(mlp, inner_size=fields.positive(inner)),
        Routing(fields.positive(of_token, most=count), shares="router.per_expert_scale"),
        block="",
        router="router.proj",
        stacked=Stacked("experts.gate_up_proj", "experts.down_proj"),
    )
    around = Around(BEFORE_MLP, "post_feedforward_layernorm_1")
    around_experts = Around("pre_feedforward_layernorm_2", "post_feedforward_layernorm_2")
    return BesideExperts(mlp, experts, RmsNorm(eps), (around, around_experts), "router.scale")


def _heads(fields: Fields, kinds: tuple[str, ...], *, shares_keys: bool) -> dict[str, Heads]:
    """Return the heads of keys and values of each kind of layer."""
    sliding = Heads(fields.positive("num_key_value_heads"), fields.positive("head_dim"))
    if fields.has("per_layer_config"):
        return {SLIDING: sliding, FULL: _whole_heads(fields, kinds, sliding)}
    count = fields.positive("num_global_key_value_heads", sliding.num_kv_heads)  # which counts with `shares_keys` alone
    whole = Heads(count if shares_keys else sliding.num_kv_heads, fields.positive("global_head_dim", 512))
    _check(fields, "num_global_key_value_heads", whole)
    return {SLIDING: sliding, FULL: whole}


def _whole_heads(fields: Fields, kinds: tuple[str, ...], usual: Heads) -> Heads:
    """Return the heads of layers that see all tokens, as transformers writes them: for each layer."""
    section, found = fields.section("per_layer_config"), set[Heads]()
    fields.skip("global_head_dim")
    fields.skip("num_global_key_value_heads")
    for index, kind in enumerate(kinds):
        own = section.section(str(index))
        heads = Heads(own.positive("num_key_value_heads", usual.num_kv_heads), own.positive("head_dim", usual.head_dim))
        if own.unread() or (kind == SLIDING and heads != usual):
            raise section.unsupported(str(index), "head_dim and num_key_value_heads, of layers that see all tokens")
        if kind == FULL:
            found.add(heads)
    if len(found) > 1 or section.unread():
        raise fields.unsupported("per_layer_config", f"the same for all layers of {len(kinds)} that see all tokens")
    (whole,) = found
    _check(fields, "per_layer_config", whole)
    return whole


def _check(fields: Fields, key: str, heads: Heads) -> None:
    num_heads = fields.positive("num_attention_heads")
    if num_heads % heads.num_kv_heads or heads.head_dim % 2:
        raise fields.unsupported(key, f"a divisor of {num_heads} heads, and an even number of features")


def _ropes(fields: Fields) -> tuple[RopeConfig, RopeConfig]:
    """Return the ropes of layers that see all tokens and of those with a window."""
    if not fields.has("rope_parameters"):
        return ROPES
    section = fields.section("rope_parameters")
    full, sliding = _rope(section.section(FULL)), _rope(section.section(SLIDING))
    if sliding.is_cut or section.unread():
        raise fields.unsupported("rope_parameters", f"{FULL} and {SLIDING}, whose type is default")
    return full, sliding


def _rope(section: Fields) -> RopeConfig:
    kind, theta = section.text("rope_type", "default"), section.number("rope_theta", DEFAULT_THETA)
    match kind:
        case "default":
            section.must_be("partial_rotary_factor", 1.0)
            rope = RopeConfig(theta)
        case "proportional":
            share, factor = section.number("partial_rotary_factor", 1.0), section.number("factor", 1.0)
            if not 0.0 < share <= 1.0:
                raise section.unsupported("partial_rotary_factor", "above 0 and at most 1")
            rope = RopeConfig(theta, None if factor == 1.0 else LinearRope(factor), share, is_cut=True)
        case _:
            raise section.unsupported("rope_type", "default or proportional")
    if unread := section.unread():
        raise section.unsupported(unread[0], "this rope has no such key")
    return rope


def _cap(fields: Fields) -> float | None:
    cap = fields.optional_number("final_logit_softcapping")
    if cap is not None and not 0.0 < cap < math.inf:
        raise fields.unsupported("final_logit_softcapping", "above 0")
    return cap


GEMMA_4 = Family(
    _read,
    {
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 512,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
)
