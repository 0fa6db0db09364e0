"""Compiled products of bfloat16 give what float64 gives, each row by itself."""

import ctypes
from itertools import product

import pytest
import torch
from narrow_floats import in_fp8
from torch import Tensor
from torch.nn.functional import silu

from pdserve.kernels.cpu.calls import Immediate
from pdserve.kernels.cpu.layers import (
    PLAINLY,
    Activation,
    Finish,
    HeadTiles,
    Tiles,
    interleaved,
    look_up,
    multiply,
    multiply_heads,
    tiled,
    tiled_fp8,
    tiled_gate_up,
)

SHAPES = [(1, 2), (31, 6), (33, 64), (100, 192), (192, 576), (300, 1100)]
NUM_ROWS = [0, 1, 4, 5, 12, 13, 40, 500]
CLOSE = {"rtol": 2**-8, "atol": 2**-6}


class Products:
    """Products that leave the residual as it is."""

    def __init__(self, loaded: ctypes.CDLL) -> None:
        self.calls = Immediate(loaded)

    def product(self, x: Tensor, tiles: Tiles, residual: Tensor | None = None) -> Tensor:
        finish = Finish(Activation.SILU) if tiles.gated else PLAINLY
        return multiply(self.calls, x, tiles, None if residual is None else residual.clone(), finish=finish)


@pytest.fixture(scope="module")
def products(either: ctypes.CDLL) -> Products:
    return Products(either)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize(("shape", "num_rows"), list(product(SHAPES, NUM_ROWS)))
def test_products_are_the_formulas(products: Products, shape: tuple[int, int], num_rows: int) -> None:
    width, inputs = shape
    weight, up, bias = normal(1, width, inputs), normal(2, width, inputs), normal(3, width)
    x, residual = normal(4, num_rows, inputs), normal(5, num_rows, width)
    plain = x.double() @ weight.double().t()
    biased = plain + bias.double()
    gated = silu(biased) * (x.double() @ up.double().t() + bias.double())
    torch.testing.assert_close(products.product(x, tiled(weight)).double(), plain, **CLOSE)
    torch.testing.assert_close(products.product(x, tiled(weight, bias)).double(), biased, **CLOSE)
    added = products.product(x, tiled(weight, bias), residual)
    torch.testing.assert_close(added.double(), biased + residual.double(), **CLOSE)
    both = products.product(x, tiled_gate_up(weight, up, (bias, bias)))
    torch.testing.assert_close(both.double(), gated, **CLOSE)


@pytest.mark.parametrize("num_rows", [1, 4, 5, 500])
def test_vectors_of_any_width_give_the_formula(narrow: ctypes.CDLL, num_rows: int) -> None:
    weight, bias, x = normal(1, 100, 576), normal(2, 100), normal(3, num_rows, 576)
    expected = x.double() @ weight.double().t() + bias.double()
    torch.testing.assert_close(Products(narrow).product(x, tiled(weight, bias)).double(), expected, **CLOSE)


@pytest.mark.parametrize(("shape", "num_rows"), list(product([*SHAPES, (64, 1024)], NUM_ROWS)))
def test_products_of_fp8_are_the_formulas(products: Products, shape: tuple[int, int], num_rows: int) -> None:
    check_fp8(products, *shape, num_rows)


@pytest.mark.parametrize("num_rows", [1, 4, 5, 40])
def test_fp8_is_the_formula_in_vectors_of_any_width(narrow: ctypes.CDLL, num_rows: int) -> None:
    check_fp8(Products(narrow), 100, 576, num_rows)


