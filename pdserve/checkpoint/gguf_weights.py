"""Read a GGUF file's tensors as the Hugging Face model's."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pdserve.checkpoint.gguf_config import ROPE_FACTORS, architecture_of
from pdserve.checkpoint.gguf_file import GgufFile, GgufTensor
from pdserve.errors import ConfigError
from pdserve.model.config import ModelConfig

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from pdserve.model.groups import Groups

    Array = npt.NDArray[np.float32]
    Bytes = npt.NDArray[np.uint8]

FLOAT_KINDS = (0, 1, 28, 30)  # ggml's numbers of float32, float16, float64 and bfloat16
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def is_quantized(file: GgufFile) -> bool:
    """Return whether a matrix of the file has fewer bits than floats have."""
    return any(tensor.kind not in FLOAT_KINDS for tensor in file.tensors)


def read_weights(
    file: GgufFile, config: ModelConfig, *, keep_coded: bool = False
) -> "Iterator[tuple[str, Array | Groups]]":
    """Yield each tensor under its Hugging Face name, reading one at a time: float32, or as it is coded if kept."""
    import numpy as np  # noqa: PLC0415, the router opens checkpoints without numpy

    raw = np.memmap(file.path, np.uint8, mode="r")
    interleaved_heads = {}
    if architecture_of(file) == "llama":
        interleaved_heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
    for tensor in file.tensors:
        if tensor.name == ROPE_FACTORS:
            continue
        name = hf_name(tensor.name)
        values = _read(raw, tensor, keep_coded=keep_coded and tensor.kind not in FLOAT_KINDS)
        num_heads = interleaved_heads.get(tensor.name.split(".")[-2])
        yield name, values if num_heads is None else values[_halves_apart(tensor.shape[0], num_heads)]


def hf_name(name: str) -> str:
    """Return what Hugging Face calls a tensor; ConfigError for one that no model of the Llama family has."""
    match name.split("."):
        case [part, "weight"] if part in TOP_NAMES:
            return f"{TOP_NAMES[part]}.weight"
        case ["blk", layer, part, "weight" | "bias" as kind] if part in LAYER_NAMES and layer.isdecimal():
            return f"model.layers.{layer}.{LAYER_NAMES[part]}.{kind}"
        case _:
            raise ConfigError(f"{name}: there is no place for such a tensor")


def _read(raw: "Bytes", tensor: GgufTensor, *, keep_coded: bool) -> "Array | Groups":
    import gguf  # noqa: PLC0415, slow to import
    import numpy as np  # noqa: PLC0415

    from pdserve.checkpoint.gguf_groups import read_groups  # noqa: PLC0415 - routers open checkpoints without numpy

    try:
        kind = gguf.GGMLQuantizationType(tensor.kind)
        coded = _coded(raw, tensor, gguf.quant_shape_to_byte_shape(tensor.shape, kind))
        if keep_coded:
            return read_groups(coded, kind)
        values = gguf.dequantize(coded, kind)
    except (ValueError, NotImplementedError) as error:
        raise ConfigError(f"{tensor.name}: type {tensor.kind} cannot be decoded: {error}") from error
    return np.array(values, dtype=np.float32, copy=not values.flags.writeable)


def _coded(raw: "Bytes", tensor: GgufTensor, byte_shape: tuple[int, ...]) -> "Bytes":
    import numpy as np  # noqa: PLC0415, the router opens checkpoints without numpy

    end = tensor.offset_bytes + math.prod(byte_shape)
    if end > raw.size:
        raise ConfigError(f"{tensor.name}: the file ends within it, {end - raw.size} bytes too early; fetch it again")
    return np.asarray(raw[tensor.offset_bytes : end]).reshape(byte_shape)


def _halves_apart(num_rows: int, num_heads: int) -> "npt.NDArray[np.int64]":
    """Return the order of a matrix's rows in which each head has Hugging Face's two halves.

    GGUF keeps the rows that rope turns together side by side; Hugging Face keeps them half a head apart.
    """
    import numpy as np  # noqa: PLC0415, the router opens checkpoints without numpy

    pairs = np.arange(num_rows, dtype=np.int64).reshape(num_heads, num_rows // num_heads // 2, 2)
    return pairs.swapaxes(1, 2).reshape(-1)
