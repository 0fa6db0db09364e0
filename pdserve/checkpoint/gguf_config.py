"""Express a GGUF file's metadata as the config.json its model had on Hugging Face."""

from collections.abc import Container, Mapping

from pdserve.base.errors import ConfigError
from pdserve.checkpoint.gguf_families import FAMILIES
from pdserve.checkpoint.gguf_family import FUSED, LAYER_EPSILON, NUM_MORE, RMS_EPSILON, GgufFamily
from pdserve.checkpoint.gguf_file import GgufFile
from pdserve.checkpoint.gguf_latents import SIGMOID, SOFTMAX, latent_config, with_magnitude
from pdserve.checkpoint.gguf_rope import DEFAULT_THETA, rope_parameters
from pdserve.checkpoint.gguf_states import one_for_all_layers, state_config
from pdserve.model.families.reading import FULL, SLIDING
from pdserve.model.fields import Fields

WINDOW, PATTERN, WINDOW_THETA = "attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa"
# Keys that change no result, or do so with others alone. Any other key that nothing reads is refused.
_OF_YARN = ("yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow")
_OF_SCALING = ("attn_factor", "factor", "finetuned", "original_context_length", *_OF_YARN)
UNREAD_KEYS = frozenset(
    {
        *("expert_used_count", "pooling_type", "tensor_data_layout", "vocab_size"),
        *(f"rope.scaling.{name}" for name in _OF_SCALING),  # of other types of rope
    }
)


def architecture_of(file: GgufFile) -> str:
    """Return the file's architecture; ConfigError for one we cannot run, or a part of a split file."""
    fields = Fields(file.metadata)
    if fields.integer("split.count", 1) > 1:
        raise fields.unsupported("split.count", "join the parts with llama.cpp's gguf-split first")
    architecture = fields.text("general.architecture")
    if architecture not in FAMILIES:
        raise fields.unsupported("general.architecture", f"one of {', '.join(FAMILIES)}")
    return architecture


def hf_config(file: GgufFile) -> dict[str, object]:
    """Return the mapping `ModelConfig.from_hf` reads; ConfigError names a key that has no counterpart."""
    architecture = architecture_of(file)
    family, prefix = FAMILIES[architecture], f"{architecture}."
    values = {k.removeprefix(prefix): v for k, v in file.metadata.items() if k.startswith(prefix)}
    fields = Fields(one_for_all_layers(values, family, prefix), prefix)
    shapes = {tensor.name: tensor.shape for tensor in file.tensors}
    if len(shapes.get("token_embd.weight", ())) != 2:
        raise ConfigError("token_embd.weight: the file has no such matrix")
    head_dim, tokens = _head_dim(fields, family), Fields(file.metadata)
    rope = rope_parameters(file, fields, head_dim, long_rope=family.long_rope)
    rope |= family.rope
    rope = with_magnitude(rope, fields) if family.has_latents else rope
    config = {
        "architectures": [family.architecture],
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": fields.integer("embedding_length"),
        "intermediate_size": fields.integer("feed_forward_length", fields.optional_int("expert_feed_forward_length")),
        "num_hidden_layers": fields.integer("block_count"),
        "num_attention_heads": fields.integer("attention.head_count"),
        "num_key_value_heads": fields.integer("attention.head_count_kv", fields.integer("attention.head_count")),
        "head_dim": head_dim,
        "max_position_embeddings": fields.integer("context_length"),
        "rope_parameters": rope,
        "tie_word_embeddings": "output.weight" not in shapes,
        "bos_token_id": tokens.optional_int("tokenizer.ggml.bos_token_id"),
        "eos_token_id": tokens.optional_int("tokenizer.ggml.eos_token_id"),
        **{flag: _has_bias(shapes, part) for flag, part in family.biases.items()},
        **{flag: f"blk.0.{part}.weight" in shapes for flag, part in family.weights.items()},
        **{each.name: fields.number(each.key, each.default) for each in (family.epsilon, *family.numbers)},
        **_windows(fields, family, rope, file.metadata.get(f"{prefix}{PATTERN}")),
        **_scores(fields, family, head_dim),
        **(family.config(fields, shapes) if family.config is not None else {}),
        **state_config(fields, family, shapes),
        **_experts(fields, family),
        **(latent_config(fields, shapes) if family.has_latents else {}),
    }
    _check_keys(fields, family)
    return config


def _has_bias(names: Container[str], part: str) -> bool:
    return f"blk.0.{part}.bias" in names or (part == "attn_q" and f"blk.0.{FUSED}.bias" in names)


