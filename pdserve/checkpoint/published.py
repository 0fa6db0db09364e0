"""Checkpoints that are published in fewer bits, by their `quantization_config`. Free of torch.

Served are FP8 (of each tensor, each output or blocks), compressed-tensors (FP8, int8, and 4 or 8 bits in words), AWQ,
GPTQ, and GPT-OSS's MXFP4 (`model/stacked.py`). Inputs of products are not rounded, whatever a config says of them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from pdserve.base.errors import ConfigError
from pdserve.checkpoint.checkpoint import FileCodes
from pdserve.checkpoint.windows import ORDERS, read_window
from pdserve.model.fields import Fields
from pdserve.model.weights import GROUP, SEGMENT, Codes, Part, Stored, Weights

if TYPE_CHECKING:
    import torch

    from pdserve.checkpoint.packing import Coded, Scaled
    from pdserve.model.weights import Read

CONFIG = "quantization_config"
SCALES = ("weight_scale_inv", "weight_scale")  # of FP8
OF_INPUTS = ("activation_scale", "input_scale")  # which are not used
OF_MODULES = ("ignored_layers", "ignore", "modules_to_not_convert")  # names of tensors say it, too
OF_GPTQ = (  # how weights were rounded, and what others do with them
    *("act_group_aware", "backend", "batch_size", "block_name_to_quantize", "cache_block_outputs", "damp_percent"),
    *("dataset", "exllama_config", "lm_head", "max_input_length", "model_file_base_name", "model_name_or_path"),
    *("model_seqlen", "module_name_preceding_first_block", "modules_in_block_to_quantize", "pack_dtype", "quantizer"),
    *("static_groups", "sym", "tokenizer", "true_sequential", "use_cuda_fp16", "use_exllama"),
)
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Format:
    """How the matrices of a checkpoint are coded."""

    method: str
    marks: tuple[str, ...]  # parts of a matrix, after its name, by one of which it is known
    needed: tuple[str, ...] = ()  # other parts
    optional: tuple[str, ...] = ()
    bits: int = 8
    block: tuple[int, int] | None = None  # of FP8: outputs and inputs that share a scale
    older: bool = False  # of GPTQ
    coded_as: FileCodes | None = None  # codes that products take
    in_order: bool = True  # whether inputs come in the order of their groups
    has_floats: bool = False  # codes of 8 bits are FP8

    @property
    def parts(self) -> tuple[str, ...]:
        return (*self.marks, *self.needed, *self.optional)


PLAIN = Format("none", ())


def read_format(config: Mapping[str, object]) -> Format:
    """Return how a checkpoint's matrices are coded; ConfigError names a key that is not served."""
    fields = Fields(config)
    section = fields.section(CONFIG)
    if not fields.has(CONFIG):
        return PLAIN
    method = section.text("quant_method", "")
    if method not in FORMATS:
        raise ConfigError(f"{CONFIG}.quant_method: {method!r} is not supported (one of {', '.join(FORMATS)})")
    found = FORMATS[method](section)
    for key in OF_MODULES:
        section.texts(key)
    section.must_be("kv_cache_scheme", None)
    if unread := [key for key in section.unread() if not key.startswith(("_", "meta"))]:
        raise section.unsupported(unread[0], f"{method} has no such key")
    return found


