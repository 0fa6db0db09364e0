"""Random matrices in FP8, with what they stand for."""

import torch
from torch import Tensor

from pdserve.kernels.cpu.layers import SEGMENT


def in_fp8(seed: int, width: int, inputs: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return a matrix of e4m3 as its codes and scales, and in float64."""
    draw = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 127, (width, inputs), generator=draw, dtype=torch.uint8)
    codes += 128 * torch.randint(0, 2, codes.shape, generator=draw, dtype=torch.uint8)
    scales = torch.rand(width, -(-inputs // SEGMENT), generator=draw) * 0.01
    values = codes.view(torch.float8_e4m3fn).double()
    return (codes, scales), values * scales.double().repeat_interleave(SEGMENT, 1)[:, :inputs]
