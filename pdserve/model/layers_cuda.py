"""The layers on a GPU: what is not a matrix product is one Triton kernel each, what can ride on a product does."""

from torch import Tensor

from pdserve.kernels.elementwise import rms_norm, silu_mul
from pdserve.model.layers import Linear, PlainLinear


class AddingLinear(PlainLinear):
    """A weight whose products are summed onto what is there before they are rounded."""

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        total = other.addmm_(x, self._weight.t())
        return total if self._bias is None else total.add_(self._bias)


class KernelNorm:
    """The norm of rows [num_tokens, width] in one pass."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class KernelMlp:
    """SwiGLU with gate and up in one product, and what lies between the products in one pass."""

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self._gate_up = gate_up
        self._down = down

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        return self._down.plus(silu_mul(self._gate_up(x)), residual)
