"""Row-wise kernels a model's layers call: RMSNorm and SiLU gating."""

import torch
from torch import Tensor

from pdserve.kernels.checks import require, require_tensor
from pdserve.kernels.device import rows as device_rows

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_WIDTH = 32768
MIN_ELEMENTS = 2048  # one program's share: narrower rows are taken several at a time
SILU_BLOCK = 1024


def power_of_two(size: int) -> int:
    """Round up to a power of two."""
    return 1 << max(0, size - 1).bit_length()


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
    """Normalize rows [num_rows, width] and scale by weight [width]; out may be x."""
    require_tensor("x", x, (None, None), DTYPES)
    num_rows, width = x.shape
    require(1 <= width <= MAX_WIDTH, f"x must have 1 to {MAX_WIDTH} columns, got {width}")
    require_tensor("weight", weight, (width,), DTYPES)
    out = torch.empty_like(x) if out is None else out
    require_tensor("out", out, x.shape, (x.dtype,))
    block = power_of_two(width)
    rows = max(1, MIN_ELEMENTS // block)
    if num_rows > 0:
        device_rows.rms_norm[(-(-num_rows // rows),)](
            x, weight, out, num_rows, x.stride(0), out.stride(0), eps,
            WIDTH=width, BLOCK=block, ROWS=rows, num_warps=max(4, min(16, block * rows // 1024)),
        )  # fmt: skip
    return out


def silu_mul(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Gate rows: x [num_rows, 2 * width], gates first -> [num_rows, width]."""
    require_tensor("x", x, (None, None), DTYPES)
    require(x.shape[1] % 2 == 0, f"x must have an even number of columns, got {x.shape[1]}")
    num_rows, width = x.shape[0], x.shape[1] // 2
    out = torch.empty((num_rows, width), dtype=x.dtype, device=x.device) if out is None else out
    require_tensor("out", out, (num_rows, width), (x.dtype,))
    if num_rows > 0:
        device_rows.silu_mul[num_rows, -(-width // SILU_BLOCK)](
            x, out, x.stride(0), out.stride(0), WIDTH=width, BLOCK=SILU_BLOCK, num_warps=4
        )
    return out
