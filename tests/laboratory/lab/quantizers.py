"""Writes a Llama in the formats in which checkpoints are published in fewer bits: all matrices but embedding and head.

Weights are rounded to the nearest code; GPTQ's as Frantar et al. 2022 do it. Groups have 64 inputs.
"""

import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import save_file
from torch import Tensor

from pdserve.checkpoint.checkpoint import Checkpoint
from pdserve.checkpoint.hf_directory import SINGLE_FILE

GROUP, DAMPING = 64, 0.01
MOST_FP8 = torch.finfo(torch.float8_e4m3fn).max
BLOCK = (128, 128)  # of FP8
AWQ_SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)  # of the eight outputs of a word
IN_ORDER = tuple(range(0, 32, 4))
Parts = dict[str, Tensor]
Coder = Callable[[Tensor], Parts]
Hessians = Mapping[str, Tensor]


def of_group(**weights: object) -> dict[str, object]:
    return {"quant_method": "compressed-tensors", "config_groups": {"all": {"targets": ["Linear"], "weights": weights}}}


def in_fp8(matrix: Tensor, block: tuple[int, int] | None) -> Parts:
    """Round to FP8 with a scale for each block, or for each output where there is none."""
    if block is None:
        scales = matrix.abs().amax(1, keepdim=True) / MOST_FP8
        return {"weight": (matrix / scales).to(torch.float8_e4m3fn), "weight_scale": scales}
    (rows, columns), (outputs, inputs) = (min(each) for each in zip(block, matrix.shape, strict=True)), matrix.shape
    filled = torch.nn.functional.pad(matrix, (0, -inputs % columns, 0, -outputs % rows))
    blocks = filled.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).abs().amax((1, 3))
    scales = blocks / MOST_FP8
    wide = scales.repeat_interleave(rows, 0)[:outputs].repeat_interleave(columns, 1)[:, :inputs]
    codes = (matrix / wide).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scales if block == BLOCK else scales.reshape(())}


def in_int8(matrix: Tensor) -> Parts:
    scales = matrix.abs().amax(1, keepdim=True) / 127
    return {"weight": (matrix / scales).round().to(torch.int8), "weight_scale": scales}


def in_words(matrix: Tensor) -> Parts:
    """Round to 4 bits around zero, in compressed-tensors' words."""
    groups = matrix.unflatten(1, (-1, GROUP))
    scales = (groups.abs().amax(2) / 7.5).bfloat16()
    words = packed((groups / scales.float()[..., None]).round().clamp(-8, 7).flatten(1) + 8, IN_ORDER)
    return {
        "weight_packed": words,
        "weight_scale": scales,
        "weight_shape": torch.tensor(matrix.shape),
    }


