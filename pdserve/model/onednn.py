"""oneDNN's products of bfloat16 for matrix units: of matrices that are packed once, with what follows a product."""

from collections.abc import Callable

import torch
from torch import Tensor

# These apply the operation that follows a product to its float32 sums, before rounding.
unary: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default
binary: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.binary


def packed(data: Tensor) -> Tensor:
    reordered: Tensor = torch.ops.mkldnn._reorder_linear_weight(data.contiguous())
    return reordered


def packs(data: Tensor) -> bool:
    """Say whether this machine multiplies packed weights of the matrix's dtype."""
    if data.device.type != "cpu" or data.dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
