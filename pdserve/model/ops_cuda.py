"""The operations on a GPU: a Triton kernel for each that is no matrix product; a residual is added in the product."""

from torch import Tensor
from torch.nn import functional

from pdserve.kernels.pageio import rms_norm, silu_mul
from pdserve.model.ops import GateUp, Linear, Matrix, decoded, dense, joined


class CudaOps:
    """The operations of a GPU, or of a CPU where Triton interprets."""

    def __init__(self, eps: float) -> None:
        self._eps = eps

    def held(self, weight: Matrix) -> Linear:
        return decoded(weight)

    def held_gate_up(self, gate: Matrix, up: Matrix) -> Linear | GateUp:
        return joined(decoded(gate), decoded(up))

    def held_embedding(self, weight: Matrix, *, tied: bool) -> tuple[Linear, Linear | None]:
        matrix = decoded(weight)
        return matrix, matrix if tied else None

    def embed(self, token_ids: Tensor, weight: Linear) -> Tensor:
        return functional.embedding(token_ids, dense(weight).data)

    def rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self._eps)

    def linear(self, x: Tensor, weight: Linear) -> Tensor:
        matrix = dense(weight)
        return functional.linear(x, matrix.data, matrix.bias)

    def logits(self, x: Tensor, weight: Linear) -> Tensor:
        return self.linear(x, weight)

    def linear_add(self, x: Tensor, weight: Linear, residual: Tensor) -> Tensor:
        """Add the products to the residual before rounding."""
        matrix = dense(weight)
        total = residual.addmm_(x, matrix.data.t())
        return total if matrix.bias is None else total.add_(matrix.bias)

    def swiglu(self, x: Tensor, weight: Linear | GateUp) -> Tensor:
        if isinstance(weight, GateUp):
            raise TypeError("gate and up are joined on a GPU")
        return silu_mul(self.linear(x, weight))
