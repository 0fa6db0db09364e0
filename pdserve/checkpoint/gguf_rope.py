"""Express the rope of a GGUF file as the `rope_parameters` of a config.json."""

import math
import struct

from pdserve.base.errors import ConfigError
from pdserve.checkpoint.gguf_file import GgufFile
from pdserve.model.fields import Fields

FACTORS = "rope_freqs.weight"  # one for each frequency, in contexts of any length
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"
DEFAULT_THETA = 10000.0
ORIGINAL_LENGTH = "rope.scaling.original_context_length"

# The ropes of Llama 3.1 and of Llama 4: files keep only the factors that follow from these and from one `factor`.
LLAMA3_LOW, LLAMA3_HIGHS, LLAMA3_ORIGINAL_LENGTH = 1.0, (4.0, 1.0), 8192


def rope_parameters(file: GgufFile, fields: Fields, head_dim: int, *, long_rope: bool) -> dict[str, object]:
    """Return the rope that the metadata and the factors among the tensors describe.

    fields: the metadata without the architecture's prefix. long_rope: factors for short contexts may be there.
    """
    turning = fields.integer("rope.dimension_count", head_dim)
    if not 1 <= turning <= head_dim:
        raise fields.unsupported("rope.dimension_count", f"1 to the head's {head_dim}")
    # The next float above the quotient: its product with head_dim is not rounded to below `turning`.
    share = 1.0 if turning == head_dim else math.nextafter(turning / head_dim, 1.0)
    theta = fields.number("rope.freq_base", DEFAULT_THETA)
    scaling = _scaling(file, fields, turning, long_rope=long_rope)
    return {"rope_theta": theta, **({} if share == 1.0 else {"partial_rotary_factor": share}), **scaling}


def _scaling(file: GgufFile, fields: Fields, turning: int, *, long_rope: bool) -> dict[str, object]:
    kind = fields.text("rope.scaling.type", "none")
    given = [name for name in (FACTORS, SHORT_FACTORS) if any(tensor.name == name for tensor in file.tensors)]
    if given and kind not in ("none", "longrope" if SHORT_FACTORS in given else "none"):
        raise fields.unsupported("rope.scaling.type", f"none beside {given[0]}")
    if FACTORS in given:
        return _llama3(file, fields, turning)
    if SHORT_FACTORS in given and long_rope:
        return _longrope(file, fields)
    match kind:
        case "none":
            return {"rope_type": "default"}
        case "linear":
            return {"rope_type": "linear", "factor": fields.number("rope.scaling.factor")}
        case "yarn":
            return _yarn(fields)
        case _:
            raise fields.unsupported("rope.scaling.type", "none, linear or yarn")


def _yarn(fields: Fields) -> dict[str, object]:
    if fields.number("rope.scaling.attn_factor", 1.0) != 1.0:
        raise fields.unsupported("rope.scaling.attn_factor", "1.0")
    factor = fields.optional_number("rope.scaling.yarn_attn_factor")  # where the config had one
    return {
        "rope_type": "yarn",
        "factor": fields.number("rope.scaling.factor"),
        "original_max_position_embeddings": fields.integer(ORIGINAL_LENGTH),
        "beta_fast": fields.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": fields.number("rope.scaling.yarn_beta_slow", 1.0),
        **({} if factor is None else {"attention_factor": factor}),
    }


def _longrope(file: GgufFile, fields: Fields) -> dict[str, object]:
    factor = fields.optional_number("rope.scaling.attn_factor")
    return {
        "rope_type": "longrope",
        "short_factor": read_factors(file, SHORT_FACTORS),
        "long_factor": read_factors(file, LONG_FACTORS),
        "original_max_position_embeddings": fields.integer(ORIGINAL_LENGTH),
        **({} if factor is None else {"attention_factor": factor}),
    }


def _llama3(file: GgufFile, fields: Fields, turning: int) -> dict[str, object]:
    """Recognize the rope of Llama 3.1 or of Llama 4 by the factors that the file has for its frequencies."""
    factors = read_factors(file, FACTORS)
    theta, factor = fields.number("rope.freq_base", DEFAULT_THETA), max(factors)
    for high in LLAMA3_HIGHS:
        expected = _llama3_factors(len(factors), theta, factor, high)
        pairs = zip(factors, expected, strict=True)
        if len(factors) * 2 == turning and all(math.isclose(*pair, rel_tol=1e-4) for pair in pairs):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": LLAMA3_LOW,
                "high_freq_factor": high,
                "original_max_position_embeddings": LLAMA3_ORIGINAL_LENGTH,
            }
    raise ConfigError(f"{FACTORS}: is not supported (only the factors of the ropes of Llama 3.1 and of Llama 4)")


def read_factors(file: GgufFile, name: str) -> tuple[float, ...]:
    """Return the vector of this name; ConfigError if there is none, or it is not one of float32."""
    tensor = next((tensor for tensor in file.tensors if tensor.name == name), None)
    if tensor is None:
        raise ConfigError(f"{name}: the file has no such vector")
    if tensor.kind != 0 or len(tensor.shape) != 1 or not tensor.shape[0]:
        raise ConfigError(f"{name}: is not a vector of float32")
    layout = f"<{tensor.shape[0]}f"
    with file.path.open("rb") as data:
        data.seek(tensor.offset_bytes)
        raw = data.read(struct.calcsize(layout))
    if len(raw) != struct.calcsize(layout):
        raise ConfigError(f"{name}: the file ends within it")
    return struct.unpack(layout, raw)


def _llama3_factors(num_frequencies: int, theta: float, factor: float, high: float) -> list[float]:
    factors = []
    for index in range(num_frequencies):
        wavelength = 2 * math.pi * theta ** (index / num_frequencies)
        turns, span = LLAMA3_ORIGINAL_LENGTH / wavelength, high - LLAMA3_LOW
        smooth = float(turns > high) if span == 0.0 else min(1.0, max(0.0, (turns - LLAMA3_LOW) / span))
        factors.append(1.0 / ((1.0 - smooth) / factor + smooth))
    return factors
