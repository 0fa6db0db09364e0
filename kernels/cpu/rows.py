"""Row-wise operations of a layer, compiled: RMSNorm and the gate of SwiGLU."""

import ctypes

import torch
from torch import Tensor

from pdserve.kernels.checks import require, require_tensor
from pdserve.kernels.cpu.library import DTYPES, Float, Pointer, Size, function


class Rows:
    """The library's row-wise functions. What a row becomes depends on that row alone."""

    def __init__(self, loaded: ctypes.CDLL) -> None:
        self._rms_norm = function(
            loaded, "pdserve_rms_norm", Pointer, Size, Pointer, Size, Pointer, Size, Size, Float, Size
        )
        self._silu_mul = function(loaded, "pdserve_silu_mul", Pointer, Size, Pointer, Size, Size, Size, Size)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalize rows [num_rows, width] to unit root mean square, then scale them by weight [width]."""
        require_tensor("x", x, (None, None), tuple(DTYPES))
        num_rows, width = x.shape
        require_tensor("weight", weight, (width,), (x.dtype,))
        out = torch.empty((num_rows, width), dtype=x.dtype)
        self._rms_norm(
            out.data_ptr(), width, x.data_ptr(), x.stride(0), weight.data_ptr(), num_rows, width, eps, DTYPES[x.dtype]
        )
        return out

    def silu_mul(self, x: Tensor) -> Tensor:
        """Gate rows: [num_rows, 2 * width], gates first -> [num_rows, width]."""
        require_tensor("x", x, (None, None), tuple(DTYPES))
        require(x.shape[1] % 2 == 0, f"x must have an even number of columns, got {x.shape[1]}")
        num_rows, width = x.shape[0], x.shape[1] // 2
        out = torch.empty((num_rows, width), dtype=x.dtype)
        self._silu_mul(out.data_ptr(), width, x.data_ptr(), x.stride(0), num_rows, width, DTYPES[x.dtype])
        return out
