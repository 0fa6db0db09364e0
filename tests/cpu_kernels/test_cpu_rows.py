"""Compiled row-wise operations give what the plain formulas give in float64, each row by itself."""

import ctypes
from itertools import product

import pytest
import torch

from pdserve.kernels import reference
from pdserve.kernels.cpu.rows import Rows

DTYPES = [torch.float32, torch.bfloat16]
WIDTHS = [1, 15, 16, 17, 64, 100, 576, 4096]
CLOSE = {torch.float32: 2e-6, torch.bfloat16: 2**-7}


@pytest.fixture(scope="module")
def rows(loaded: ctypes.CDLL) -> Rows:
    return Rows(loaded)


def random_rows(num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(num_rows, width, generator=torch.Generator().manual_seed(width)) * 3).to(dtype)


@pytest.mark.parametrize(("width", "dtype"), list(product(WIDTHS, DTYPES)))
def test_norms_are_the_formulas(rows: Rows, width: int, dtype: torch.dtype) -> None:
    for num_rows in (0, 1, 3, 40):
        x, weight = random_rows(num_rows, width, dtype), random_rows(1, width, dtype)[0]
        expected = reference.rms_norm(x.double(), weight.double(), 1e-5)
        torch.testing.assert_close(
            rows.rms_norm(x, weight, 1e-5).double(), expected, rtol=CLOSE[dtype], atol=CLOSE[dtype]
        )


@pytest.mark.parametrize(("width", "dtype"), list(product(WIDTHS, DTYPES)))
def test_gates_are_the_formulas(rows: Rows, width: int, dtype: torch.dtype) -> None:
    for num_rows in (0, 1, 3, 40):
        x = random_rows(num_rows, 2 * width, dtype)
        expected = reference.silu_mul(x.double())
        torch.testing.assert_close(rows.silu_mul(x).double(), expected, rtol=CLOSE[dtype], atol=CLOSE[dtype])


def test_gates_of_extreme_values_stay_finite_and_nan_stays_nan(rows: Rows) -> None:
    gates = torch.tensor([[-1e30, -200.0, -90.0, 90.0, 1e30, float("nan")] + [1.0] * 6])
    out = rows.silu_mul(gates)[0]
    assert out[:5].tolist() == pytest.approx([0.0, 0.0, 0.0, 90.0, 1e30], rel=1e-6, abs=1e-30)
    assert out[5].isnan()


def test_a_row_depends_on_itself_alone(rows: Rows) -> None:
    x, weight = random_rows(300, 576, torch.bfloat16), random_rows(1, 576, torch.bfloat16)[0]
    together = rows.rms_norm(x, weight, 1e-5)
    assert torch.equal(together, torch.cat([rows.rms_norm(row[None], weight, 1e-5) for row in x]))


def test_what_does_not_fit_is_refused_by_name(rows: Rows) -> None:
    x = torch.zeros(2, 8)
    for bad, message in (
        (lambda: rows.rms_norm(x.double(), torch.zeros(8), 1e-5), "x must be one of"),
        (lambda: rows.rms_norm(x, torch.zeros(9), 1e-5), "weight must have shape"),
        (lambda: rows.rms_norm(x.t(), torch.zeros(2), 1e-5), "x must have stride 1"),
        (lambda: rows.silu_mul(x[:, :7]), "even number of columns"),
    ):
        with pytest.raises(ValueError, match=message):
            bad()
