"""Models of random codes in the formats of checkpoints in fewer bits, and what the codes stand for."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import pack_to_int32
from model_zoo import write_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from pdserve.checkpoint.hf_directory import SINGLE_FILE

AWQ_SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)  # of the eight outputs of a word


def word(values: list[int], shifts: tuple[int, ...]) -> int:
    """Return an int32 with each value at its shift."""
    bits = sum(value << shift for value, shift in zip(values, shifts, strict=True))
    return bits - (1 << 32) if bits >= 1 << 31 else bits


def packed(values: Tensor, shifts: tuple[int, ...]) -> Tensor:
    """Pack runs of a row's integers into words."""
    rows = values.view(len(values), -1, len(shifts)).tolist()
    return torch.tensor([[word(each, shifts) for each in row] for row in rows], dtype=torch.int32)


def draws(matrix: Tensor) -> torch.Generator:
    """Return what is drawn from in place of a matrix: something else for each."""
    return torch.Generator().manual_seed(int(matrix.double().abs().sum() * 1e6))


def in_awq(matrix: Tensor, size: int = 32) -> tuple[dict[str, Tensor], Tensor]:
    """Return parts of a random matrix of this shape, and what they stand for."""
    (outputs, inputs), draw = matrix.shape, draws(matrix)
    q = torch.randint(0, 16, (inputs, outputs), generator=draw)
    zeros = torch.randint(6, 11, (inputs // size, outputs), generator=draw)
    scales = (torch.rand(inputs // size, outputs, generator=draw) * 0.03 + 0.01).half()
    group = torch.arange(inputs) // size
    parts = {"qweight": packed(q, AWQ_SHIFTS), "qzeros": packed(zeros, AWQ_SHIFTS), "scales": scales}
    return parts, ((q - zeros[group]).float() * scales.float()[group]).t()


def in_gptq(matrix: Tensor, bits: int = 4, *, shuffled: bool = False) -> tuple[dict[str, Tensor], Tensor]:
    (outputs, inputs), draw, size = matrix.shape, draws(matrix), 32
    shifts = tuple(range(0, 32, bits))
    q = torch.randint(0, 1 << bits, (inputs, outputs), generator=draw)
    middle = 1 << (bits - 1)
    zeros = torch.randint(middle - 2, middle + 3, (inputs // size, outputs), generator=draw)
    zeros[0, 0] = 0  # which files hold as the largest number
    scales = (torch.rand(inputs // size, outputs, generator=draw) * 0.4 / (1 << bits) + 0.01).half()
    group = torch.arange(inputs) // size
    if shuffled:
        group = group[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]  # as q, k and v have one
    words = packed(q.t().contiguous(), shifts).t().contiguous()
    parts = {
        "qweight": words,
        "qzeros": packed((zeros - 1) % (1 << bits), shifts),
        "scales": scales,
        "g_idx": group.int(),
    }
    return parts, ((q - zeros[group]).float() * scales.float()[group]).t()


def in_words(matrix: Tensor, *, symmetric: bool = True) -> tuple[dict[str, Tensor], Tensor]:
    """Pack 4 bits as compressed-tensors' own library does."""
    (outputs, inputs), draw, size = matrix.shape, draws(matrix), 32
    q = torch.randint(-8, 8, (outputs, inputs), generator=draw, dtype=torch.int8)
    scales = (torch.rand(outputs, inputs // size, generator=draw) * 0.03 + 0.01).bfloat16()
    zeros = torch.zeros(scales.shape, dtype=torch.int8)
    parts = {"weight_packed": pack_to_int32(q, 4), "weight_scale": scales, "weight_shape": torch.tensor(matrix.shape)}
    if not symmetric:
        zeros = torch.randint(-2, 3, scales.shape, generator=draw, dtype=torch.int8)
        parts["weight_zero_point"] = pack_to_int32(zeros, 4, packed_dim=0)
    wide, scale = (each.repeat_interleave(size, 1) for each in (zeros, scales.float()))
    return parts, (q.float() - wide.float()) * scale


def in_int8(matrix: Tensor, *, symmetric: bool = True) -> tuple[dict[str, Tensor], Tensor]:
    draw = draws(matrix)
    q = torch.randint(-127, 128, matrix.shape, generator=draw, dtype=torch.int8)
    scales = torch.rand(len(matrix), 1, generator=draw).bfloat16() * 0.002
    if symmetric:
        return {"weight": q, "weight_scale": scales}, q.float() * scales.float()
    zeros = torch.randint(-9, 9, scales.shape, generator=draw, dtype=torch.int8)
    parts = {"weight": q, "weight_scale": scales, "weight_zero_point": zeros}
    return parts, (q.float() - zeros.float()) * scales.float()


def in_fp8(
    matrix: Tensor, name: str, shape: Callable[[int, int], tuple[int, ...]], block: int = 48
) -> tuple[dict[str, Tensor], Tensor]:
    """Return FP8 with scales of this name and shape, powers of two, spread over the matrix by hand."""
    (outputs, inputs), draw = matrix.shape, draws(matrix)
    q = (torch.randn(matrix.shape, generator=draw) * 40).to(torch.float8_e4m3fn)
    scales = torch.exp2(torch.randint(-10, -7, shape(outputs, inputs), generator=draw).float())
    values = q.float()
    rows, columns = (scales.shape[0], scales.shape[1]) if scales.dim() == 2 else (1, 1)
    expected = torch.empty_like(values)
    for row in range(outputs):
        for column in range(inputs):
            at = (row // block, column // block) if rows < outputs else (row, 0)
            scale = scales.flatten()[0] if rows == columns == 1 else scales[at]
            expected[row, column] = values[row, column] * scale
    return {"weight": q, name: scales}, expected


def of_group(**weights: object) -> dict[str, object]:
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


INT4 = of_group(num_bits=4, type="int", symmetric=True, group_size=32, strategy="group", actorder=None)
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
Case = tuple[dict[str, Any], Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]]
CASES: dict[str, Case] = {
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}, in_awq),
    "gptq": (GPTQ, in_gptq),
    "gptq, 8 bits": (GPTQ | {"bits": 8}, lambda matrix: in_gptq(matrix, 8)),
    "gptq, order of activations": (GPTQ | {"desc_act": True}, lambda matrix: in_gptq(matrix, shuffled=True)),
    "words": (INT4 | {"format": "pack-quantized", "ignore": ["lm_head"]}, in_words),
    "words, with zeros": (INT4, lambda matrix: in_words(matrix, symmetric=False)),
    "int8": (of_group(num_bits=8, type="int", strategy="channel"), in_int8),
    "int8, with zeros": (of_group(num_bits=8, type="int"), lambda matrix: in_int8(matrix, symmetric=False)),
    "fp8 of outputs": (
        of_group(num_bits=8, type="float"),
        lambda m: in_fp8(m, "weight_scale", lambda rows, _: (rows, 1)),
    ),
    "fp8 of blocks": (
        FP8 | {"weight_block_size": [48, 48]},
        lambda m: in_fp8(m, "weight_scale_inv", lambda rows, columns: (-(-rows // 48), -(-columns // 48))),
    ),
    "fp8 of large blocks": (
        FP8 | {"weight_block_size": [128, 128]},
        lambda m: in_fp8(m, "weight_scale_inv", lambda *sizes: tuple(-(-size // 128) for size in sizes), 128),
    ),
    "fp8 of tensors": (FP8 | {"weight_block_size": None}, lambda m: in_fp8(m, "weight_scale_inv", lambda *_: ())),
}


def published(case: str, plain: Path, folder: Path) -> None:
    """Write a model's matrices in a format, and in place of them in `plain` what these stand for."""
    config, make = CASES[case]
    shutil.copytree(plain, folder)
    values = load_file(plain / SINGLE_FILE)
    coded = dict(values)
    for name in [name for name in values if ".layers." in name and values[name].dim() == 2]:
        parts, stands_for = make(coded.pop(name))
        values[name] = stands_for.contiguous()
        coded |= {f"{name.removesuffix('.weight')}.{part}": value for part, value in parts.items()}
    save_file(values, plain / SINGLE_FILE, metadata={"format": "pt"})
    save_file(coded, folder / SINGLE_FILE, metadata={"format": "pt"})
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(written | {"quantization_config": config}))


def write_in_mxfp4(folder: Path, **shape: int) -> tuple[Path, Path]:
    """Write a model with the values of random codes, and the same with the codes themselves."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # noqa: PLC0415 - its room is large

    plain = write_model("gpt-oss", folder / "decoded", **shape)
    coded = Path(shutil.copytree(plain, folder / "coded"))
    weights, draw = load_file(plain / SINGLE_FILE), torch.Generator().manual_seed(2)
    published = dict(weights)
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        count, inputs, outputs = published.pop(name).shape
        codes = torch.randint(0, 256, (count, outputs, inputs // 32, 16), generator=draw, dtype=torch.uint8)
        scales = torch.randint(122, 127, (count, outputs, inputs // 32), generator=draw, dtype=torch.uint8)
        weights[name] = convert_moe_packed_tensors(codes, scales, dtype=torch.float32).contiguous()
        published |= {f"{name}_blocks": codes, f"{name}_scales": scales}
    save_file(weights, plain / SINGLE_FILE, metadata={"format": "pt"})
    save_file(published, coded / SINGLE_FILE, metadata={"format": "pt"})
    config = json.loads((coded / "config.json").read_text())
    (coded / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))
    return plain, coded
