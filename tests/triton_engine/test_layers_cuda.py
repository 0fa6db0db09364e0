"""The GPU's layers mean what the plain ones mean."""

import torch

from pdserve.model.layers import FusedMlp, PlainLinear, RmsNorm
from pdserve.model.layers_cuda import AddingLinear, KernelMlp, KernelNorm

WIDTH, INNER, ROWS = 64, 96, 5


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_a_norm_in_one_kernel_is_the_norm() -> None:
    x, weight = randn(ROWS, WIDTH), randn(WIDTH)
    torch.testing.assert_close(KernelNorm(weight, 1e-5)(x), RmsNorm(weight, 1e-5)(x))


def test_a_product_summed_onto_the_residual_is_their_sum() -> None:
    x, residual, weight, bias = randn(ROWS, WIDTH), randn(ROWS, INNER), randn(INNER, WIDTH), randn(INNER)
    for given in (None, bias):
        expected = PlainLinear(weight, given).plus(x, residual)
        torch.testing.assert_close(AddingLinear(weight, given).plus(x, residual.clone()), expected)


def test_gating_in_one_kernel_is_the_feed_forward_half() -> None:
    x, residual = randn(ROWS, WIDTH), randn(ROWS, WIDTH)
    gate_up, down = randn(2 * INNER, WIDTH), randn(WIDTH, INNER)
    expected = FusedMlp(PlainLinear(gate_up), PlainLinear(down))(x, residual)
    ours = KernelMlp(AddingLinear(gate_up), AddingLinear(down))(x, residual.clone())
    torch.testing.assert_close(ours, expected)
