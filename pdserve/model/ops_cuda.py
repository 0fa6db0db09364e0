"""The operations on a GPU: Triton kernels for the common ones, torch for others; a residual is added in the product."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from pdserve.kernels.code_blocks import CodeBlocks
from pdserve.kernels.cpu.experts import SharedRows
from pdserve.kernels.cpu.layers import INPUT_BITS
from pdserve.kernels.experts import Added, Grouped, grouped_product, summed
from pdserve.kernels.pageio import rms_norm, silu_mul
from pdserve.kernels.products import Finish, product, rounds_inputs
from pdserve.kernels.tuning import device_of
from pdserve.model.activations import activate, bent_times
from pdserve.model.design import Activation
from pdserve.model.device_codes import code_blocks
from pdserve.model.ops import (
    Dense,
    ExpertStack,
    GateUp,
    Linear,
    Matrix,
    Mixture,
    Norm,
    Quantized,
    RmsNorm,
    TorchOps,
    decoded,
    dense,
    joined,
)
from pdserve.model.routing import route


class CudaOps(TorchOps):
    """The operations of a GPU, or of a CPU where Triton interprets."""

    stacks_experts = True

    def __init__(self, input_bits: int = INPUT_BITS) -> None:
        """Set up for one model. input_bits: 8: products that a chip has with inputs of 8 bits take such; 16."""
        self._input_bits = input_bits

    def held(self, weight: Matrix) -> Linear:
        if not isinstance(weight, Quantized):
            return weight
        held = code_blocks(weight.coded, weight.device, weight.bias)
        chip = device_of(str(held.codes.device))
        return replace(held, rounded=self._input_bits == 8 and rounds_inputs(held, chip))

    def held_gate_up(self, gate: Matrix, up: Matrix) -> Linear | GateUp:
        return self.held(joined(gate, up))

    def held_embedding(self, weight: Matrix, *, tied: bool) -> tuple[Linear, Linear | None]:
        matrix = decoded(weight)
        return matrix, matrix if tied else None

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        return rms_norm(x, norm.weight, norm.eps) if isinstance(norm, RmsNorm) else super().norm(x, norm)

    def linear(self, x: Tensor, weight: Linear) -> Tensor:
        if isinstance(weight, CodeBlocks):
            return product(x, weight, rounded=weight.rounded)
        return super().linear(x, weight)

    def linear_add(self, x: Tensor, weight: Linear, residual: Tensor, scale: float = 1.0) -> Tensor:
        """Add the products to the residual before rounding."""
        if isinstance(weight, CodeBlocks):
            return product(x, weight, Finish(residual, scale), rounded=weight.rounded)
        matrix = dense(weight)
        total = residual.addmm_(x, matrix.data.t(), alpha=scale)
        return total if matrix.bias is None else total.add_(matrix.bias, alpha=scale)

    def mix(
        self, x: Tensor, experts: Mixture, shared: SharedRows | None, residual: Tensor | None, scale: float
    ) -> Tensor:
        if not isinstance(experts, ExpertStack):
            raise TypeError("tiles are multiplied on CPUs alone")
        routed, taken = x[:, : experts.router.data.shape[1]], x[:, x.shape[1] - experts.inputs :]
        shares, chosen = route(routed, experts.router, experts.ranks_bias, experts.routing, experts.shares)
        of = Grouped.of(shares, chosen, len(experts.router.data))
        both = _grouped(taken, experts.gate_up, of.rows, of, x.dtype)
        inner = _bent(both, experts.activation) if experts.is_gated else activate(both, experts.activation)
        slots = torch.arange(len(inner), device=x.device)
        made = _grouped(inner, experts.down, slots, of, torch.float32)
        if shared is None:
            return summed(made, of, Added(residual=residual), x.dtype, scale)
        gates = None if shared.gate is None else functional.linear(x.float(), shared.gate.float()).flatten()
        return summed(made, of, Added(shared.made, gates, residual), x.dtype, scale)

    def gated(self, x: Tensor, weight: Linear | GateUp, activation: Activation) -> Tensor:
        if isinstance(weight, GateUp):
            raise TypeError("gate and up are joined on a GPU")
        return _bent(self.linear(x, weight), activation)


def _grouped(x: Tensor, matrix: Dense | CodeBlocks, rows: Tensor, of: Grouped, dtype: torch.dtype) -> Tensor:
    bias = None if matrix.bias is None else matrix.bias.view(of.num_experts, -1)
    return grouped_product(x, matrix if isinstance(matrix, CodeBlocks) else matrix.data, bias, rows, of, dtype)


def _bent(both: Tensor, activation: Activation) -> Tensor:
    """Return gates, bent, times their ups, which are side by side."""
    if activation is Activation.SILU:
        return silu_mul(both)
    gate, up = both.chunk(2, -1)
    return bent_times(gate, up, activation)
