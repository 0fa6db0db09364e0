"""RMSNorm, compiled."""

from torch import Tensor

from pdserve.kernels.checks import require_tensor
from pdserve.kernels.cpu.calls import Call, Calls, Kind
from pdserve.kernels.cpu.library import DTYPES


def rms_norm(calls: Calls, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalize rows [num_rows, width] to unit root mean square, then scale them by weight [width].

    What a row becomes depends on that row alone.
    """
    require_tensor("x", x, (None, None), tuple(DTYPES))
    num_rows, width = x.shape
    require_tensor("weight", weight, (width,), (x.dtype,))
    out = calls.empty(num_rows, width, x.dtype)
    call = Call(
        kind=Kind.NORM, type=DTYPES[x.dtype], out=out.data_ptr(), x=x.data_ptr(), out_stride=width,
        x_stride=x.stride(0), width=width, weights=weight.data_ptr(), eps=eps,
    )  # fmt: skip
    calls.take(num_rows, call)
    return out
