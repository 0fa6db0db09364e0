"""RMSNorm, compiled."""

import ctypes

import torch
from torch import Tensor

from pdserve.kernels.checks import require_tensor
from pdserve.kernels.cpu.library import DTYPES, Float, Pointer, Size, function


class Rows:
    """The library's norms. What a row becomes depends on that row alone."""

    def __init__(self, loaded: ctypes.CDLL) -> None:
        self._rms_norm = function(
            loaded, "pdserve_rms_norm", Pointer, Size, Pointer, Size, Pointer, Size, Size, Float, Size
        )

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
