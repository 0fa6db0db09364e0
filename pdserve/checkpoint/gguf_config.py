"""Express a GGUF file's metadata as the config.json its model had on Hugging Face."""

import math
import struct

from pdserve.base.errors import ConfigError
from pdserve.checkpoint.gguf_file import GgufFile
from pdserve.model.fields import Fields

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
ROPE_FACTORS = "rope_freqs.weight"

# Keys with these prefixes change what the model computes: one that nothing reads is an error, but for those below.
STRICT_PREFIXES = ("attention.", "rope.", "expert_")
_OF_SCALING = ("attn_factor", "factor", "finetuned", "original_context_length", "yarn_beta_fast", "yarn_beta_slow")
UNREAD_KEYS = ("expert_used_count", *(f"rope.scaling.{name}" for name in _OF_SCALING))  # by some types of rope

# Llama 3.1's rope: the file keeps only the factors that follow from these and from one `factor`.
LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_ORIGINAL_LENGTH = 1.0, 4.0, 8192


def architecture_of(file: GgufFile) -> str:
    """Return the file's architecture; ConfigError for one we cannot run, or a part of a split file."""
    fields = Fields(file.metadata)
    if fields.integer("split.count", 1) > 1:
        raise fields.unsupported("split.count", "join the parts with llama.cpp's gguf-split first")
    architecture = fields.text("general.architecture")
    if architecture not in ARCHITECTURES:
        raise fields.unsupported("general.architecture", f"one of {', '.join(ARCHITECTURES)}")
    return architecture


def hf_config(file: GgufFile) -> dict[str, object]:
    """Return the mapping `ModelConfig.from_hf` reads; ConfigError names a key that has no counterpart."""
    architecture = architecture_of(file)
    prefix = f"{architecture}."
    fields = Fields({k.removeprefix(prefix): v for k, v in file.metadata.items() if k.startswith(prefix)}, prefix)
    shapes = {tensor.name: tensor.shape for tensor in file.tensors}
    if len(shapes.get("token_embd.weight", ())) != 2:
        raise ConfigError("token_embd.weight: the file has no such matrix")
    window = fields.optional_int("attention.sliding_window")
    is_mistral = architecture == "llama" and window is not None
    tokens = Fields(file.metadata)
    config = {
        "architectures": ["MistralForCausalLM" if is_mistral else ARCHITECTURES[architecture]],
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": fields.integer("embedding_length"),
        "intermediate_size": fields.integer("feed_forward_length"),
        "num_hidden_layers": fields.integer("block_count"),
        "num_attention_heads": fields.integer("attention.head_count"),
        "num_key_value_heads": fields.integer("attention.head_count_kv", fields.integer("attention.head_count")),
        "head_dim": _head_dim(fields),
        "max_position_embeddings": fields.integer("context_length"),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": fields.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(file, fields),
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "mlp_bias": "blk.0.ffn_gate.bias" in shapes,
        "sliding_window": window,
        "bos_token_id": tokens.optional_int("tokenizer.ggml.bos_token_id"),
        "eos_token_id": tokens.optional_int("tokenizer.ggml.eos_token_id"),
    }
    _check_keys(fields, is_llama=architecture == "llama")
    return config


def _check_keys(fields: Fields, *, is_llama: bool) -> None:
    """Raise ConfigError for what has no counterpart in a config.json, once all that has one is read."""
    if fields.integer("expert_count", 0):
        raise fields.unsupported("expert_count", "no mixture of experts")
    if not is_llama and fields.has("attention.sliding_window"):
        raise fields.unsupported("attention.sliding_window", "only with the llama architecture")
    if not fields.flag("attention.causal", default=True):
        raise fields.unsupported("attention.causal", "true")
    for key in fields.unread():
        if key.startswith(STRICT_PREFIXES) and key not in UNREAD_KEYS:
            raise fields.unsupported(key, "no such key")


def _head_dim(fields: Fields) -> int:
    num_heads = fields.positive("attention.head_count")
    rope_dim = fields.optional_int("rope.dimension_count")
    head_dim = fields.integer("attention.key_length", rope_dim or fields.positive("embedding_length") // num_heads)
    if rope_dim not in (None, head_dim):
        raise fields.unsupported("rope.dimension_count", f"the head's {head_dim}")
    if fields.integer("attention.value_length", head_dim) != head_dim:
        raise fields.unsupported("attention.value_length", f"attention.key_length's {head_dim}")
    return head_dim


def _rope_scaling(file: GgufFile, fields: Fields) -> dict[str, object] | None:
    kind = fields.text("rope.scaling.type", "none")
    has_factors = any(tensor.name == ROPE_FACTORS for tensor in file.tensors)
    if has_factors:
        if kind != "none":
            raise fields.unsupported("rope.scaling.type", f"none beside {ROPE_FACTORS}")
        return _llama3_scaling(file, fields)
    match kind:
        case "none":
            return None
        case "linear":
            return {"rope_type": "linear", "factor": fields.number("rope.scaling.factor")}
        case "yarn":
            return _yarn_scaling(fields)
        case _:
            raise fields.unsupported("rope.scaling.type", "none, linear or yarn")


def _yarn_scaling(fields: Fields) -> dict[str, object]:
    if fields.number("rope.scaling.attn_factor", 1.0) != 1.0:
        raise fields.unsupported("rope.scaling.attn_factor", "1.0")
    return {
        "rope_type": "yarn",
        "factor": fields.number("rope.scaling.factor"),
        "original_max_position_embeddings": fields.integer("rope.scaling.original_context_length"),
        "beta_fast": fields.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": fields.number("rope.scaling.yarn_beta_slow", 1.0),
    }


def _llama3_scaling(file: GgufFile, fields: Fields) -> dict[str, object]:
    """Recognize Llama 3.1's rope by the factors that the file has for its frequencies."""
    factors = _read_rope_factors(file)
    theta, factor = fields.number("rope.freq_base", 10000.0), max(factors)
    expected = _llama3_factors(len(factors), theta, factor)
    if len(factors) * 2 != _head_dim(fields) or not all(
        math.isclose(read, wanted, rel_tol=1e-4) for read, wanted in zip(factors, expected, strict=True)
    ):
        raise ConfigError(f"{ROPE_FACTORS}: is not supported (only the factors of Llama 3.1's rope)")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LLAMA3_LOW,
        "high_freq_factor": LLAMA3_HIGH,
        "original_max_position_embeddings": LLAMA3_ORIGINAL_LENGTH,
    }


def _read_rope_factors(file: GgufFile) -> tuple[float, ...]:
    tensor = next(tensor for tensor in file.tensors if tensor.name == ROPE_FACTORS)
    if tensor.kind != 0 or len(tensor.shape) != 1 or not tensor.shape[0]:
        raise ConfigError(f"{ROPE_FACTORS}: is not a vector of float32")
    layout = f"<{tensor.shape[0]}f"
    with file.path.open("rb") as data:
        data.seek(tensor.offset_bytes)
        raw = data.read(struct.calcsize(layout))
    if len(raw) != struct.calcsize(layout):
        raise ConfigError(f"{ROPE_FACTORS}: the file ends within it")
    return struct.unpack(layout, raw)


def _llama3_factors(num_frequencies: int, theta: float, factor: float) -> list[float]:
    factors = []
    for index in range(num_frequencies):
        wavelength = 2 * math.pi * theta ** (index / num_frequencies)
        turns = LLAMA3_ORIGINAL_LENGTH / wavelength
        smooth = min(1.0, max(0.0, (turns - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW)))
        factors.append(1.0 / ((1.0 - smooth) / factor + smooth))
    return factors
