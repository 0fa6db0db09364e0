"""Falcon-H1 (TII, 2025): attention and a state space side by side in each layer, and multipliers everywhere."""

import math
from dataclasses import dataclass, replace

from pdserve.model.design import (
    Activation,
    Around,
    Beside,
    Design,
    Embedding,
    GatedMlp,
    Head,
    RmsNorm,
    Scores,
    SelfAttention,
    Sequential,
)
from pdserve.model.families.reading import Family, activation, repeated, require
from pdserve.model.fields import Fields
from pdserve.model.rope_config import read_rope
from pdserve.model.state_design import MOST_KEYS, StateSpace

NO_LIMIT = ([0.0, math.inf], [0.0, {"__float__": "Infinity"}])  # of steps, as configs write it


def _read(fields: Fields) -> Design:
    require(fields, attention_bias=False, mlp_bias=False, projectors_bias=False)
    fields.optional_int("num_logits_to_keep")
    eps = fields.number("rms_norm_eps", 1e-5)
    heads = fields.positive("num_attention_heads")
    head_dim = fields.positive("head_dim", fields.positive("hidden_size") // heads)
    scores = Scores(head_dim**-0.5 * _factor(fields, "key_multiplier"))
    mixer = Beside(
        SelfAttention(read_rope(fields), scores=scores),
        _space(fields, eps),
        (_factor(fields, "attention_in_multiplier"), _factor(fields, "attention_out_multiplier")),
        _factor(fields, "ssm_out_multiplier"),
    )
    layer = Sequential(
        mixer, _mlp(fields), RmsNorm(eps), around_mlp=Around("pre_ff_layernorm"), mlp_name="feed_forward"
    )
    head = Head(layer.norm, "model.final_layernorm", scale=_factor(fields, "lm_head_multiplier"))
    return Design(repeated(layer, fields), head, Embedding(_factor(fields, "embedding_multiplier")))


def _space(fields: Fields, eps: float) -> StateSpace:
    usual = read_space(fields, fields.positive("mamba_d_ssm", expanded(fields)), eps)
    return replace(
        usual,
        eps=eps if fields.flag("mamba_rms_norm", default=False) else None,
        norm_first=fields.flag("mamba_norm_before_gate", default=True),
        input_scale=_factor(fields, "ssm_in_multiplier"),
        scales=_factors(fields, "ssm_multipliers", 5),
    )


def expanded(fields: Fields) -> int:
    """Return how many features a state space has within."""
    return fields.positive("mamba_expand", 2) * fields.positive("hidden_size")


@dataclass(frozen=True, slots=True)
class SpaceKeys:
    """What configs call the sizes of a state space."""

    heads: str = "mamba_n_heads"
    groups: str = "mamba_n_groups"
    kernel: str = "mamba_d_conv"
    state_dim: str = "mamba_d_state"
    conv_bias: str = "mamba_conv_bias"
    chunk: str = "mamba_chunk_size"


USUAL_KEYS = SpaceKeys()


def read_space(fields: Fields, inner: int, eps: float, keys: SpaceKeys = USUAL_KEYS) -> StateSpace:
    """Read a state space of so many features, with a norm of each group behind the gate."""
    fields.must_be("mamba_proj_bias", False)
    fields.must_be("time_step_limit", *NO_LIMIT)
    fields.optional_int(keys.chunk)
    heads, groups = fields.positive(keys.heads, 128), fields.positive(keys.groups, 1)
    if inner % heads or heads % groups:
        raise fields.unsupported(keys.heads, f"a divisor of {inner} features, and a multiple of {groups} groups")
    fields.must_be("mamba_d_head", "auto", inner // heads)
    kernel = fields.positive(keys.kernel, 4)
    if kernel < 2:
        raise fields.unsupported(keys.kernel, "at least 2")
    if (state_dim := fields.positive(keys.state_dim, 256)) > MOST_KEYS:
        raise fields.unsupported(keys.state_dim, f"at most {MOST_KEYS}")
    return StateSpace(
        heads=heads,
        head_dim=inner // heads,
        state_dim=state_dim,
        groups=groups,
        kernel=kernel,
        conv_bias=fields.flag(keys.conv_bias, default=True),
        eps=eps,
        norm_first=False,
    )


def _mlp(fields: Fields) -> GatedMlp:
    """Return the MLP; a multiplier of gates is one of inputs, whose ups are divided by it again behind them."""
    gates, outputs = _factors(fields, "mlp_multipliers", 2)
    kind, inner = activation(fields, Activation.SILU), fields.positive("intermediate_size")
    return GatedMlp(inner, kind, input_scale=gates, output_scale=outputs / gates)


def _factor(fields: Fields, key: str) -> float:
    return _checked(fields, key, fields.number(key, 1.0))


def _factors(fields: Fields, key: str, count: int) -> tuple[float, ...]:
    given = fields.numbers(key) if fields.has(key) else (1.0,) * count
    if len(given) != count:
        raise fields.unsupported(key, f"{count} numbers")
    return tuple(_checked(fields, key, each) for each in given)


def _checked(fields: Fields, key: str, factor: float) -> float:
    if not math.isfinite(factor) or factor == 0.0:
        raise fields.unsupported(key, "finite and not 0")
    return factor


FALCON_H1 = Family(_read, {"num_key_value_heads": 8, "mamba_d_ssm": 1024})
