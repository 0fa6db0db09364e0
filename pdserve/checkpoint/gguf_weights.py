"""Read a GGUF file's tensors as the Hugging Face model's: decoded, or as they are coded.

Block layouts of codes: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

import math
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, dequantize, quant_shape_to_byte_shape
from gguf.quants import Q4_K

from pdserve.base.errors import ConfigError
from pdserve.checkpoint.checkpoint import naming
from pdserve.checkpoint.gguf_config import architecture_of
from pdserve.checkpoint.gguf_families import FAMILIES
from pdserve.checkpoint.gguf_family import CHOOSING, FUSED, NUM_MORE, SHARED_GATE, STACKS, Experts, GgufFamily
from pdserve.checkpoint.gguf_file import GgufFile, GgufTensor
from pdserve.checkpoint.gguf_rope import FACTORS, LONG_FACTORS, SHORT_FACTORS
from pdserve.checkpoint.gguf_state_weights import with_states
from pdserve.model.config import ModelConfig
from pdserve.model.fields import Fields
from pdserve.model.groups import SIGNED_ZERO, Bytes, Floats, Groups, Halves, mxfp4, packed_halves, quantized
from pdserve.model.weights import GROUP, Codes, Part, Stored, Weights

SUPER_GROUP = 256  # inputs of a block of Q4_K
HALF_BYTES = 2  # of a float16
KEYS, VALUES, BOTH = "self_attn.k_b_proj", "self_attn.v_b_proj", "self_attn.kv_b_proj"  # that expand latents
XIELU = ("alpha_p", "alpha_n", "beta", "eps")  # scalars of each layer, which the metadata list by layer


def read_weights(file: GgufFile, config: ModelConfig, *, keep_coded: bool = False) -> Weights:
    """Return each tensor under its Hugging Face name, not read yet: float32, or as it is coded if kept."""
    raw = np.memmap(file.path, np.uint8, mode="r")
    family = FAMILIES[architecture_of(file)]
    interleaved_heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads} if family.interleaved else {}
    of_rope = (FACTORS, SHORT_FACTORS, LONG_FACTORS) if family.long_rope else (FACTORS,)
    weights = _scalars(file, config.num_layers) if family.xielu else {}
    for tensor in _separate(file.tensors, family, config):
        if tensor.name in of_rope or (family.states is not None and _layer_of(tensor.name) >= config.num_layers):
            continue
        name = hf_name(tensor.name, family)
        if name in weights:
            raise ConfigError(f"{tensor.name}: given twice")
        num_heads = interleaved_heads.get(tensor.name.split(".")[-2])
        keeps = keep_coded and tensor.is_quantized and len(tensor.shape) == 2
        minus = family.norms_plus if tensor.name.endswith("norm.weight") and ".ssm_norm." not in tensor.name else 0.0
        reader = _Reader(file.path, raw, tensor, num_heads, keeps, minus)
        weights[name] = Stored(tensor.shape, reader.read, *((GROUP, _codes(tensor)) if keeps else ()))
    weights = _with_whole_expansions(weights)
    return with_states(weights, family, config) if family.states is not None else weights


def _layer_of(name: str) -> int:
    """Return the number of the layer that has a tensor; -1 if none has."""
    match name.split("."):
        case ["blk", layer, *_] if layer.isdecimal():
            return int(layer)
        case _:
            return -1


def _codes(tensor: GgufTensor) -> Codes:
    """Return how `read_groups` codes a tensor."""
    kinds = GGMLQuantizationType
    has_zeros = tensor.kind in (kinds.Q4_1, kinds.Q4_K)
    return Codes(4 if has_zeros or tensor.kind in (kinds.Q4_0, kinds.MXFP4) else 8, GROUP, has_zeros=has_zeros)


def _separate(tensors: Iterable[GgufTensor], family: GgufFamily, config: ModelConfig) -> Iterator[GgufTensor]:
    """Yield the tensors, and q, k and v one by one where a file has them in one though the model has not.

    Rows are coded each on its own, so that q, k and v are neighbours in the file.
    """
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads, "attn_v": config.num_kv_heads}
    for tensor in tensors:
        _, part, kind = ("", "", *tensor.name.split("."))[-3:]
        num_axes = {"weight": 3, "bias": 2}.get(kind)
        if part in STACKS and len(tensor.shape) == num_axes and family.experts is not None:
            yield from _each_expert(tensor)
            continue
        is_row = part == SHARED_GATE or (part == CHOOSING and family.experts is not None and family.experts.bias_in_row)
        if is_row and len(tensor.shape) == 1:
            yield replace(tensor, shape=(1, *tensor.shape))
            continue
        if f".{FUSED}." not in tensor.name or FUSED in family.names:
            yield tensor
            continue
        if tensor.shape[0] != sum(heads.values()) * config.head_dim:
            raise ConfigError(f"{tensor.name}: shape {tensor.shape} is not that of q, k and v")
        offset_bytes = tensor.offset_bytes
        for part, num_heads in heads.items():
            shape = (num_heads * config.head_dim, *tensor.shape[1:])
            yield replace(tensor, name=tensor.name.replace(FUSED, part), shape=shape, offset_bytes=offset_bytes)
            offset_bytes += _num_bytes(tensor, shape)


def _with_whole_expansions(weights: dict[str, Stored]) -> dict[str, Stored]:
    """Return weights in which each layer's matrix that expands latents is one, decoded if it was in two parts."""
    found = dict(weights)
    for name in weights:
        layer, part, kind = name.partition(KEYS)
        if not part:
            continue
        keys, values = found.pop(name), found.pop(f"{layer}{VALUES}{kind}", None)
        if values is None or len(keys.shape) != 3 or keys.shape[:2] != (values.shape[0], values.shape[-1]):
            raise ConfigError(f"{name}: there are no values beside these keys")
        if f"{layer}{BOTH}{kind}" in found:
            raise ConfigError(f"{layer}{BOTH}{kind}: given twice")
        num_heads, rank, still = keys.shape
        shape = (num_heads * (still + values.shape[1]), rank)
        found[f"{layer}{BOTH}{kind}"] = Stored(shape, _Whole(keys, values).read)
    return found


