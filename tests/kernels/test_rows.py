"""The row-wise kernels compute what the reference computes, at widths that are not powers of two too."""

import pytest
import reference_kernels as reference
import torch

from pdserve.kernels import pageio

STEP = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    step = STEP[got.dtype]
    torch.testing.assert_close(got.double(), want.double(), rtol=step, atol=step / 16)


@pytest.mark.parametrize("dtype", STEP)
@pytest.mark.parametrize("shape", [(1, 1), (5, 576), (3, 4096), (9, 100)])
def test_rms_norm_has_unit_root_mean_square_times_the_weight(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    x, weight = normal(*shape, dtype=dtype), normal(shape[1], dtype=dtype, seed=1)
    monkeypatch.setattr(torch, "empty_like", lambda like: torch.full_like(like, torch.nan))
    assert_close(pageio.rms_norm(x, weight, 1e-5), reference.rms_norm(x.double(), weight.double(), 1e-5))


@pytest.mark.parametrize("dtype", STEP)
@pytest.mark.parametrize("width", [1, 1500])
def test_silu_mul_gates_the_second_half_with_the_first(width: int, dtype: torch.dtype) -> None:
    x = normal(3, 2 * width, dtype=dtype)
    assert_close(pageio.silu_mul(x), reference.silu_mul(x.double()))


def test_rows_may_be_slices_of_wider_ones() -> None:
    x, weight = normal(4, 300), normal(100, seed=1)
    part = x[:, 50:150]
    assert_close(pageio.rms_norm(part, weight, 1e-5), reference.rms_norm(part.double(), weight.double(), 1e-5))
    assert_close(pageio.silu_mul(part), reference.silu_mul(part.double()))
