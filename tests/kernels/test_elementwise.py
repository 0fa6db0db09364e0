"""The row-wise kernels compute what the reference computes, at widths that are not powers of two too."""

import pytest
import torch

from pdserve.kernels import elementwise, reference

STEP = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    step = STEP[got.dtype]
    torch.testing.assert_close(got.double(), want.double(), rtol=step, atol=step / 16)


@pytest.mark.parametrize("dtype", STEP)
@pytest.mark.parametrize("shape", [(1, 1), (5, 576), (3, 4096), (9, 100)])
def test_rms_norm_has_unit_root_mean_square_times_the_weight(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight = normal(*shape, dtype=dtype), normal(shape[1], dtype=dtype, seed=1)
    out = torch.full_like(x, torch.nan)
    elementwise.rms_norm(x, weight, 1e-5, out=out)
    assert_close(out, reference.rms_norm(x.double(), weight.double(), 1e-5))


@pytest.mark.parametrize("dtype", STEP)
def test_the_residual_is_left_holding_the_sum_that_was_normalized(dtype: torch.dtype) -> None:
    x, residual, weight = normal(5, 576, dtype=dtype), normal(5, 576, dtype=dtype, seed=1), normal(576, seed=2)
    total = x.double() + residual.double()
    out = elementwise.rms_norm(x, weight, 1e-5, residual=residual)
    assert_close(residual, total)
    assert_close(out, reference.rms_norm(residual.double(), weight.double(), 1e-5))


@pytest.mark.parametrize("dtype", STEP)
@pytest.mark.parametrize("width", [1, 1500])
def test_silu_mul_gates_the_second_half_with_the_first(width: int, dtype: torch.dtype) -> None:
    x = normal(3, 2 * width, dtype=dtype)
    assert_close(elementwise.silu_mul(x), reference.silu_mul(x.double()))


def test_rows_may_be_slices_of_wider_ones() -> None:
    x, weight = normal(4, 300), normal(100, seed=1)
    part = x[:, 50:150]
    assert_close(elementwise.rms_norm(part, weight, 1e-5), reference.rms_norm(part.double(), weight.double(), 1e-5))
    assert_close(elementwise.silu_mul(part), reference.silu_mul(part.double()))


@pytest.mark.parametrize(("head_dim", "rot", "interleaved"), [(64, 64, False), (80, 20, False), (128, 128, True)])
def test_rope_turns_channel_pairs_and_leaves_the_rest(head_dim: int, rot: int, interleaved: bool) -> None:
    x, positions = normal(6, 11, head_dim), torch.tensor([5, 0, 1, 4, 4, 2])
    angles = torch.linspace(0, 6, 6)[:, None] * torch.linspace(0.1, 1, rot // 2)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    want = reference.rope(x.double(), cos_sin[positions].double(), interleaved=interleaved)
    assert_close(elementwise.rope(x, cos_sin, positions, interleaved=interleaved), want)