class _Whole:
    """Reads the rows of keys and of values of each head: [num_heads * (still + value_dim), rank]."""

    def __init__(self, keys: Stored, values: Stored) -> None:
        """keys: [num_heads, rank, still]; values: [num_heads, value_dim, rank]."""
        self._keys, self._values = keys, values

    def read(self, part: Part) -> Floats:
        keys, values = (np.asarray(each.read(())) for each in (self._keys, self._values))
        whole: Floats = np.concatenate((keys.swapaxes(1, 2), values), axis=1)
        return np.ascontiguousarray(whole.reshape(-1, whole.shape[-1])[part])


def _each_expert(tensor: GgufTensor) -> Iterator[GgufTensor]:
    """Yield the matrices or biases of all experts of a layer, which are one after the other in the file."""
    count, *shape = tensor.shape
    name, kind = tensor.name.rsplit(".", 1)
    for expert in range(count):
        offset_bytes = tensor.offset_bytes + expert * _num_bytes(tensor, tuple(shape))
        yield replace(tensor, name=f"{name}.{expert}.{kind}", shape=tuple(shape), offset_bytes=offset_bytes)


def _num_bytes(tensor: GgufTensor, shape: tuple[int, ...]) -> int:
    try:
        return math.prod(quant_shape_to_byte_shape(shape, GGMLQuantizationType(tensor.kind)))
    except ValueError as error:
        raise ConfigError(f"{tensor.name}: type {tensor.kind} cannot be decoded: {error}") from error


def _scalars(file: GgufFile, num_layers: int) -> dict[str, Stored]:
    """Return the scalars of xIELU, which are numbers in the metadata and not tensors."""
    fields, stored = Fields(file.metadata), dict[str, Stored]()
    for name in XIELU:
        values = fields.numbers(f"xielu.{name}")
        if len(values) != num_layers:
            raise fields.unsupported(f"xielu.{name}", f"a number for each of {num_layers} layers")
        for layer, value in enumerate(values):
            array = np.array([value], np.float32)
            stored[f"model.layers.{layer}.mlp.act_fn.{name}"] = Stored((1,), array.__getitem__)
    return stored