def _windows(fields: Fields, family: GgufFamily, rope: Mapping[str, object], pattern: object) -> dict[str, object]:
    """Return what windows change. pattern: which layers have them, or how often one has none."""
    of = family.windows
    if of is None or not (of.required or fields.optional_int(WINDOW)):
        if fields.optional_int(WINDOW):
            windowed = ", ".join(name for name, each in FAMILIES.items() if each.windows)
            raise fields.unsupported(WINDOW, f"only with the architectures {windowed}")
        return {"sliding_window": None} if of else {}
    config: dict[str, object] = {"architectures": [of.architecture], "sliding_window": fields.positive(WINDOW)}
    if of.period is not None:
        config["layer_types"] = _layer_types(fields, pattern, of.period)
    if of.own_rope:
        theta = fields.number(
            WINDOW_THETA, fields.number("rope.freq_base", DEFAULT_THETA) if of.theta is None else of.theta
        )
        local = {"rope_type": "default", "rope_theta": theta}
        config["rope_parameters"] = {FULL: rope, SLIDING: local}
    return config


def _layer_types(fields: Fields, pattern: object, period: int) -> list[str]:
    """Say of each layer whether it has a window."""
    fields.skip(PATTERN)
    count = fields.integer("block_count")
    match pattern:
        case list() if len(pattern) == count and all(isinstance(each, bool) for each in pattern):
            return [SLIDING if each else FULL for each in pattern]
        case None:
            pass
        case int() if pattern > 0 and not isinstance(pattern, bool):
            period = pattern
        case _:
            raise fields.unsupported(PATTERN, f"a number above 0, or true or false for each of {count} layers")
    return [SLIDING if layer % period != period - 1 else FULL for layer in range(count)]


def _scores(fields: Fields, family: GgufFamily, head_dim: int) -> dict[str, object]:
    """Return what scores are scaled by, of which files say nothing."""
    if family.scores_by_share is None:
        return {}
    share = fields.integer("embedding_length") // fields.integer("attention.head_count")
    return {"query_pre_attn_scalar": share if fields.integer("block_count") == family.scores_by_share else head_dim}


def _experts(fields: Fields, family: GgufFamily) -> dict[str, object]:
    """Return what experts change."""
    count, of = fields.integer("expert_count", 0), family.experts
    if not count:
        return {}
    if of is None:
        served = ", ".join(name for name, each in FAMILIES.items() if each.experts)
        raise fields.unsupported("expert_count", f"experts only with the architectures {served}")
    if not family.has_latents:
        fields.must_be("expert_gating_func", SIGMOID if of.by_sigmoid else SOFTMAX)
    config: dict[str, object] = {
        "architectures": [of.architecture],
        of.count: count,
        of.chosen: fields.positive("expert_used_count"),
        of.inner_size: fields.integer("expert_feed_forward_length", fields.integer("feed_forward_length")),
        **{name: number for key, name in of.others.items() if (number := fields.optional_int(key)) is not None},
        **of.own,
    }
    if of.scaled:
        config["routed_scaling_factor"] = fields.number("expert_weights_scale", 1.0)
        config["norm_topk_prob"] = fields.flag("expert_weights_norm", default=False)
    if isinstance(num_more := config.get(NUM_MORE), int):
        config["num_hidden_layers"] = fields.integer("block_count") - num_more
    return config


def _check_keys(fields: Fields, family: GgufFamily) -> None:
    """Raise ConfigError for what has no counterpart in a config.json, once all that has one is read."""
    if not fields.flag("attention.causal", default=True):
        raise fields.unsupported("attention.causal", "true")
    if family.epsilon.key == LAYER_EPSILON:
        fields.optional_number(RMS_EPSILON)  # the converter writes it beside the one that counts
    for key in fields.unread():
        if key not in UNREAD_KEYS and key not in family.inert:
            raise fields.unsupported(key, "no such key")


def _head_dim(fields: Fields, family: GgufFamily) -> int:
    num_heads = fields.positive("attention.head_count")
    rope_dim = fields.optional_int("rope.dimension_count")
    share = fields.positive("embedding_length") // num_heads
    otherwise = share if family.partial_rope else rope_dim or share
    if family.has_latents and rope_dim is not None:
        return rope_dim  # as the config.json says it, which also says how long heads are
    head_dim = fields.integer("attention.key_length", otherwise)
    if rope_dim not in (None, head_dim) and not family.partial_rope:
        raise fields.unsupported("rope.dimension_count", f"the head's {head_dim}")
    if fields.integer("attention.value_length", head_dim) != head_dim:
        raise fields.unsupported("attention.value_length", f"attention.key_length's {head_dim}")
    return head_dim
