"""Row-wise kernels a model's layers call: RMSNorm with residual, SiLU gating, rotary positions."""

import torch
from torch import Tensor

from pdserve.kernels.checks import require, require_tensor
from pdserve.kernels.device import rotary as device_rotary
from pdserve.kernels.device import rows as device_rows

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_WIDTH = 32768
MIN_ELEMENTS = 2048  # one program's share: narrower rows are taken several at a time
SILU_BLOCK = 1024
ROPE_HEADS = 8  # heads one program turns


def power_of_two(size: int) -> int:
    """Round up to a power of two."""
    return 1 << max(0, size - 1).bit_length()


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Normalize rows [num_rows, width] and scale by weight [width]; out may be x.

    With `residual` (like x) the sum of both is normalized, and `residual` is left holding that sum.
    """
    require_tensor("x", x, (None, None), DTYPES)
    num_rows, width = x.shape
    require(1 <= width <= MAX_WIDTH, f"x must have 1 to {MAX_WIDTH} columns, got {width}")
    require_tensor("weight", weight, (width,), DTYPES)
    if residual is not None:
        require_tensor("residual", residual, x.shape, DTYPES)
    out = torch.empty_like(x) if out is None else out
    require_tensor("out", out, x.shape, (x.dtype,))
    block = power_of_two(width)
    rows = max(1, MIN_ELEMENTS // block)
    if num_rows > 0:
        stream = x if residual is None else residual
        device_rows.rms_norm[(-(-num_rows // rows),)](
            x, stream, weight, out, num_rows, x.stride(0), stream.stride(0), out.stride(0), eps,
            WIDTH=width, BLOCK=block, ROWS=rows, HAS_RESIDUAL=residual is not None,
            num_warps=max(4, min(16, block * rows // 1024)),
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


def rope(
    x: Tensor, cos_sin: Tensor, positions: Tensor, *, interleaved: bool = False, out: Tensor | None = None
) -> Tensor:
    """Rotate the first channels of x [num_tokens, num_heads, head_dim] by position; out may be x.

    cos_sin: float32 [max_positions, rot], cosines of rot/2 angles, then sines. positions: int32 or int64 [num_tokens].
    """
    require_tensor("x", x, (None, None, None), DTYPES)
    num_tokens, num_heads, head_dim = x.shape
    rot = check_angles(cos_sin, positions, num_tokens, head_dim)
    out = torch.empty_like(x) if out is None else out
    require_tensor("out", out, x.shape, (x.dtype,))
    if num_tokens > 0:
        device_rotary.rope[num_tokens, -(-num_heads // ROPE_HEADS)](
            x, out, cos_sin, positions, num_heads, *x.stride()[:2], *out.stride()[:2],
            **rope_constants(head_dim, rot, interleaved=interleaved), num_warps=4,
        )  # fmt: skip
    return out


def check_angles(cos_sin: Tensor, positions: Tensor, num_tokens: int, head_dim: int) -> int:
    """Raise ValueError unless the table and positions fit; returns how many channels are rotated."""
    require_tensor("cos_sin", cos_sin, (None, None), (torch.float32,))
    rot = cos_sin.shape[1]
    require(cos_sin.is_contiguous(), f"cos_sin must be contiguous, got strides {cos_sin.stride()}")
    require(rot % 2 == 0 and 2 <= rot <= head_dim, f"cos_sin must have 2 to {head_dim} columns, even, got {rot}")
    require_tensor("positions", positions, (num_tokens,), (torch.int32, torch.int64))
    return rot


def rope_constants(head_dim: int, rot: int, *, interleaved: bool) -> dict[str, int | bool]:
    """Return the rotary kernels' common compile-time arguments."""
    return {
        "HEAD_DIM": head_dim,
        "ROT": rot,
        "BLOCK_HALF": power_of_two(rot // 2),
        "BLOCK_REST": power_of_two(max(1, head_dim - rot)),
        "HEADS": ROPE_HEADS,
        "INTERLEAVED": interleaved,
    }