def check_sizes(file: GgufFile) -> None:
    """Raise ConfigError for a tensor that is coded in a way we do not know, or goes beyond the end of the file."""
    raw = np.memmap(file.path, np.uint8, mode="r")
    for tensor in file.tensors:
        try:
            byte_shape = quant_shape_to_byte_shape(tensor.shape, GGMLQuantizationType(tensor.kind))
        except ValueError as error:
            raise ConfigError(f"{tensor.name}: type {tensor.kind} cannot be decoded: {error}") from error
        _coded(raw, tensor, byte_shape)


def hf_name(name: str, family: GgufFamily) -> str:
    """Return the Hugging Face name of a tensor; ConfigError if no model of the family has such a tensor."""
    match name.split("."):
        case [part, "weight" | "bias" as kind] if part in family.top_names:
            return f"{family.top_names[part]}.{kind}"
        case ["blk", layer, *parts, "weight" | "bias" as kind] if ".".join(parts) in family.names and layer.isdecimal():
            return f"model.layers.{layer}.{family.names['.'.join(parts)]}.{kind}"
        case ["blk", layer, part] | ["blk", layer, part, "weight" | "bias"] if (
            part in family.bare_names and layer.isdecimal()
        ):
            return f"model.layers.{layer}.{family.bare_names[part]}"
        case ["blk", layer, *parts] if family.experts is not None and layer.isdecimal():
            return f"model.layers.{layer}.{_of_experts(name, parts, family.experts)}"
        case _:
            raise ConfigError(f"{name}: there is no place for such a tensor")


