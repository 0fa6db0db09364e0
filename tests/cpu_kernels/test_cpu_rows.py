"""Compiled norms are the formulas in float64, each row by itself."""

import ctypes
from itertools import product

import pytest
import reference_kernels as reference
import torch
from torch.nn import functional

from pdserve.kernels.cpu.calls import Immediate
from pdserve.kernels.cpu.layers import layer_norm, rms_norm, rms_norm_
from pdserve.kernels.cpu.states import multiply_rows
from pdserve.model.ops import LayerNorm, RmsNorm, TorchOps

DTYPES = [torch.float32, torch.bfloat16]
WIDTHS = [1, 15, 16, 17, 64, 100, 576, 4096]
CLOSE = {torch.float32: 2e-6, torch.bfloat16: 2**-7}


def random_rows(num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(num_rows, width, generator=torch.Generator().manual_seed(width)) * 3).to(dtype)


def check_norms(calls: Immediate, width: int, dtype: torch.dtype) -> None:
    close = {"rtol": CLOSE[dtype], "atol": CLOSE[dtype]}
    weight, bias = random_rows(2, width, dtype)
    for num_rows in (0, 1, 3, 40):
        x, residual = random_rows(num_rows, width, dtype), random_rows(num_rows, width + 1, dtype)[:, 1:]
        normed = rms_norm(calls, x, weight, 1e-5)
        torch.testing.assert_close(normed.double(), reference.rms_norm(x.double(), weight.double(), 1e-5), **close)
        sums = normed + residual
        assert rms_norm(calls, x, weight, 1e-5, residual) is residual
        torch.testing.assert_close(residual, sums, **close)
        x += 5.0
        expected = functional.layer_norm(x.double(), (width,), weight.double(), bias.double(), 1e-2)
        found = layer_norm(calls, x, weight, bias, 1e-2)
        torch.testing.assert_close(found.double(), expected, rtol=close["rtol"], atol=10 * close["atol"])


@pytest.mark.parametrize(("width", "dtype"), list(product(WIDTHS, DTYPES)))
def test_rows_are_multiplied_with_columns_of_wider_ones_in_place(
    calls: Immediate, width: int, dtype: torch.dtype
) -> None:
    for num_rows in (0, 1, 40):
        x, wide = random_rows(num_rows, width, dtype), random_rows(num_rows, width + 2, dtype)
        factors, before = wide[:, 1:-1], wide.clone()
        expected = x * factors
        assert multiply_rows(calls, x, factors) is x
        assert torch.equal(x, expected)
        assert torch.equal(wide, before)
    with pytest.raises(ValueError, match="factors"):
        multiply_rows(calls, x, wide)


@pytest.mark.parametrize(("width", "dtype"), list(product(WIDTHS, DTYPES)))
def test_norms_are_the_formula(calls: Immediate, width: int, dtype: torch.dtype) -> None:
    check_norms(calls, width, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_by_vectors_of_any_width_are_the_formula(narrow: ctypes.CDLL, dtype: torch.dtype) -> None:
    for width in WIDTHS:
        check_norms(Immediate(narrow), width, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_in_bfloat16_roundings_are_those_of_torchs_operations(calls: Immediate, dtype: torch.dtype) -> None:
    """A norm is rounded before its weight, after it, and after the residual; a layer norm once."""
    x, residual = random_rows(40, 576, dtype), random_rows(40, 577, dtype)[:, :576]
    weight, bias = random_rows(2, 576, dtype)
    ops, rms, layer = TorchOps(), RmsNorm(weight, 1e-5), LayerNorm(weight, bias, 1e-5)
    pairs = (
        (rms_norm(calls, x, weight, 1e-5), ops.norm(x, rms)),
        (rms_norm(calls, x, weight, 1e-5, residual.clone()), ops.norm_add(x, rms, residual.clone())),
        (layer_norm(calls, x, weight, bias, 1e-5), ops.norm(x, layer)),
    )
    for found, expected in pairs:
        if dtype == torch.bfloat16:
            assert (found != expected).float().mean() < 2e-3, "few lie at the edge of two numbers"
        torch.testing.assert_close(found, expected, rtol=1e-5 if dtype == torch.float32 else 2**-7, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_columns_of_a_wider_matrix_are_normed_in_place_and_others_stay(calls: Immediate, dtype: torch.dtype) -> None:
    for width in WIDTHS:
        wide = random_rows(7, width + 30, dtype)
        given, weight = wide.clone(), random_rows(1, width, dtype)[0]
        rms_norm_(calls, wide[:, 13 : 13 + width], weight, 1e-5)
        given[:, 13 : 13 + width] = rms_norm(calls, given[:, 13 : 13 + width].contiguous(), weight, 1e-5)
        assert torch.equal(wide, given)


def test_a_row_depends_on_itself_alone(calls: Immediate) -> None:
    x, weight = random_rows(300, 576, torch.bfloat16), random_rows(1, 576, torch.bfloat16)[0]
    together, layers = rms_norm(calls, x, weight, 1e-5), layer_norm(calls, x, weight, weight, 1e-5)
    assert torch.equal(together, torch.cat([rms_norm(calls, row[None], weight, 1e-5) for row in x]))
    assert torch.equal(layers, torch.cat([layer_norm(calls, row[None], weight, weight, 1e-5) for row in x]))


def test_what_does_not_fit_is_refused_by_name(calls: Immediate) -> None:
    x = torch.zeros(2, 8)
    for bad, message in (
        (lambda: rms_norm(calls, x.double(), torch.zeros(8), 1e-5), "x must be one of"),
        (lambda: rms_norm(calls, x, torch.zeros(9), 1e-5), "weight must have shape"),
        (lambda: rms_norm(calls, x, torch.zeros(8), 1e-5, x[:1]), "residual must have shape"),
        (lambda: rms_norm(calls, x, torch.zeros(8), 1e-5, x.bfloat16()), "residual must be one of"),
        (lambda: rms_norm_(calls, x[:, ::2], torch.zeros(4), 1e-5), "x must have stride 1"),
        (lambda: layer_norm(calls, x, torch.zeros(8), torch.zeros(7), 1e-5), "bias must have shape"),
        (lambda: rms_norm(calls, x.t(), torch.zeros(2), 1e-5), "x must have stride 1"),
    ):
        with pytest.raises(ValueError, match=message):
            bad()
