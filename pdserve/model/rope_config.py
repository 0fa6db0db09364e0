"""How positions rotate queries and keys: the rope part of a config.json, checked and typed. Free of torch."""

import math
from dataclasses import dataclass, replace

from pdserve.model.fields import Fields

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
DEFAULT_THETA = 10000.0


@dataclass(frozen=True, slots=True)
class LinearRope:
    """Positions divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """Long wavelengths stretched by `factor`, short ones kept, those between interpolated (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class YarnRope:
    """YaRN (Peng et al. 2023): a ramp between interpolation and extrapolation, and scaled cosines."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    attention_factor: float  # of cosines and sines
    truncate: bool


@dataclass(frozen=True, slots=True)
class LongRope:
    """LongRoPE (Ding et al. 2024) with its factors for short contexts, each feature's own.

    Longer contexts have other factors, and then all keys others. A key in a page would have to be rotated again when
    its sequence passes the original length. So contexts end there.
    """

    short_factors: tuple[float, ...]
    attention_factor: float  # of cosines and sines
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class Growth:
    """Queries of position p are multiplied by 1 + strength * log(1 + floor((p + first) / length)) (Nakanishi 2025)."""

    strength: float
    length: int
    first: int  # what the first position counts as


RopeScaling = LinearRope | Llama3Rope | YarnRope | LongRope


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """How fast the features of a head turn, and which of them turn together."""

    theta: float
    scaling: RopeScaling | None = None
    share: float = 1.0  # of a head's features that turn: its first ones
    interleaved: bool = False  # features 2i and 2i + 1 turn together; else i and i + half of those that turn
    growth: Growth | None = None  # of queries
    is_cut: bool = False  # a rope of whole heads, of which only the fastest features turn, and those half a head on

    def turning(self, head_dim: int) -> int:
        """Return how many features of a head turn."""
        return 2 * int(head_dim * self.share // 2) if self.is_cut else int(head_dim * self.share)

    @property
    def longest_context(self) -> int | None:
        if isinstance(self.scaling, LongRope):
            return self.scaling.original_max_position_embeddings
        return None


NO_ROPE = RopeConfig(theta=1.0, share=0.0)


def read_rope(
    fields: Fields, default_share: float | None = None, *, interleaved: bool = False, inert: tuple[str, ...] = ()
) -> RopeConfig:
    """Read `rope_parameters` (transformers 5) or `rope_scaling` (4); ConfigError for a key that is not known here.

    default_share: of the features that turn where the config does not say; None: all of them always turn.
    inert: keys that change nothing for this family.
    """
    newer, older = fields.section("rope_parameters"), fields.section("rope_scaling")
    section = newer if fields.has("rope_parameters") else older
    for key in inert:
        section.skip(key)
    return _read_section(section, fields, default_share, interleaved)


def read_ropes(
    fields: Fields, local_key: str = "rope_theta", local_theta: float | None = None
) -> tuple[RopeConfig, RopeConfig]:
    """Return the ropes of layers that see all tokens and of those with a window.

    local_key: what older configs call the theta of the latter, which have no scaling there. local_theta: its default;
    None: that of the others.
    """
    newer = fields.section("rope_parameters")
    kinds = ("full_attention", "sliding_attention")
    local = fields.optional_number(local_key) or local_theta
    if not fields.has("rope_parameters"):
        full = read_rope(fields)
        return full, RopeConfig(full.theta if local is None else local)
    full, sliding = (_read_section(newer.section(kind), fields, None, interleaved=False) for kind in kinds)
    if unread := newer.unread():
        raise newer.unsupported(unread[0], f"{kinds[0]} and {kinds[1]}")
    is_given = newer.section(kinds[1]).has("rope_theta")
    return full, sliding if is_given or local is None else replace(sliding, theta=local)


def _read_section(section: Fields, fields: Fields, default_share: float | None, interleaved: bool) -> RopeConfig:
    given = fields.optional_number("partial_rotary_factor")
    otherwise = next(share for share in (given, default_share, 1.0) if share is not None)
    share = section.number("partial_rotary_factor", otherwise)
    served, stated = "1.0" if default_share is None else "above 0 and at most 1", section if given is None else fields
    if not 0.0 < share <= 1.0 or (share != 1.0 and default_share is None):
        raise stated.unsupported("partial_rotary_factor", served)
    theta = section.number("rope_theta", fields.number("rope_theta", DEFAULT_THETA))
    scaling, growth = _scaling(section, fields), None
    section.optional_int("max_position_embeddings")  # which the config says, too
    if strength := section.number("llama_4_scaling_beta", 0.0):
        growth = Growth(strength, section.positive("original_max_position_embeddings"), first=0)
    rope = RopeConfig(theta, scaling, share, interleaved, growth)
    section.flag("finetuned", default=False)  # says how the weights came about
    if unread := section.unread():
        raise section.unsupported(unread[0], "this rope has no such key")
    return rope


def _scaling(section: Fields, fields: Fields) -> RopeScaling | None:
    kind = section.text("rope_type", section.text("type", "default"))
    context = fields.positive("max_position_embeddings", 2048)
    length = section.positive("original_max_position_embeddings", context)
    match kind:
        case "default":
            return None
        case "dynamic":  # changes nothing in contexts up to max_position_embeddings, and longer ones are not served
            section.number("factor")
            return None
        case "linear":
            return LinearRope(section.number("factor"))
        case "llama3":
            return Llama3Rope(
                factor=section.number("factor"),
                low_freq_factor=section.number("low_freq_factor"),
                high_freq_factor=section.number("high_freq_factor"),
                original_max_position_embeddings=length,
            )
        case "yarn":
            return YarnRope(
                factor=section.number("factor"),
                original_max_position_embeddings=length,
                beta_fast=section.number("beta_fast", 32.0),
                beta_slow=section.number("beta_slow", 1.0),
                attention_factor=_yarn_attention_factor(section),
                truncate=section.flag("truncate", default=True),
            )
        case "longrope" | "su":
            return _longrope(section, fields.positive("original_max_position_embeddings", length), context)
        case _:
            given = "rope_type" if section.has("rope_type") else "type"
            raise section.unsupported(given, f"one of {', '.join(ROPE_TYPES)}")


def _yarn_attention_factor(section: Fields) -> float:
    """Return the factor that is given, else that of `mscale` over that of `mscale_all_dim`, else the paper's."""
    factor, given = section.number("factor"), section.optional_number("attention_factor")
    mscale, of_all = section.number("mscale", 0.0), section.number("mscale_all_dim", 0.0)

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    if given is not None:
        return given
    return magnitude(mscale) / magnitude(of_all) if mscale and of_all else magnitude(1.0)


def _longrope(section: Fields, original: int, context: int) -> LongRope:
    section.numbers("long_factor")  # of contexts that are not served
    if original < 2:
        raise section.unsupported("original_max_position_embeddings", "2 or more")
    factor = section.number("factor", context / original)
    otherwise = math.sqrt(1.0 + math.log(factor) / math.log(original)) if factor > 1.0 else 1.0
    return LongRope(section.numbers("short_factor"), section.number("attention_factor", otherwise), original)
