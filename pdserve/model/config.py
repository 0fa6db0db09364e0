"""What a model is made of: the figures of its config.json, checked and typed. Free of torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from pdserve.errors import ConfigError

_Value = TypeVar("_Value")

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
MISTRAL_SLIDING_WINDOW = 4096  # what a MistralForCausalLM means when its config has no such key


class Fields:
    """Typed look-ups in one JSON object; errors name the key. A key that is absent or null counts as not given."""

    def __init__(self, values: Mapping[str, object], within: str = "") -> None:
        self._values = values
        self._within = within

    def given(self, key: str) -> bool:
        """Say whether the key is there at all, even as null."""
        return key in self._values

    def has(self, key: str) -> bool:
        return self._values.get(key) is not None

    def optional_int(self, key: str) -> int | None:
        value = self._values.get(key)
        if isinstance(value, bool) or not isinstance(value, int | None):
            raise self._wrong(key, "an integer")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        return self._or_default(key, self.optional_int(key), default)

    def positive(self, key: str, default: int | None = None) -> int:
        value = self.integer(key, default)
        if value < 1:
            raise self._wrong(key, "a positive integer")
        return value

    def optional_number(self, key: str) -> float | None:
        value = self._values.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float | None):
            raise self._wrong(key, "a number")
        try:
            return None if value is None else float(value)
        except OverflowError as error:
            raise self._wrong(key, "a number that a float can be") from error

    def number(self, key: str, default: float | None = None) -> float:
        return self._or_default(key, self.optional_number(key), default)

    def flag(self, key: str, default: bool) -> bool:
        value = self._values.get(key)
        if not isinstance(value, bool | None):
            raise self._wrong(key, "true or false")
        return default if value is None else value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._values.get(key)
        if not isinstance(value, str | None):
            raise self._wrong(key, "a string")
        return self._or_default(key, value, default)

    def texts(self, key: str) -> tuple[str, ...]:
        value = self._values.get(key)
        if value is None:
            return ()
        if not isinstance(value, list | tuple):
            raise self._wrong(key, "a list of strings")
        return tuple(str(item) for item in value)

    def token_ids(self, key: str) -> tuple[int, ...]:
        """Return the ids of a key that holds one id, a list of them, or nothing."""
        value = self._values.get(key)
        if value is None:
            return ()
        ids = tuple(value) if isinstance(value, list | tuple) else (value,)
        if not all(isinstance(id_, int) and not isinstance(id_, bool) and id_ >= 0 for id_ in ids):
            raise self._wrong(key, "a token id or a list of token ids")
        return ids

    def section(self, key: str) -> "Fields":
        value = self._values.get(key)
        if value is None:
            return Fields({}, f"{self._within}{key}.")
        if not isinstance(value, Mapping):
            raise self._wrong(key, "an object")
        return Fields(value, f"{self._within}{key}.")

    def unsupported(self, key: str, supported: str) -> ConfigError:
        return ConfigError(f"{self._within}{key}: {self._values.get(key)!r} is not supported ({supported})")

    def _or_default(self, key: str, value: _Value | None, default: _Value | None) -> _Value:
        found = default if value is None else value
        if found is None:
            raise ConfigError(f"{self._within}{key}: missing from the model's config")
        return found

    def _wrong(self, key: str, wanted: str) -> ConfigError:
        return ConfigError(f"{self._within}{key}: {self._values.get(key)!r} is not {wanted}")


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
    attention_factor: float | None  # None: derived from `factor`
    truncate: bool


RopeScaling = LinearRope | Llama3Rope | YarnRope


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder-only model of the Llama family."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool  # RMS norm over each head of q and k, before rope
    sliding_window: int | None  # a token sees itself and the window - 1 before it
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: str | None  # of the checkpoint, where it is named

    @classmethod
    def from_hf(cls, config: Mapping[str, object]) -> "ModelConfig":
        """Read a Hugging Face config.json of transformers 4 or 5; ConfigError names the key at fault."""
        fields = Fields(config)
        architecture = _architecture(fields)
        if fields.has("quantization_config"):
            raise fields.unsupported("quantization_config", "only unquantized weights")
        if fields.text("hidden_act", "silu") != "silu":
            raise fields.unsupported("hidden_act", "silu")
        num_heads = fields.positive("num_attention_heads")
        num_kv_heads = fields.positive("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise ConfigError(f"num_key_value_heads: {num_kv_heads} does not divide num_attention_heads {num_heads}")
        hidden_size = fields.positive("hidden_size")
        attention_bias = fields.flag("attention_bias", default=False)
        theta, scaling = _rope(fields)
        bos = fields.token_ids("bos_token_id")
        return cls(
            architecture=architecture,
            vocab_size=fields.positive("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=fields.positive("intermediate_size"),
            num_layers=fields.positive("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=_head_dim(fields, hidden_size, num_heads),
            max_position_embeddings=fields.positive("max_position_embeddings", 2048),
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            tie_word_embeddings=fields.flag("tie_word_embeddings", default=False),
            qkv_bias=architecture == "Qwen2ForCausalLM" or attention_bias,
            o_bias=architecture != "Qwen2ForCausalLM" and attention_bias,
            mlp_bias=fields.flag("mlp_bias", default=False),
            qk_norm=architecture == "Qwen3ForCausalLM",
            sliding_window=_sliding_window(fields, architecture),
            eos_token_ids=fields.token_ids("eos_token_id"),
            bos_token_id=bos[0] if bos else None,
            dtype=fields.text("dtype", fields.text("torch_dtype", "")) or None,
        )


def _architecture(fields: Fields) -> str:
    names = fields.texts("architectures")
    if len(names) != 1 or names[0] not in ARCHITECTURES:
        raise fields.unsupported("architectures", f"one of {', '.join(ARCHITECTURES)}")
    return names[0]


def _head_dim(fields: Fields, hidden_size: int, num_heads: int) -> int:
    if not fields.has("head_dim") and hidden_size % num_heads:
        raise ConfigError(f"num_attention_heads: {num_heads} does not divide hidden_size {hidden_size}")
    head_dim = fields.positive("head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise fields.unsupported("head_dim", "an even number")
    return head_dim


def _sliding_window(fields: Fields, architecture: str) -> int | None:
    if architecture == "LlamaForCausalLM":
        return None
    if architecture == "MistralForCausalLM":
        window = fields.optional_int("sliding_window") if fields.given("sliding_window") else MISTRAL_SLIDING_WINDOW
        return None if window is None else fields.positive("sliding_window", window)
    if not fields.flag("use_sliding_window", default=False):
        return None
    kinds = set(fields.texts("layer_types"))
    if not kinds:
        first, num_layers = fields.integer("max_window_layers", 28), fields.positive("num_hidden_layers")
        kinds = {"sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)}
    if kinds == {"full_attention"}:
        return None
    if kinds != {"sliding_attention"}:
        raise fields.unsupported("layer_types", "the same kind of attention in every layer")
    return fields.positive("sliding_window", 4096)


def _rope(fields: Fields) -> tuple[float, RopeScaling | None]:
    """Return theta and scaling, from `rope_parameters` (transformers 5) or `rope_scaling` (4)."""
    section = fields.section("rope_parameters" if fields.has("rope_parameters") else "rope_scaling")
    theta = section.number("rope_theta", fields.number("rope_theta", 10000.0))
    kind_key = "rope_type" if section.has("rope_type") else "type"
    kind = section.text(kind_key, "default")
    if section.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0)) != 1.0:
        raise section.unsupported("partial_rotary_factor", "1.0")
    match kind:
        case "default":
            return theta, None
        case "linear":
            return theta, LinearRope(section.number("factor"))
        case "llama3":
            return theta, _llama3(section, fields)
        case "yarn":
            return theta, _yarn(section, fields)
        case _:
            raise section.unsupported(kind_key, f"one of {', '.join(ROPE_TYPES)}")


def _original_length(section: Fields, fields: Fields) -> int:
    return section.positive("original_max_position_embeddings", fields.positive("max_position_embeddings", 2048))


def _llama3(section: Fields, fields: Fields) -> Llama3Rope:
    return Llama3Rope(
        factor=section.number("factor"),
        low_freq_factor=section.number("low_freq_factor"),
        high_freq_factor=section.number("high_freq_factor"),
        original_max_position_embeddings=_original_length(section, fields),
    )


def _yarn(section: Fields, fields: Fields) -> YarnRope:
    for key in ("mscale", "mscale_all_dim"):
        if section.has(key):
            raise section.unsupported(key, "leave it out")
    return YarnRope(
        factor=section.number("factor"),
        original_max_position_embeddings=_original_length(section, fields),
        beta_fast=section.number("beta_fast", 32.0),
        beta_slow=section.number("beta_slow", 1.0),
        attention_factor=section.optional_number("attention_factor"),
        truncate=section.flag("truncate", default=True),
    )