def _of_experts(name: str, parts: Seq[str], of: Experts) -> str:
    """Return what a tensor of a layer with experts is called within the layer. parts: of its name behind the layer."""
    match parts:
        case ["ffn_gate_inp", "weight" | "bias" as kind]:
            return f"{of.block}.{of.router}.{kind}"
        case [part, expert, "weight" | "bias" as kind] if part in STACKS:
            return f"{of.block}.experts.{expert}.{of.names[STACKS.index(part)]}.{kind}"
        case ["nextn", _, "weight"] if NUM_MORE in of.others.values():
            return ".".join(parts)
        case _:
            raise ConfigError(f"{name}: there is no place for such a tensor")


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads one tensor of a mapped file, or those of its rows that are asked for."""

    path: Path
    raw: Bytes
    tensor: GgufTensor
    num_heads: int | None  # whose rows are not in Hugging Face's order
    keeps_codes: bool
    minus: float  # subtracted from each number

    def read(self, part: Part) -> Floats | Groups:
        tensor = self.tensor
        with naming(self.path):
            try:
                kind = GGMLQuantizationType(tensor.kind)
                coded = _coded(self.raw, tensor, quant_shape_to_byte_shape(tensor.shape, kind))
                return self._decoded(coded.reshape(tensor.shape[0], -1), kind, part)
            except (ValueError, NotImplementedError) as error:
                raise ConfigError(f"{tensor.name}: type {tensor.kind} cannot be decoded: {error}") from error

    def _decoded(self, rows: Bytes, kind: GGMLQuantizationType, part: Part) -> Floats | Groups:
        """Decode a part. rows: [width, bytes of a row]. Rows are read whole; inputs are cut from them."""
        shape, (wanted, *inputs) = self.tensor.shape, part or (slice(None),)
        rows = rows[wanted if self.num_heads is None else _halves_apart(shape[0], self.num_heads)[wanted]]
        if self.keeps_codes:
            groups = read_groups(rows, kind)
            return groups.of_inputs(*inputs) if inputs else groups
        values = dequantize(rows, kind).reshape(-1, *shape[1:])[(slice(None), *inputs)]
        if self.minus:
            return np.asarray(values, dtype=np.float32) - np.float32(self.minus)
        return np.array(values, dtype=np.float32, copy=not values.flags.writeable)


def _coded(raw: Bytes, tensor: GgufTensor, byte_shape: tuple[int, ...]) -> Bytes:
    end = tensor.offset_bytes + math.prod(byte_shape)
    if end > raw.size:
        raise ConfigError(f"{tensor.name}: the file ends within it, {end - raw.size} bytes too early; fetch it again")
    return np.asarray(raw[tensor.offset_bytes : end]).reshape(byte_shape)


def _halves_apart(num_rows: int, num_heads: int) -> npt.NDArray[np.int64]:
    """Return the order of a matrix's rows in which each head has Hugging Face's two halves.

    GGUF keeps the rows that rope turns together side by side; Hugging Face keeps them half a head apart.
    """
    pairs = np.arange(num_rows, dtype=np.int64).reshape(num_heads, num_rows // num_heads // 2, 2)
    return pairs.swapaxes(1, 2).reshape(-1)


def read_groups(coded: Bytes, kind: GGMLQuantizationType) -> Groups:
    """Return a matrix as it is coded. Codings without an exact counterpart are rounded to 8 bits.

    coded: [width, bytes of a row]. The scales of Q4_K are multiplied out to a float16 for each 32 inputs.
    """
    width = len(coded)
    match kind:
        case GGMLQuantizationType.Q4_0:
            scales, codes = _split(coded, 1, GROUP // 2)
            return Groups(4, codes, scales[0], -SIGNED_ZERO[4] * scales[0])
        case GGMLQuantizationType.Q4_1:
            (scale, minimum), codes = _split(coded, 2, GROUP // 2)
            return Groups(4, codes, scale, minimum)
        case GGMLQuantizationType.Q8_0:
            scales, codes = _split(coded, 1, GROUP)
            return Groups(8, codes ^ np.uint8(SIGNED_ZERO[8]), scales[0], -SIGNED_ZERO[8] * scales[0])
        case GGMLQuantizationType.Q4_K:
            return _q4_k(coded)
        case GGMLQuantizationType.MXFP4 if (found := _mxfp4(coded)) is not None:
            return found
        case _:
            values: Floats = dequantize(coded, kind)
            return quantized(values.reshape(width, -1), 8)


def _split(coded: Bytes, num_halves: int, num_codes: int) -> tuple[list[Halves], Bytes]:
    """Separate each block's leading float16s from its codes."""
    head = num_halves * HALF_BYTES
    blocks = coded.reshape(len(coded), -1, head + num_codes)
    halves = np.ascontiguousarray(blocks[..., :head]).view(np.float16)
    return [halves[..., index] for index in range(num_halves)], blocks[..., head:]


def _mxfp4(coded: Bytes) -> Groups | None:
    blocks = coded.reshape(len(coded), -1, 1 + GROUP // 2)
    return mxfp4(blocks[..., 1:], blocks[..., 0])


def _q4_k(coded: Bytes) -> Groups:
    width = len(coded)
    blocks = coded.reshape(-1, 2 * HALF_BYTES + Q4_K.K_SCALE_SIZE + SUPER_GROUP // 2)
    halves, rest = blocks[:, : 2 * HALF_BYTES], blocks[:, 2 * HALF_BYTES :]
    scale, minimum = np.ascontiguousarray(halves).view(np.float16).astype(np.float32).T
    scales, minimums = Q4_K.get_scale_min(np.ascontiguousarray(rest[:, : Q4_K.K_SCALE_SIZE]))
    pairs = rest[:, Q4_K.K_SCALE_SIZE :].reshape(len(blocks), -1, 1, GROUP)  # low halves: one group, high: the next
    codes = np.concatenate((pairs & 15, pairs >> 4), axis=2)
    return Groups(
        4,
        packed_halves(codes).reshape(width, -1, GROUP // 2),
        (scale[:, None] * scales).astype(np.float16).reshape(width, -1),
        (minimum[:, None] * minimums * -1.0).astype(np.float16).reshape(width, -1),
    )
