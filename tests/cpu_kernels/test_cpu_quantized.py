"""Compiled quantized products are the formulas of their codes, each row by itself, on any processor."""

import ctypes
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from pdserve.kernels.cpu.calls import Immediate
from pdserve.kernels.cpu.layers import (
    BLOCK,
    Activation,
    Finish,
    Tiles,
    interleaved,
    look_up,
    multiplies_bytes,
    multiply,
    tiled_codes,
)

SHAPES = [(1, 32), (31, 64), (33, 96), (100, 576)]
NUM_ROWS = [0, 1, 2, 3, 6, 7, 40, 300]


class Code(NamedTuple):
    """What a weight's code is."""

    bits: int
    fp4: bool = False


FP4 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)  # values of codes without their sign
LEVELS = torch.tensor([12 + 2 * sign * value for sign in (1, -1) for value in FP4])  # as `Tiles` says
CODES = [Code(4), Code(8), Code(4, fp4=True)]
INPUT_BITS = [8, 16]
MOST_CODE = {8: 127, 16: 127 * 256}
DTYPES = [torch.float32, torch.bfloat16]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def coded(seed: int, width: int, inputs: int, code: Code) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """Return a random matrix in codes, and in float64."""
    draw, shape = generator(seed), (width, inputs // BLOCK)
    codes = torch.randint(0, 2**code.bits, (*shape, BLOCK), generator=draw, dtype=torch.uint8)
    scales = (torch.randn(shape, generator=draw) * 2.0 ** (1 - code.bits)).half()
    minimums = torch.randn(shape, generator=draw).half()
    levels = LEVELS[codes.long()] if code.fp4 else codes
    matrix = (minimums.double()[..., None] + scales.double()[..., None] * levels.double()).flatten(1)
    packed = codes if code.bits == 8 else codes[..., :16] | (codes[..., 16:] << 4)
    return (packed, scales, minimums), matrix


def as_coded(x: Tensor, input_bits: int) -> Tensor:
    """Return inputs as products take them: codes and a scale for each block."""
    blocks, most_code = x.double().unflatten(1, (-1, BLOCK)), MOST_CODE[input_bits]
    most = x.unflatten(1, (-1, BLOCK)).float().abs().amax(-1, keepdim=True)
    return ((blocks * (most_code / most).double()).round() * (most / most_code).double()).flatten(1)


def assert_near(found: Tensor, expected: Tensor, input_bits: int) -> None:
    """Results are off by their own rounding, and here and there by one input at the edge of two codes."""
    off, edge = found.double() - expected, 0.4 * 127 / MOST_CODE[input_bits]
    rounding = expected.abs() * (2**-8 if found.dtype == torch.bfloat16 else 1e-4)
    assert (off.abs() <= rounding + edge).all()
    if off.numel():
        assert off.square().mean() <= rounding.square().mean() + (edge / 20) ** 2


@pytest.mark.parametrize(("shape", "code", "input_bits", "dtype"), list(product(SHAPES, CODES, INPUT_BITS, DTYPES)))
def test_products_are_the_formulas(
    calls: Immediate, shape: tuple[int, int], code: Code, input_bits: int, dtype: torch.dtype
) -> None:
    width, inputs = shape
    parts, matrix = coded(1, width, inputs, code)
    up_parts, up = coded(2, width, inputs, code)
    draw = generator(3)
    bias = torch.randn(width, generator=draw).to(dtype)
    tiles = Tiles(tiled_codes(*parts), code.bits, width, dtype, bias, input_bits=input_bits, is_float=code.fp4)
    both = tiled_codes(*(interleaved(*pair) for pair in zip(parts, up_parts, strict=True)))
    gates = replace(tiles, data=both, bias=interleaved(bias, bias), gated=True)
    for num_rows in NUM_ROWS:
        x = torch.randn(num_rows, inputs, generator=draw).to(dtype)
        residual = torch.randn(num_rows, width, generator=draw).to(dtype)
        coded_x = as_coded(x, input_bits)
        sums = coded_x @ matrix.t() + bias.double()
        assert_near(multiply(calls, x, tiles), sums, input_bits)
        assert_near(multiply(calls, x, tiles, residual.clone()), sums + residual.double(), input_bits)
        scaled = multiply(calls, x, tiles, residual.clone(), finish=Finish(scale=0.5))
        assert_near(scaled, sums * 0.5 + residual.double(), input_bits)
        ups = coded_x @ up.t() + bias.double()
        gated = torch.nn.functional.silu(sums) * ups
        found = multiply(calls, x, gates, finish=Finish(Activation.SILU)).double()
        torch.testing.assert_close(
            found, gated, rtol=0.02, atol=0.06 * (1 + float(ups.abs().amax()) if num_rows else 1)
        )


@pytest.mark.parametrize(("code", "num_rows"), list(product(CODES, range(1, 14))))
def test_products_with_inputs_of_16_bits_are_those_of_the_inputs_themselves(
    calls: Immediate, code: Code, num_rows: int
) -> None:
    """A block's codes are off by half a step at most: what a sum is off by is bounded for any inputs."""
    width, inputs = 45, 160
    parts, matrix = coded(1, width, inputs, code)
    x = torch.randn(num_rows, inputs, generator=generator(num_rows)) * torch.logspace(-9, 9, num_rows)[:, None]
    x[:, ::17] *= 100.0  # inputs beside which others of their block are small
    found = multiply(calls, x, Tiles(tiled_codes(*parts), code.bits, width, torch.float32, is_float=code.fp4)).double()
    exact = x.double() @ matrix.t()
    steps = x.double().unflatten(1, (-1, BLOCK)).abs().amax(-1) / MOST_CODE[16]
    coding = steps @ matrix.abs().unflatten(1, (-1, BLOCK)).sum(-1).t() / 2
    rounding = (
        x.double().abs() @ matrix.abs().t() * 2**-18
    )  # of float32 sums, and of a code times the scale of its block
    assert ((found - exact).abs() <= 1.01 * coding + rounding).all()


@pytest.mark.parametrize(("code", "num_rows"), list(product(CODES, (0, 1, 5, 40))))
def test_float32_results_of_bfloat16_inputs_are_the_sums_before_rounding(
    calls: Immediate, code: Code, num_rows: int
) -> None:
    parts, _ = coded(1, 45, 96, code)
    tiles = Tiles(tiled_codes(*parts), code.bits, 45, torch.bfloat16, is_float=code.fp4)
    x = torch.randn(num_rows, 96, generator=generator(2)).bfloat16()
    found = multiply(calls, x, tiles, out=torch.empty(num_rows, 45))
    assert torch.equal(found, multiply(calls, x.float(), replace(tiles, dtype=torch.float32)))
    assert torch.equal(found.bfloat16(), multiply(calls, x, tiles))


@pytest.mark.parametrize(("code", "input_bits"), list(product(CODES, INPUT_BITS)))
def test_the_largest_codes_and_inputs_do_not_overflow(
    calls: Immediate, narrow: ctypes.CDLL, code: Code, input_bits: int
) -> None:
    width, inputs = 40, 96
    byte, level = (0x77, 24) if code.fp4 else (0xFF, 2**code.bits - 1)
    codes = torch.full((width, inputs // BLOCK, BLOCK * code.bits // 8), byte, dtype=torch.uint8)
    scales = torch.ones(width, inputs // BLOCK).half()
    tiles = Tiles(
        tiled_codes(codes, scales, scales * 0),
        code.bits,
        width,
        torch.float32,
        input_bits=input_bits,
        is_float=code.fp4,
    )
    for sign in (1.0, -1.0):
        for num_rows in (1, 2, 3, 4, 9):
            expected = torch.full((num_rows, width), sign * inputs * level)
            for each in (calls, Immediate(narrow)):
                found = multiply(each, torch.full((num_rows, inputs), sign), tiles)
                torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("code", "input_bits", "num_rows"), list(product(CODES, INPUT_BITS, NUM_ROWS)))
def test_a_row_depends_on_itself_alone(calls: Immediate, code: Code, input_bits: int, num_rows: int) -> None:
    parts, _ = coded(1, 100, 576, code)
    tiles = Tiles(tiled_codes(*parts), code.bits, 100, torch.bfloat16, input_bits=input_bits, is_float=code.fp4)
    x = torch.randn(num_rows, 576, generator=generator(2)).bfloat16()
    together = multiply(calls, x, tiles)
    for row in range(0, num_rows, 5):
        assert torch.equal(multiply(calls, x[row : row + 1], tiles)[0], together[row])


@pytest.mark.parametrize(("code", "dtype"), list(product(CODES, DTYPES)))
def test_rows_of_a_matrix_are_decoded(calls: Immediate, code: Code, dtype: torch.dtype) -> None:
    parts, matrix = coded(1, 77, 96, code)
    ids = torch.tensor([76, 0, 31, 32, 15, 16, 0])
    tiles = Tiles(tiled_codes(*parts), code.bits, 77, dtype, is_float=code.fp4)
    rows = look_up(calls, ids, tiles)
    rtol = 2**-8 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(rows.double(), matrix[ids], rtol=rtol, atol=1e-6)
    assert torch.equal(look_up(calls, ids, tiles, 0.3), rows * 0.3)


@pytest.mark.parametrize(("bad", "input_bits"), list(product([float("nan"), float("inf"), float("-inf")], INPUT_BITS)))
def test_an_input_that_is_not_finite_does_not_vanish(calls: Immediate, bad: float, input_bits: int) -> None:
    parts, _ = coded(1, 32, 64, Code(4))
    x = torch.ones(2, 64)
    x[0, 40] = bad
    out = multiply(calls, x, Tiles(tiled_codes(*parts), 4, 32, torch.float32, input_bits=input_bits))
    assert out[0].isnan().all()
    assert out[1].isfinite().all()


@pytest.mark.parametrize("input_bits", INPUT_BITS)
def test_zeros_give_zeros(calls: Immediate, input_bits: int) -> None:
    parts, _ = coded(1, 32, 64, Code(4))
    tiles = Tiles(tiled_codes(*parts), 4, 32, torch.float32, input_bits=input_bits)
    assert torch.equal(multiply(calls, torch.zeros(3, 64), tiles), torch.zeros(3, 32))


def test_a_processor_without_the_instructions_gets_the_same_results(
    calls: Immediate, narrow: ctypes.CDLL, loaded: ctypes.CDLL
) -> None:
    plain = Immediate(narrow)
    assert multiplies_bytes(narrow) <= multiplies_bytes(loaded)
    for code, input_bits in product(CODES, INPUT_BITS):
        (codes, scales, minimums), _ = coded(1, 50, 96, code)
        scales[0], scales[1], minimums[:2], minimums[2] = 2.0**-24, -(2.0**-15), 0.0, 65504.0  # two are subnormal
        tiles = Tiles(
            tiled_codes(codes, scales, minimums), code.bits, 50, torch.float32, input_bits=input_bits, is_float=code.fp4
        )
        x, ids = torch.randn(9, 96, generator=generator(2)), torch.arange(50)
        torch.testing.assert_close(multiply(plain, x, tiles), multiply(calls, x, tiles), rtol=1e-5, atol=1e-5)
        found, expected = look_up(plain, ids, tiles), look_up(calls, ids, tiles)
        assert torch.equal(found[:2], expected[:2])
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        minimums[3], minimums[4] = torch.inf, torch.nan
        rows = look_up(plain, ids, replace(tiles, data=tiled_codes(codes, scales, minimums)))
        assert rows[3].isinf().all()
        assert rows[4].isnan().all()


def test_what_does_not_fit_is_refused_by_name(calls: Immediate) -> None:
    parts, _ = coded(1, 32, 64, Code(4))
    tiles = Tiles(tiled_codes(*parts), 4, 32, torch.bfloat16)
    gates = Tiles(tiled_codes(*parts), 4, 16, torch.bfloat16, gated=True)
    x, silu = torch.zeros(2, 64, dtype=torch.bfloat16), Finish(Activation.SILU)
    for bad, message in (
        (lambda: Tiles(tiles.data, 4, 32, tiles.dtype, x[0, :31]), "bias must have shape"),
        (lambda: Tiles(gates.data, 4, 16, tiles.dtype, x[0, :16], gated=True), "bias must have shape"),
        (lambda: Tiles(tiles.data, 4, 32, tiles.dtype, input_bits=12), "input_bits must be 8 or 16, got 12"),
        (lambda: Tiles(tiles.data, 16, 32, tiles.dtype, is_float=True), "codes of floats have 4 or 8 bits, got 16"),
        (lambda: Tiles(tiles.data, 8, 32, torch.float32, is_float=True), "products take bfloat16, not torch.float32"),
        (lambda: look_up(calls, torch.arange(4), Tiles(tiles.data[0], 8, 32, tiles.dtype, is_float=True)), "FP8"),
        (lambda: multiply(calls, x, tiles, x[:, :32].clone(), x[:, :32]), "out: the result of a residual"),
        (lambda: multiply(calls, x, gates, None, torch.zeros(2, 16), silu), "out must be one of"),
        (lambda: multiply(calls, x, tiles, None, x[:, :31]), "out must have shape"),
        (lambda: look_up(calls, torch.arange(4)[::2], tiles), "ids must have stride 1"),
        (lambda: multiply(calls, x.float(), tiles), "x must be one of"),
        (lambda: multiply(calls, x[:, :32], tiles), "x must have shape"),
        (lambda: multiply(calls, x, tiles, x), "residual must have shape"),
        (lambda: multiply(calls, x, gates, x[:, :16]), "residual: none"),
        (lambda: look_up(calls, torch.zeros(1), tiles), "ids must be one of"),
    ):
        with pytest.raises(ValueError, match=message):
            bad()
