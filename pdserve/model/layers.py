"""The layers every architecture of the family is made of."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional


class Linear(Protocol):
    """A weight matrix and how it is applied: [..., in_features] -> [..., out_features]."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def silu(self, x: Tensor) -> Tensor:
        """Return silu(linear(x))."""
        ...

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        """Return linear(x) * other."""
        ...

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """Return linear(x) + other, which may be overwritten."""
        ...


class PlainLinear:
    """A weight as the checkpoint has it, on any device and in any dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self._weight, self._bias)

    def silu(self, x: Tensor) -> Tensor:
        return functional.silu(self(x))

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        return self(x).mul_(other)

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        return self(x).add_(other)


class PackedLinear:
    """A bfloat16 weight in the tile order of oneDNN's matrix units, so that no call repacks it.

    What follows the product is done on the float32 sums before they are rounded.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return _unary(x, self._weight, self._bias, "none", [], "")

    def silu(self, x: Tensor) -> Tensor:
        return _unary(x, self._weight, self._bias, "swish", [], "")

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        return _binary(x, other, self._weight, self._bias, "mul")

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        return _binary(x, other, self._weight, self._bias, "add")


_unary: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default
_binary: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.binary


def packs(dtype: torch.dtype, device: torch.device) -> bool:
    """Say whether this machine multiplies packed weights of `dtype`."""
    if device.type != "cpu" or dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class Norm(Protocol):
    """x / rms(x) * weight over the last axis, with the mean of squares in float32."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor: ...


class RmsNorm:
    """The norm in plain torch."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps
        self._eps = torch.full((1, 1), eps, dtype=torch.float32, device=weight.device)
        self._per_feature = 1.0 / weight.numel()

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.float()
        norm = torch.linalg.vector_norm(wide, 2, -1, keepdim=True)
        scale = torch.addcmul(self._eps, norm, norm, value=self._per_feature).rsqrt_()
        return (wide * scale).to(x.dtype).mul_(self.weight)


class Mlp(Protocol):
    """The feed-forward half of a layer; adds its result to `residual`."""

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor: ...


class FusedMlp:
    """SwiGLU with gate and up in one product; best where starting a kernel is dear."""

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self._gate_up = gate_up
        self._down = down

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        gate, up = self._gate_up(x).chunk(2, -1)
        return self._down.plus(functional.silu(gate).mul_(up), residual)


class SplitMlp:
    """SwiGLU with silu and the product done as the sums leave the matrix units."""

    def __init__(self, gate: Linear, up: Linear, down: Linear) -> None:
        self._gate = gate
        self._up = up
        self._down = down

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        return self._down.plus(self._up.times(x, self._gate.silu(x)), residual)
