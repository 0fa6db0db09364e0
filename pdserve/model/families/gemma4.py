"""Gemma 4 (Gemma team 2026): Gemma 3's layers with heads of another size where layers see all tokens.

In layers with a window all features of a head turn; in the others only the fastest quarter of those that would. Values
have a norm, too, without weights, and in some models are keys before their norm and their rope. A learnt number
multiplies what each layer returns.

In a model with experts, each layer has them beside its MLP. Their router sees the layer's input by a norm of its own.

In the small models (E2B, E4B), the last layers attend to keys and values of the last layer of their kind before them,
and may have MLPs of twice the size. Each layer gets a row of its own of each token.
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
from pdserve.model.input_design import LayerInputs
from pdserve.model.kv_heads import Heads
from pdserve.model.rope_config import DEFAULT_THETA, LinearRope, RopeConfig

BEFORE_MLP = "pre_feedforward_layernorm"
SCALAR = "layer_scalar"
OF_TABLE, DEFAULT_VOCAB = "vocab_size_per_layer_input", 262144
OF_EXPERTS = ("num_experts", "top_k_experts", "moe_intermediate_size")
ROPES = (RopeConfig(1e6, share=0.25, is_cut=True), RopeConfig(DEFAULT_THETA))  # where the config does not say


def _read(fields: Fields) -> Design:
    require(fields, use_bidirectional_attention="vision")  # images are not served
    for key in OF_EXPERTS:
        fields.optional_int(key)  # which may be there without experts
    eps, bias = fields.number("rms_norm_eps", 1e-6), fields.flag("attention_bias", default=False)
    shares_keys = fields.flag("attention_k_eq_v", default=False)
    kinds, window = _kinds(fields), fields.positive("sliding_window", 512)
    (full, sliding), inputs, sources = _ropes(fields), _layer_inputs(fields, eps), _sources(fields, kinds)
    widened = 2 if fields.flag("use_double_wide_mlp", default=False) else 1  # of layers that make no keys and values
    heads = _heads(fields, kinds, shares_keys=shares_keys)

    def layer(kind: str, source: int | None) -> Sequential:
        is_full, reads = kind == FULL, source is not None
        mlp = _mlp(fields, eps, widened if reads else 1)
        before_mlp = None if isinstance(mlp, BesideExperts) else BEFORE_MLP
        attention = SelfAttention(
            full if is_full else sliding,
            bias,
            bias,
            HeadNorms(eps, k=None) if reads else HeadNorms(eps, of_values=True),
            scores=Scores(1.0, None if is_full else window),
            heads=heads[kind],
            has_values=not (is_full and shares_keys),
            reads=source,
        )
        return Sequential(
            attention,
            mlp,
            RmsNorm(eps),
            around_attention=Around("input_layernorm", "post_attention_layernorm"),
            around_mlp=Around(before_mlp, "post_feedforward_layernorm"),
            scalar=SCALAR if inputs is None else None,
        )

    head = Head(RmsNorm(eps), soft_cap=_cap(fields))
    embedding = Embedding(fields.positive("hidden_size") ** 0.5, rounds_scale=True)
    return Design(tuple(map(layer, kinds, sources)), head, embedding, layer_inputs=inputs)


def _layer_inputs(fields: Fields, eps: float) -> LayerInputs | None:
    size, num_rows = fields.integer("hidden_size_per_layer_input", 256), fields.optional_int(OF_TABLE)
    if size == 0:
        return None
    if (num_rows or DEFAULT_VOCAB) != fields.positive("vocab_size"):
        raise fields.unsupported(OF_TABLE, "as many as vocab_size")
    return LayerInputs(fields.positive("hidden_size_per_layer_input", size), _activation(fields), eps, SCALAR)


def _sources(fields: Fields, kinds: tuple[str, ...]) -> tuple[int | None, ...]:
    """Return of each layer whose keys and values it reads: those of the last layer of its kind that makes its own."""
    key, count = "num_kv_shared_layers", len(kinds)
    num_readers = fields.integer(key, 0)
    own = kinds[: count - num_readers]
    if not 0 <= num_readers < count or not set(kinds) <= set(own):
        raise fields.unsupported(key, f"less than {count}, behind a layer of each kind")
    last = {kind: place for place, kind in enumerate(own)}
    return (*[None] * len(own), *[last[kind] for kind in kinds[len(own) :]])


def _kinds(fields: Fields) -> tuple[str, ...]:
    """Return the kind of each layer. The last one sees all tokens, whatever the config says."""
    kinds = kinds_of_layers(fields, (FULL, SLIDING), lambda index: SLIDING if (index + 1) % 6 else FULL)
    return (*kinds[:-1], FULL)


def _activation(fields: Fields) -> Activation:
    return activation(fields, Activation.GELU_TANH, key="hidden_activation")


def _mlp(fields: Fields, eps: float, widened: int) -> GatedMlp | BesideExperts:
    """Return the MLP of a layer. widened: by which factor it is larger than the config says; experts are not."""
    mlp = GatedMlp(widened * fields.positive("intermediate_size"), _activation(fields))
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