def _fp8(section: Fields) -> Format:
    if section.text("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise section.unsupported("fmt", "e4m3")
    for key in ("activation_scheme", "scale_fmt"):  # of inputs
        section.text(key, "")
    section.flag("dequantize", default=False)
    block = _block(section, "weight_block_size")
    return Format(
        "fp8", SCALES, ("weight",), OF_INPUTS, block=block, coded_as="fp8" if _is_kept(block) else None, has_floats=True
    )


def _is_kept(block: tuple[int, int] | None) -> bool:
    """Say whether products take FP8 in such blocks."""
    return block is None or block[1] % SEGMENT == 0


def _block(section: Fields, key: str) -> tuple[int, int] | None:
    if not section.has(key):
        return None
    sizes = section.numbers(key)
    if len(sizes) != 2 or not all(size >= 1 and size == int(size) for size in sizes):
        raise section.unsupported(key, "two numbers of outputs and inputs")
    return int(sizes[0]), int(sizes[1])


def _awq(section: Fields) -> Format:
    section.must_be("bits", 4)
    section.must_be("zero_point", True)
    if section.text("version", "gemm").lower() != "gemm":
        raise section.unsupported("version", "gemm")
    section.optional_int("group_size")
    _pass_over(section, "backend", "do_fuse", "exllama_config", "fuse_max_seq_len", "modules_to_fuse")
    return Format("awq", ("qweight",), ("qzeros", "scales"), bits=4, coded_as="awq")


def _gptq(section: Fields) -> Format:
    bits = section.integer("bits")
    if bits not in (4, 8):
        raise section.unsupported("bits", "4 or 8")
    kind = section.text("checkpoint_format", section.text("format", "gptq"))
    if kind not in ("gptq", "gptq_v2"):
        raise section.unsupported("checkpoint_format", "gptq or gptq_v2")
    section.must_be("is_marlin_format", False)
    if section.section("dynamic").unread():
        raise section.unsupported("dynamic", "the same bits in all matrices")
    section.optional_int("group_size")
    _pass_over(section, *OF_GPTQ)
    needed, older, in_order = ("qzeros", "scales"), kind == "gptq", not section.flag("desc_act", default=False)
    parts = ("qweight",), needed, ("g_idx",)
    return Format("gptq", *parts, bits=bits, older=older, coded_as="gptq", in_order=in_order)


def _compressed(section: Fields) -> Format:
    for key in ("format", "quantization_status", "version"):
        section.text(key, "")
    section.optional_number("global_compression_ratio")
    is_dense = section.section("sparsity_config").text("format", "dense") == "dense"
    for key in ("transform_config", *(() if is_dense else ("sparsity_config",))):
        if section.section(key).unread():
            raise section.unsupported(key, "nothing")
    groups = section.section("config_groups")
    block, in_order, has_floats = None, True, False
    for name in groups.unread():
        weights = groups.section(name).section("weights")
        kind, bits = weights.text("type", "int"), weights.integer("num_bits", 8)
        if (kind, bits) not in (("int", 4), ("int", 8), ("float", 8)):
            raise weights.unsupported("num_bits", "4 or 8 of int, 8 of float")
        served = ("channel", "group", "tensor", *(("block",) if kind == "float" else ()))
        if weights.text("strategy", "channel") not in served:
            raise weights.unsupported("strategy", f"one of {', '.join(served)}")
        has_floats |= kind == "float"
        in_order &= weights.text("actorder", "weight") not in ("group", "dynamic")
        block = _block(weights, "block_structure") or block
    parts = ("weight", "weight_packed", "weight_shape", "weight_zero_point", "weight_g_idx")
    given = ("weight_scale",), (), (*parts, *OF_INPUTS, "input_zero_point")
    return Format(
        "compressed-tensors",
        *given,
        block=block,
        coded_as="compressed-tensors" if _is_kept(block) else None,
        in_order=in_order,
        has_floats=has_floats,
    )


def _pass_over(section: Fields, *keys: str) -> None:
    for key in keys:
        section.skip(key)


def _mxfp4(section: Fields) -> Format:
    section.must_be("dequantize", False)
    return Format("mxfp4", (), coded_as="mxfp4")  # `model/stacked.py` knows these tensors by their names


FORMATS: Mapping[str, Callable[[Fields], Format]] = {
    "awq": _awq,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
    "gptq": _gptq,
    "mxfp4": _mxfp4,
}


def decoding(weights: Weights, of: Format, *, keep_coded: bool = False) -> Weights:
    """Return a checkpoint's tensors with each coded matrix as one, decoded when it is read.

    keep_coded: matrices as products take them, where they do. ConfigError names a part that is missing or
    misshapen.
    """
    if of == PLAIN:
        return weights
    left, found = dict(weights), dict[str, Stored]()
    for name in weights:
        base, _, last = name.rpartition(".")
        if last in of.marks:
            parts = {each: left.pop(f"{base}.{each}") for each in of.parts if f"{base}.{each}" in left}
            found[f"{base}.weight"] = _matrix(base, parts, of, keep_coded=keep_coded)
    return {**left, **found}


def _matrix(base: str, parts: dict[str, Stored], of: Format, *, keep_coded: bool) -> Stored:
    shape = _shape(base, parts, of)

    def read(part: Part) -> "Read":
        window, tensors = read_window(part, shape, parts, of.block)
        coded, inner = _decoded(base, tensors, of, window.shape[1]), window.inner(part)
        kept = coded.kept(any_order=not of.in_order and len(part) < 2) if keep_coded else None
        taken = None if kept is None else kept.part(inner)
        return coded.values()[inner] if taken is None else taken

    group = GROUP if of.block is None else of.block[1]
    codes = _codes(parts, of, shape[1]) if keep_coded else None
    return Stored(shape, read, group if keep_coded and shape[1] % group == 0 else 1, codes)


def _codes(parts: dict[str, Stored], of: Format, inputs: int) -> Codes | None:
    """Return how products take a matrix, where its scales are theirs."""
    scales = next(parts[name].shape for name in ("scales", *SCALES) if name in parts)
    groups = scales[0] if "scales" in parts else scales[1] if len(scales) == 2 else 1
    group, is_fp8 = inputs // groups if of.block is None else of.block[1], of.has_floats and "weight" in parts
    if is_fp8:
        return Codes(8, group, is_fp8=True) if of.block is not None or groups == 1 else None
    in_order = of.in_order or not any(name in parts for name in ORDERS)
    bits = parts["weight_packed"].shape[1] * 32 // inputs if "weight_packed" in parts else of.bits
    has_zeros = "qzeros" in parts or "weight_zero_point" in parts
    return Codes(bits, group, has_zeros=has_zeros, in_order=in_order) if group % GROUP == 0 else None


def _decoded(base: str, parts: "Mapping[str, torch.Tensor]", of: Format, inputs: int) -> "Scaled | Coded":
    from pdserve.checkpoint import packing  # noqa: PLC0415 - imports torch: routers open checkpoints without it

    if (name := packing.scales_that_are_not_finite(parts)) is not None:
        raise ConfigError(f"{base}.{name}: not finite")
    for name in ("qweight", "qzeros", "weight_packed"):
        if name in parts and parts[name].is_floating_point():
            raise ConfigError(f"{base}.{name}: {parts[name].dtype}, not words of integers")
    if of.method == "awq":
        return packing.read_awq(parts)
    if of.method == "gptq":
        _check_groups(base, "g_idx", parts, len(parts["scales"]))
        return packing.read_gptq(parts, of.bits, older=of.older)
    if "weight" in parts and (of.method == "fp8" or parts["weight"].is_floating_point()):
        if not parts["weight"].is_floating_point():
            raise ConfigError(f"{base}.weight: {parts['weight'].dtype} is no type of {of.method}")
        scales = next(parts[name] for name in SCALES if name in parts)
        scaled = packing.Scaled(parts["weight"], scales, of.block)
        if not scaled.is_finite():
            raise ConfigError(f"{base}.weight: not finite")
        return scaled
    _check_groups(base, "weight_g_idx", parts, (1, *parts["weight_scale"].shape)[-1])
    return packing.read_compressed(parts, inputs)


def _check_groups(base: str, name: str, parts: "Mapping[str, torch.Tensor]", num_groups: int) -> None:
    if name in parts and not 0 <= int(parts[name].min()) <= int(parts[name].max()) < num_groups:
        raise ConfigError(f"{base}.{name}: not from 0 to {num_groups - 1}")


def _shape(base: str, parts: dict[str, Stored], of: Format) -> tuple[int, int]:
    """Return outputs and inputs; ConfigError unless all parts fit them."""
    if missing := [part for part in of.needed if part not in parts]:
        raise ConfigError(f"{base}.{missing[0]}: missing from the weights")
    match of.method:
        case "awq":
            inputs, words = _two(base, "qweight", parts)
            outputs, groups = words * 8, _two(base, "scales", parts)[0]
            expected: dict[str, Shape] = {"scales": (groups, outputs), "qzeros": (groups, words)}
        case "gptq":
            rows, outputs = _two(base, "qweight", parts)
            inputs, groups = rows * 32 // of.bits, _two(base, "scales", parts)[0]
            expected = {"scales": (groups, outputs), "qzeros": (groups, outputs * of.bits // 32), "g_idx": (inputs,)}
        case _ if "weight" in parts:
            outputs, inputs = _two(base, "weight", parts)
            _check_scales(base, (outputs, inputs), parts, of)
            return outputs, inputs
        case _:
            return _packed_shape(base, parts)
    _check_shapes(base, expected, parts)
    if groups < 1 or inputs % groups:
        raise ConfigError(f"{base}.scales: {groups} groups do not divide {inputs} inputs")
    return outputs, inputs


def _check_scales(base: str, shape: tuple[int, int], parts: dict[str, Stored], of: Format) -> None:
    """Raise ConfigError unless scales are of the whole matrix, of its outputs, of groups of inputs, or of blocks."""
    name = next(each for each in SCALES if each in parts)
    (outputs, inputs), found = shape, parts[name].shape
    fits = found in ((), (1,), (1, 1), (outputs,)) or (
        len(found) == 2 and found[0] == outputs and found[1] > 0 and inputs % found[1] == 0
    )
    if of.block is not None:
        fits = found == (-(-outputs // of.block[0]), -(-inputs // of.block[1]))
    if "weight_zero_point" in parts:
        _check_shapes(base, {"weight_zero_point": found}, parts)
    if not fits:
        raise ConfigError(f"{base}.{name}: shape {found} for {outputs} x {inputs}, in blocks of {of.block}")


def _packed_shape(base: str, parts: dict[str, Stored]) -> tuple[int, int]:
    """Return the shape that a matrix in words says it has."""
    for name in ("weight_packed", "weight_shape"):
        if name not in parts:
            raise ConfigError(f"{base}.{name}: missing from the weights")
    _check_shapes(base, {"weight_shape": (2,)}, parts)
    outputs, inputs = (int(size) for size in cast("torch.Tensor", parts["weight_shape"].read(())).tolist())
    rows, words = _two(base, "weight_packed", parts)
    groups = (1, *parts["weight_scale"].shape)[-1]
    if words < 1 or rows != outputs or words * 32 not in (4 * inputs, 8 * inputs):
        raise ConfigError(f"{base}.weight_packed: shape {(rows, words)} holds no {outputs} x {inputs} of 4 or 8 bits")
    if groups < 1 or inputs % groups:
        raise ConfigError(f"{base}.weight_scale: {groups} groups do not divide {inputs} inputs")
    per_word = inputs // words
    expected: dict[str, Shape] = {
        "weight_scale": (outputs, groups),
        "weight_zero_point": (-(-outputs // per_word), groups),
        "weight_g_idx": (inputs,),
    }
    _check_shapes(base, expected, parts)
    return outputs, inputs


def _check_shapes(base: str, expected: dict[str, Shape], parts: dict[str, Stored]) -> None:
    for name, shape in expected.items():
        if name in parts and parts[name].shape != shape:
            raise ConfigError(f"{base}.{name}: shape {parts[name].shape}, not {shape}")


def _two(base: str, name: str, parts: dict[str, Stored]) -> tuple[int, int]:
    shape = parts[name].shape
    if len(shape) != 2:
        raise ConfigError(f"{base}.{name}: shape {shape} is of no matrix")
    return shape[0], shape[1]
