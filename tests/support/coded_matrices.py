"""Random matrices of codes, and what they stand for in float64, by the formats' definitions."""

from math import ceil
from typing import Any

import torch
from torch import Tensor

from pdserve.kernels.code_blocks import BLOCK, ZEROS, CodeBlocks, Kind

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NAN = 127  # of e4m3, but for its sign


def coded_matrix(
    kind: Kind,
    shape: tuple[int, int],
    group: int,
    *,
    minimums: bool = False,
    bias: Tensor | None = None,
    device: str = "cpu",
) -> tuple[CodeBlocks, Tensor]:
    """Return a matrix of this shape (outputs and inputs), and its weights. group: inputs that share a scale."""
    (outputs, inputs), bits = shape, 4 if kind.endswith("4") else 8
    num_blocks, num_groups = ceil(inputs / BLOCK), ceil(inputs / group)
    seed = outputs + inputs + group
    draw: dict[str, Any] = {"generator": torch.Generator(device).manual_seed(seed), "device": device}
    codes = torch.randint(0, 1 << bits, (outputs, num_blocks * BLOCK), **draw)
    if kind == "fp8":
        codes[codes & NAN == NAN] = 3
    scales = torch.rand((num_groups, outputs), **draw) * 0.05 + 0.01
    lows = torch.randn((num_groups, outputs), **draw) * 0.1
    if kind == "fp4":
        scales = torch.exp2(torch.randint(-7, 0, scales.shape, **draw).float())
    if kind != "fp8":
        scales, lows = scales.half(), lows.half()
    of_input = (torch.arange(inputs, device=device) // group).clamp(max=num_groups - 1)
    weights = _values(kind, codes[:, :inputs], with_zero=not minimums) * scales.double().t()[:, of_input]
    if minimums:
        weights += lows.double().t()[:, of_input]
    packed = codes.to(torch.uint8).view(outputs, num_blocks, BLOCK)
    if bits == 4:
        packed = packed[..., :16] | (packed[..., 16:] << 4)
    packed = packed.transpose(0, 1).contiguous()
    return CodeBlocks(kind, packed, scales, lows if minimums else None, inputs, group, bias), weights


def _values(kind: Kind, codes: Tensor, *, with_zero: bool) -> Tensor:
    if kind == "fp4":
        return 2.0 * torch.tensor([*E2M1, *(-each for each in E2M1)], dtype=torch.float64, device=codes.device)[codes]
    if kind == "fp8":
        return codes.to(torch.uint8).view(torch.float8_e4m3fn).double()
    return codes.double() - (ZEROS[kind] if with_zero else 0)
