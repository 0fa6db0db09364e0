"""Compiled norms are the formula in float64, each row by itself."""

import ctypes
from itertools import product

import pytest
import reference_kernels as reference
import torch

from pdserve.kernels.cpu.calls import Immediate
from pdserve.kernels.cpu.layers import rms_norm

DTYPES = [torch.float32, torch.bfloat16]
WIDTHS = [1, 15, 16, 17, 64, 100, 576, 4096]
CLOSE = {torch.float32: 2e-6, torch.bfloat16: 2**-7}


@pytest.fixture(scope="module")
def calls(loaded: ctypes.CDLL) -> Immediate:
    return Immediate(loaded)


def random_rows(num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(num_rows, width, generator=torch.Generator().manual_seed(width)) * 3).to(dtype)


def check_norms(calls: Immediate, width: int, dtype: torch.dtype) -> None:
    for num_rows in (0, 1, 3, 40):
        x, weight = random_rows(num_rows, width, dtype), random_rows(1, width, dtype)[0]
        expected = reference.rms_norm(x.double(), weight.double(), 1e-5)
        torch.testing.assert_close(
            rms_norm(calls, x, weight, 1e-5).double(), expected, rtol=CLOSE[dtype], atol=CLOSE[dtype]
        )


@pytest.mark.parametrize(("width", "dtype"), list(product(WIDTHS, DTYPES)))
def test_norms_are_the_formula(calls: Immediate, width: int, dtype: torch.dtype) -> None:
    check_norms(calls, width, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_by_vectors_of_any_width_are_the_formula(narrow: ctypes.CDLL, dtype: torch.dtype) -> None:
    for width in WIDTHS:
        check_norms(Immediate(narrow), width, dtype)


def test_a_row_depends_on_itself_alone(calls: Immediate) -> None:
    x, weight = random_rows(300, 576, torch.bfloat16), random_rows(1, 576, torch.bfloat16)[0]
    together = rms_norm(calls, x, weight, 1e-5)
    assert torch.equal(together, torch.cat([rms_norm(calls, row[None], weight, 1e-5) for row in x]))


def test_what_does_not_fit_is_refused_by_name(calls: Immediate) -> None:
    x = torch.zeros(2, 8)
    for bad, message in (
        (lambda: rms_norm(calls, x.double(), torch.zeros(8), 1e-5), "x must be one of"),
        (lambda: rms_norm(calls, x, torch.zeros(9), 1e-5), "weight must have shape"),
        (lambda: rms_norm(calls, x.t(), torch.zeros(2), 1e-5), "x must have stride 1"),
    ):
        with pytest.raises(ValueError, match=message):
            bad()
