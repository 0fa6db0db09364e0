"""The GPU's operations mean what the plain ones mean."""

import torch

from pdserve.model.design import Activation
from pdserve.model.ops import Dense, RmsNorm, TorchOps
from pdserve.model.ops_cuda import CudaOps

WIDTH, INNER, ROWS = 64, 96, 5
OPS, PLAIN = CudaOps(), TorchOps()


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_a_norm_in_one_kernel_is_the_norm() -> None:
    x, norm = randn(ROWS, WIDTH), RmsNorm(randn(WIDTH), 1e-5)
    torch.testing.assert_close(OPS.norm(x, norm), PLAIN.norm(x, norm))


def test_a_product_summed_onto_the_residual_is_their_sum() -> None:
    x, residual, weight, bias = randn(ROWS, WIDTH), randn(ROWS, INNER), randn(INNER, WIDTH), randn(INNER)
    for given in (None, bias):
        matrix = Dense(weight, given)
        expected = PLAIN.linear_add(x, matrix, residual.clone())
        torch.testing.assert_close(OPS.linear_add(x, matrix, residual.clone()), expected)


def test_gating_in_one_kernel_is_swiglu() -> None:
    x, gate, up = randn(ROWS, WIDTH), Dense(randn(INNER, WIDTH)), Dense(randn(INNER, WIDTH) * 0.5)
    for activation in (Activation.SILU, Activation.GELU_TANH):
        expected = PLAIN.gated(x, PLAIN.held_gate_up(gate, up), activation)
        ours = OPS.gated(x, OPS.held_gate_up(gate, up), activation)
        torch.testing.assert_close(ours, expected)
