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

    Array = npt.NDArray[np.float32]
    Bytes = npt.NDArray[np.uint8]

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


def read_weights(file: GgufFile, config: ModelConfig) -> Iterator[tuple[str, "Array"]]:
    """Yield each tensor as float32 under its Hugging Face name, reading and dequantizing one at a time."""
    import numpy as np  # noqa: PLC0415, the router opens checkpoints without numpy

    raw = np.memmap(file.path, np.uint8, mode="r")
    interleaved_heads = {}
    if architecture_of(file) == "llama":
        interleaved_heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
    for tensor in file.tensors:
        if tensor.name == ROPE_FACTORS:
            continue
        name = hf_name(tensor.name)
        values = _dequantize(raw, tensor)
        num_heads = interleaved_heads.get(tensor.name.split(".")[-2])
        yield name, values if num_heads is None else _undo_interleaving(values, num_heads)


def hf_name(name: str) -> str:
    """Return what Hugging Face calls a tensor; ConfigError for one that no model of the Llama family has."""
    match name.split("."):
        case [part, "weight"] if part in TOP_NAMES:
            return f"{TOP_NAMES[part]}.weight"
        case ["blk", layer, part, "weight" | "bias" as kind] if part in LAYER_NAMES and layer.isdecimal():
            return f"model.layers.{layer}.{LAYER_NAMES[part]}.{kind}"
        case _:
            raise ConfigError(f"{name}: there is no place for such a tensor")


def _dequantize(raw: "Bytes", tensor: GgufTensor) -> "Array":
    import gguf  # noqa: PLC0415, slow to import
    import numpy as np  # noqa: PLC0415

    try:
        kind = gguf.GGMLQuantizationType(tensor.kind)
        byte_shape = gguf.quant_shape_to_byte_shape(tensor.shape, kind)
        end = tensor.offset_bytes + math.prod(byte_shape)
        if end > raw.size:
            raise ConfigError(f"{tensor.name}: the file ends within it; fetch it again")
        coded = np.asarray(raw[tensor.offset_bytes : end]).reshape(byte_shape)
        values = gguf.dequantize(coded, kind)
    except (ValueError, NotImplementedError) as error:
        raise ConfigError(f"{tensor.name}: cannot be dequantized: {error}") from error
    return np.array(values, dtype=np.float32, copy=not values.flags.writeable)


def _undo_interleaving(values: "Array", num_heads: int) -> "Array":
    """Reorder each head's rows to Hugging Face's two halves.

    GGUF keeps the rows that rope turns together side by side; Hugging Face keeps them half a head apart.
    """
    rows = values.shape[0]
    pairs = values.reshape(num_heads, rows // num_heads // 2, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)
