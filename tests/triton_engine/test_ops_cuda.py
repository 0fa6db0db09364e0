"""The GPU's operations mean what the plain ones mean."""

import torch

from pdserve.model.ops import Dense, TorchOps
from pdserve.model.ops_cuda import CudaOps

WIDTH, INNER, ROWS = 64, 96, 5
OPS, PLAIN = CudaOps(1e-5), TorchOps(1e-5)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_a_norm_in_one_kernel_is_the_norm() -> None:
    x, weight = randn(ROWS, WIDTH), randn(WIDTH)
    torch.testing.assert_close(OPS.rms_norm(x, weight), PLAIN.rms_norm(x, weight))


def test_a_product_summed_onto_the_residual_is_their_sum() -> None:
    x, residual, weight, bias = randn(ROWS, WIDTH), randn(ROWS, INNER), randn(INNER, WIDTH), randn(INNER)
    for given in (None, bias):
        matrix = Dense(weight, given)
        expected = PLAIN.linear_add(x, matrix, residual.clone())
        torch.testing.assert_close(OPS.linear_add(x, matrix, residual.clone()), expected)


def test_gating_in_one_kernel_is_swiglu() -> None:
    x, gate, up = randn(ROWS, WIDTH), Dense(randn(INNER, WIDTH)), Dense(randn(INNER, WIDTH) * 0.5)
    expected = PLAIN.swiglu(x, PLAIN.held_gate_up(gate, up))
    torch.testing.assert_close(OPS.swiglu(x, OPS.held_gate_up(gate, up)), expected)