def check_fp8(products: Products, width: int, inputs: int, num_rows: int) -> None:
    (gates, gate), (ups, up) = (in_fp8(seed, width, inputs) for seed in (1, 2))
    x, bias, residual = normal(3, num_rows, inputs), normal(4, width), normal(5, num_rows, width)
    plain = x.double() @ gate.t() + bias.double()
    tiles = Tiles(tiled_fp8(*gates), 8, width, torch.bfloat16, bias, is_float=True)
    assert tiles.inputs == inputs
    torch.testing.assert_close(products.product(x, tiles).double(), plain, **CLOSE)
    torch.testing.assert_close(products.product(x, tiles, residual).double(), plain + residual.double(), **CLOSE)
    both = tiled_fp8(*(interleaved(*each) for each in zip(gates, ups, strict=True)))
    gated = products.product(x, Tiles(both, 8, width, torch.bfloat16, gated=True, is_float=True)).double()
    torch.testing.assert_close(gated, silu(x.double() @ gate.t()) * (x.double() @ up.t()), **CLOSE)


@pytest.mark.parametrize("inputs", [192, 576])
def test_a_row_of_fp8_depends_on_itself_alone(products: Products, inputs: int) -> None:
    check_rows_of_fp8(products, inputs)


def test_a_row_of_fp8_depends_on_itself_alone_in_vectors_of_any_width(narrow: ctypes.CDLL) -> None:
    check_rows_of_fp8(Products(narrow), 576)


def check_rows_of_fp8(products: Products, inputs: int) -> None:
    """Compare rows that are multiplied by themselves with rows of parts, of panels and of several blocks."""
    tiles = Tiles(tiled_fp8(*in_fp8(1, 100, inputs)[0]), 8, 100, torch.bfloat16, is_float=True)
    x = normal(2, 500, inputs)
    alone = torch.cat([multiply(products.calls, row, tiles, out=torch.empty(1, 100)) for row in x.split(1)])
    for num_rows in (4, 8, 9, 12, 13, 24, 25, 40, 240, 241, 500):
        found = multiply(products.calls, x[:num_rows], tiles, out=torch.empty(num_rows, 100))
        assert torch.equal(found, alone[:num_rows])


def test_every_code_of_fp8_is_its_value(products: Products) -> None:
    check_codes(products)


def test_every_code_of_fp8_is_its_value_in_vectors_of_any_width(narrow: ctypes.CDLL) -> None:
    check_codes(Products(narrow))


