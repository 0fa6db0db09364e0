"""Which layers serve a device: the one place where a model depends on where it runs.

The GPU's layers are imported only where one is chosen, so that a worker on a CPU starts without Triton.
"""

import torch
from torch import Tensor

from pdserve.model.layers import FusedMlp, Linear, Mlp, Norm, PackedLinear, PlainLinear, RmsNorm, packs


def linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """Return the fastest layer for the weight's device and dtype. weight: [out_features, in_features]."""
    if weight.device.type == "cuda":
        from pdserve.model.layers_cuda import AddingLinear  # noqa: PLC0415 - see above

        return AddingLinear(weight, bias)
    return PackedLinear(weight, bias) if packs(weight.dtype, weight.device) else PlainLinear(weight, bias)


def norm(weight: Tensor, eps: float) -> Norm:
    """Return the norm for the weight's device."""
    if weight.device.type == "cuda":
        from pdserve.model.layers_cuda import KernelNorm  # noqa: PLC0415 - see above

        return KernelNorm(weight, eps)
    return RmsNorm(weight, eps)


def fused_mlp(gate_up: Linear, down: Linear, device: torch.device) -> Mlp:
    """Return the feed-forward half for layers on `device`."""
    if device.type == "cuda":
        from pdserve.model.layers_cuda import KernelMlp  # noqa: PLC0415 - see above

        return KernelMlp(gate_up, down)
    return FusedMlp(gate_up, down)
