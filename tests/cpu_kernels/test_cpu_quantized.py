"""Compiled quantized products are the formulas of their codes, each row by itself, on any processor."""

import ctypes
from itertools import product

import pytest
import torch
from torch import Tensor

from pdserve.kernels.cpu.calls import Immediate
from pdserve.kernels.cpu.layers import (
    BLOCK,
    Tiles,
    interleaved,
    look_up,
    multiplies_bytes,
    multiply,
    tiled_codes,
)

SHAPES = [(1, 32), (31, 64), (33, 96), (100, 576)]
NUM_ROWS = [0, 1, 2, 3, 6, 7, 40, 300]
BITS = [4, 8]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module")
def calls(loaded: ctypes.CDLL) -> Immediate:
    return Immediate(loaded)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def coded(seed: int, width: int, inputs: int, bits: int) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """Return a random matrix in codes, and in float64."""
    draw, shape = generator(seed), (width, inputs // BLOCK)
    codes = torch.randint(0, 2**bits, (*shape, BLOCK), generator=draw, dtype=torch.uint8)
    scales = (torch.randn(shape, generator=draw) * 2.0 ** (1 - bits)).half()
    minimums = torch.randn(shape, generator=draw).half()
    matrix = (minimums.double()[..., None] + scales.double()[..., None] * codes.double()).flatten(1)
    packed = codes if bits == 8 else codes[..., :16] | (codes[..., 16:] << 4)
    return (packed, scales, minimums), matrix


def as_coded(x: Tensor) -> Tensor:
    """Return inputs as products take them: 8 bits and a scale for each block."""
    blocks = x.double().unflatten(1, (-1, BLOCK))
    most = x.unflatten(1, (-1, BLOCK)).float().abs().amax(-1, keepdim=True)
    return ((blocks * (127.0 / most).double()).round() * (most / 127.0).double()).flatten(1)


def assert_near(found: Tensor, expected: Tensor) -> None:
    """Results are off by their own rounding, and here and there by one input at the edge of two codes."""
    off = found.double() - expected
    rounding = expected.abs() * (2**-8 if found.dtype == torch.bfloat16 else 1e-4)
    assert (off.abs() <= rounding + 0.4).all()
    if off.numel():
        assert off.square().mean() <= rounding.square().mean() + 0.02**2


@pytest.mark.parametrize(("shape", "bits", "dtype"), list(product(SHAPES, BITS, DTYPES)))
def test_products_are_the_formulas(calls: Immediate, shape: tuple[int, int], bits: int, dtype: torch.dtype) -> None:
    width, inputs = shape
    parts, matrix = coded(1, width, inputs, bits)
    up_parts, up = coded(2, width, inputs, bits)
    draw = generator(3)
    bias = torch.randn(width, generator=draw).to(dtype)
    tiles = Tiles(tiled_codes(*parts), bits, width, dtype, bias)
    both = tiled_codes(*(interleaved(*pair) for pair in zip(parts, up_parts, strict=True)))
    gates = Tiles(both, bits, width, dtype, interleaved(bias, bias), gated=True)
    for num_rows in NUM_ROWS:
        x = torch.randn(num_rows, inputs, generator=draw).to(dtype)
        residual = torch.randn(num_rows, width, generator=draw).to(dtype)
        sums = as_coded(x) @ matrix.t() + bias.double()
        assert_near(multiply(calls, x, tiles), sums)
        assert_near(multiply(calls, x, tiles, residual.clone()), sums + residual.double())
        ups = as_coded(x) @ up.t() + bias.double()
        gated = torch.nn.functional.silu(sums) * ups
        found = multiply(calls, x, gates).double()
        torch.testing.assert_close(
            found, gated, rtol=0.02, atol=0.06 * (1 + float(ups.abs().amax()) if num_rows else 1)
        )


@pytest.mark.parametrize(("bits", "num_rows"), list(product(BITS, NUM_ROWS)))
def test_a_row_depends_on_itself_alone(calls: Immediate, bits: int, num_rows: int) -> None:
    parts, _ = coded(1, 100, 576, bits)
    tiles = Tiles(tiled_codes(*parts), bits, 100, torch.bfloat16)
    x = torch.randn(num_rows, 576, generator=generator(2)).bfloat16()
    together = multiply(calls, x, tiles)
    for row in range(0, num_rows, 5):
        assert torch.equal(multiply(calls, x[row : row + 1], tiles)[0], together[row])


@pytest.mark.parametrize(("bits", "dtype"), list(product(BITS, DTYPES)))
def test_rows_of_a_matrix_are_decoded(calls: Immediate, bits: int, dtype: torch.dtype) -> None:
    parts, matrix = coded(1, 77, 96, bits)
    ids = torch.tensor([76, 0, 31, 32, 15, 16, 0])
    rows = look_up(calls, ids, Tiles(tiled_codes(*parts), bits, 77, dtype))
    rtol = 2**-8 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(rows.double(), matrix[ids], rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_an_input_that_is_not_finite_does_not_vanish(calls: Immediate, bad: float) -> None:
    parts, _ = coded(1, 32, 64, 4)
    x = torch.ones(2, 64)
    x[0, 40] = bad
    out = multiply(calls, x, Tiles(tiled_codes(*parts), 4, 32, torch.float32))
    assert out[0].isnan().all()
    assert out[1].isfinite().all()


def test_zeros_give_zeros(calls: Immediate) -> None:
    parts, _ = coded(1, 32, 64, 4)
    tiles = Tiles(tiled_codes(*parts), 4, 32, torch.float32)
    assert torch.equal(multiply(calls, torch.zeros(3, 64), tiles), torch.zeros(3, 32))


def test_a_processor_without_the_instructions_gets_the_same_results(calls: Immediate, narrow: ctypes.CDLL) -> None:
    plain = Immediate(narrow)
    assert not multiplies_bytes(narrow)
    for bits in BITS:
        (codes, scales, minimums), _ = coded(1, 50, 96, bits)
        scales[0], scales[1], minimums[:2], minimums[2] = 2.0**-24, -(2.0**-15), 0.0, 65504.0  # two are subnormal
        tiles = Tiles(tiled_codes(codes, scales, minimums), bits, 50, torch.float32)
        x, ids = torch.randn(9, 96, generator=generator(2)), torch.arange(50)
        torch.testing.assert_close(multiply(plain, x, tiles), multiply(calls, x, tiles), rtol=1e-5, atol=1e-5)
        found, expected = look_up(plain, ids, tiles), look_up(calls, ids, tiles)
        assert torch.equal(found[:2], expected[:2])
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        minimums[3], minimums[4] = torch.inf, torch.nan
        rows = look_up(plain, ids, Tiles(tiled_codes(codes, scales, minimums), bits, 50, torch.float32))
        assert rows[3].isinf().all()
        assert rows[4].isnan().all()


def test_what_does_not_fit_is_refused_by_name(calls: Immediate) -> None:
    parts, _ = coded(1, 32, 64, 4)
    tiles = Tiles(tiled_codes(*parts), 4, 32, torch.bfloat16)
    gates = Tiles(tiled_codes(*parts), 4, 16, torch.bfloat16, gated=True)
    x = torch.zeros(2, 64, dtype=torch.bfloat16)
    for bad, message in (
        (lambda: Tiles(tiles.data, 4, 32, tiles.dtype, x[0, :31]), "bias must have shape"),
        (lambda: Tiles(gates.data, 4, 16, tiles.dtype, x[0, :16], gated=True), "bias must have shape"),
        (lambda: look_up(calls, torch.arange(4)[::2], tiles), "ids must have stride 1"),
        (lambda: multiply(calls, x.float(), tiles), "x must be one of"),
        (lambda: multiply(calls, x[:, :32], tiles), "x must have shape"),
        (lambda: multiply(calls, x, tiles, x), "residual must have shape"),
        (lambda: multiply(calls, x, gates, x[:, :16]), "residual: none"),
        (lambda: look_up(calls, torch.zeros(1), tiles), "ids must be one of"),
    ):
        with pytest.raises(ValueError, match=message):
            bad()