def check_codes(products: Products) -> None:
    codes = torch.arange(256, dtype=torch.uint8)[torch.arange(256) % 128 < 127]
    both = torch.stack((codes, codes.flip(0)), 1)
    tiles = Tiles(tiled_fp8(both, torch.ones(len(codes), 1)), 8, len(codes), torch.bfloat16, is_float=True)
    found = multiply(products.calls, torch.eye(2).bfloat16(), tiles, out=torch.empty(2, len(codes)))
    assert torch.equal(found.t(), both.view(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_float32_results_are_the_sums_before_rounding(products: Products, num_rows: int) -> None:
    weight, x = normal(1, 45, 64), normal(2, num_rows, 64)
    found = multiply(products.calls, x, tiled(weight), out=torch.empty(num_rows, 45))
    torch.testing.assert_close(found.double(), x.double() @ weight.double().t(), rtol=1e-5, atol=1e-4)
    assert torch.equal(found.bfloat16(), products.product(x, tiled(weight)))


@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_a_row_depends_on_itself_alone(products: Products, num_rows: int) -> None:
    x, residual = normal(1, num_rows, 576), normal(2, num_rows, 100)
    matrix, pair = tiled(normal(3, 100, 576)), tiled_gate_up(normal(4, 100, 576), normal(5, 100, 576))
    added, gated = products.product(x, matrix, residual), products.product(x, pair)
    for row in range(0, num_rows, 7):
        only = slice(row, row + 1)
        assert torch.equal(products.product(x[only], matrix, residual[only]), added[only])
        assert torch.equal(products.product(x[only], pair), gated[only])


def test_rows_of_any_stride_are_multiplied(products: Products) -> None:
    wide, matrix = normal(1, 20, 200), tiled(normal(2, 64, 64))
    x, residual = wide[::2, 8:72], wide[::2, 100:164]
    expected = products.product(x.contiguous(), matrix, residual.contiguous())
    assert torch.equal(multiply(products.calls, x, matrix, residual), expected)
    assert torch.equal(residual, expected)  # which the result overwrites


@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_what_follows_a_sum_comes_in_its_order(products: Products, num_rows: int) -> None:
    """Bias, activation, scale and residual; the result lies in the residual."""
    weight, bias, x, wide = normal(1, 45, 64), normal(2, 45), normal(3, num_rows, 64), normal(4, num_rows, 50)
    finish, residual = Finish(Activation.SILU, scale=-0.4), wide[:, 3:48]
    expected = torch.nn.functional.silu(x.double() @ weight.double().t() + bias.double()) * -0.4 + residual.double()
    assert multiply(products.calls, x, tiled(weight, bias), residual, finish=finish) is residual
    torch.testing.assert_close(residual.double(), expected, **CLOSE)


@pytest.mark.parametrize("inputs", [2, 30, 64])
def test_rows_of_a_matrix_in_tiles_are_looked_up_times_a_scale(products: Products, inputs: int) -> None:
    matrix = normal(1, 77, inputs)
    rows = torch.tensor([76, 0, 31, 32, 0])
    assert torch.equal(look_up(products.calls, rows, tiled(matrix)), matrix[rows])
    assert torch.equal(look_up(products.calls, rows, tiled(matrix), 1.7), matrix[rows] * 1.7)


def test_what_does_not_fit_is_refused_by_name(products: Products) -> None:
    matrix, pair, x = tiled(normal(1, 8, 4)), tiled_gate_up(normal(1, 8, 4), normal(2, 8, 4)), normal(3, 2, 4)
    for bad, message in (
        (lambda: tiled(normal(1, 8, 5)), "inputs must be even"),
        (lambda: tiled(normal(1, 8, 4), normal(2, 7)), "bias must have shape"),
        (lambda: tiled(normal(1, 8, 4), normal(2, 8).float()), "bias must be one of"),
        (lambda: tiled(normal(1, 8, 4), normal(2, 16)[::2]), "bias must have stride 1"),
        (lambda: products.product(x.float(), matrix), "x must be one of"),
        (lambda: products.product(x[:, :2], matrix), "x must have shape"),
        (lambda: products.product(x, matrix, x), "residual must have shape"),
        (lambda: products.product(x, pair, normal(1, 2, 8)), "residual: none"),
        (lambda: multiply(products.calls, x, pair), "gates need an activation"),
        (lambda: multiply(products.calls, x, pair, finish=Finish(Activation.SILU, scale=2.0)), "neither scale nor cap"),
        (lambda: multiply(products.calls, x, pair, finish=Finish(Activation.SILU, cap=2.0)), "neither scale nor cap"),
    ):
        with pytest.raises(ValueError, match=message):
            bad()


@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize(("num_heads", "width", "inputs"), [(1, 32, 2), (3, 45, 24), (16, 576, 192)])
def test_each_head_is_multiplied_with_its_own_matrix(
    products: Products, num_heads: int, width: int, inputs: int, num_rows: int
) -> None:
    weights, x = normal(1, num_heads, width, inputs), normal(2, num_rows, num_heads, inputs + 8)
    found = multiply_heads(products.calls, x, HeadTiles.of(weights), num_more=1)
    assert found.shape == (num_rows, (num_heads + 1) * width)
    expected = torch.einsum("nhi,hwi->nhw", x[..., :inputs].double(), weights.double()).flatten(1)
    torch.testing.assert_close(found[:, :-width].double(), expected, **CLOSE)


def test_a_product_may_fill_some_columns_of_a_wider_matrix(products: Products) -> None:
    x, weight, wide = normal(1, 5, 64), tiled(normal(2, 45, 64)), torch.full((5, 60), 7.0, dtype=torch.bfloat16)
    multiply(products.calls, x, weight, out=wide[:, 10:55])
    assert torch.equal(wide[:, 10:55], multiply(products.calls, x, weight))
    assert (wide[:, :10] == 7.0).all()
    assert (wide[:, 55:] == 7.0).all()