def steps_of(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales and zeros of codes from 0 to 15, over the last axis."""
    low, high = groups.amin(-1).clamp(max=0.0), groups.amax(-1).clamp(min=0.0)
    scales = ((high - low) / 15).clamp(min=1e-6).half().float()
    return scales, (-low / scales).round().clamp(0, 15)


def packed(codes: Tensor, shifts: tuple[int, ...]) -> Tensor:
    """Pack runs of a row's integers into words."""
    words = (codes.long().unflatten(1, (-1, len(shifts))) << torch.tensor(shifts)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def in_awq(matrix: Tensor) -> Parts:
    """Round to 4 bits in AWQ's packing; weights are not scaled by activations first."""
    groups = matrix.unflatten(1, (-1, GROUP))
    scales, zeros = steps_of(groups)
    codes = ((groups / scales[..., None]).round() + zeros[..., None]).clamp(0, 15).flatten(1)
    words, lows = packed(codes.t(), AWQ_SHIFTS), packed(zeros.t(), AWQ_SHIFTS)
    return {"qweight": words, "qzeros": lows, "scales": scales.t().half().contiguous()}


def in_gptq(of: Hessians, name: str, matrix: Tensor, *, by_activation: bool) -> Parts:
    """Round to 4 bits, input after input; what is lost goes into the inputs that follow.

    by_activation: inputs with large activations come first.
    """
    hessian, inputs = of[name], matrix.shape[1]
    order = hessian.diagonal().argsort(descending=True) if by_activation else torch.arange(inputs)
    left, damped = matrix[:, order].clone(), hessian[order][:, order].double()
    damped += DAMPING * damped.diagonal().mean() * torch.eye(inputs)
    inverse = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True).float()
    codes, steps = torch.empty_like(left), []
    for first in range(0, inputs, GROUP):
        after = first + GROUP
        scales, zeros = steps_of(left[:, first:after])
        steps.append((scales, zeros))
        lost = torch.empty(len(left), GROUP)
        for at in range(first, after):
            codes[:, at] = ((left[:, at] / scales).round() + zeros).clamp(0, 15)
            error = (left[:, at] - (codes[:, at] - zeros) * scales) / inverse[at, at]
            left[:, at:after] -= error[:, None] * inverse[at, at:after]
            lost[:, at - first] = error
        left[:, after:] -= lost @ inverse[first:after, after:]
    scales, zeros = (torch.stack(each) for each in zip(*steps, strict=True))
    placed, groups = torch.empty_like(codes), torch.empty(inputs, dtype=torch.int32)
    placed[:, order], groups[order] = codes, torch.arange(inputs, dtype=torch.int32) // GROUP
    words = packed(placed, IN_ORDER).t().contiguous()
    return {"qweight": words, "qzeros": packed((zeros - 1) % 16, IN_ORDER), "scales": scales.half(), "g_idx": groups}


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
INT4 = of_group(num_bits=4, type="int", symmetric=True, group_size=GROUP, strategy="group")
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False}
FORMS: Mapping[str, tuple[Mapping[str, object] | None, Coder]] = {
    "bfloat16": (None, lambda matrix: {"weight": matrix.bfloat16()}),
    "FP8, a scale for each tensor": (FP8, partial(in_fp8, block=(1 << 30, 1 << 30))),
    "FP8, for each output": (of_group(num_bits=8, type="float", strategy="channel"), partial(in_fp8, block=None)),
    "FP8, for 128 x 128": (FP8 | {"weight_block_size": list(BLOCK)}, partial(in_fp8, block=BLOCK)),
    "int8, for each output (W8A8)": (of_group(num_bits=8, type="int", strategy="channel"), in_int8),
    "compressed-tensors W4A16": (INT4, in_words),
    "AWQ's packing": (AWQ, in_awq),
}
GGUF = {"GGUF " + kind.name: kind for kind in (Kind.Q4_0, Kind.Q4_1, Kind.Q8_0, Kind.MXFP4)}


def write_form(
    checkpoint: Checkpoint, folder: Path, config: Mapping[str, object] | None, code: Callable[..., Parts]
) -> Path:
    """Write a model as a directory. code: a matrix by its name and values."""
    folder.mkdir()
    tensors = Parts()
    for name, stored in checkpoint.weights().items():
        values = torch.as_tensor(stored.read(())).float()
        if ".layers." in name and values.dim() == 2:
            base = name.removesuffix(".weight")
            tensors |= {f"{base}.{part}": each.contiguous() for part, each in code(base, values).items()}
        else:
            tensors[name] = values.bfloat16()
    save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})
    written = {"model_type": "llama", **checkpoint.raw_config} | (
        {} if config is None else {"quantization_config": config}
    )
    (folder / "config.json").write_text(json.dumps(written))
    (folder / "tokenizer.json").write_text(checkpoint.tokenizer().to_json())
    return folder


def write_gguf(source: Path, file: Path, kind: Kind) -> Path:
    """Write a GGUF file again with its matrices in another kind; embedding and norms stay as they are."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(file, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            writer.add_key_value(name, field.contents(), field.types[0], field.types[-1])
    for tensor in reader.tensors:
        if tensor.name.startswith("blk.") and len(tensor.shape) == 2:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
            writer.add_tensor(tensor.name, gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    for write in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        write()
    return file


@torch.inference_mode()
def hessians(folder: Path, token_ids: list[int], length: int = 512) -> Hessians:
    """Return of each matrix the sum of products of its inputs over a text, as transformers computes the model."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - its room is large

    model, found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), dict[str, Tensor]()

    def add(name: str, _: object, inputs: tuple[Tensor, ...]) -> None:
        rows = inputs[0].flatten(0, 1) / math.sqrt(len(token_ids))
        found[name] = found.get(name, 0.0) + rows.t() @ rows

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and ".layers." in name:
            module.register_forward_pre_hook(partial(add, name))
    for first in range(0, len(token_ids), length):
        model(torch.tensor([token_ids[first : first + length]]))
    return found
