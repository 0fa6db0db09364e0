"""Products with matrices of codes are those with the weights that the codes stand for."""

from dataclasses import replace
from itertools import product as pairs

import pytest
import torch
from coded_matrices import coded_matrix
from long_cases import long
from torch import Tensor

from pdserve.kernels.code_blocks import CodeBlocks, Kind
from pdserve.kernels.experts import Grouped, grouped_product
from pdserve.kernels.products import Finish, Tile, coded_rows, num_splits, product, rounds_inputs, tile_of
from pdserve.kernels.tuning import INTERPRETER, Device

NEAR = {torch.float32: 1e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
# Codes, inputs that share a scale (0: all), whether there are minimums: those of each run, and others.
FORMS: tuple[tuple[Kind, int, bool], ...] = (
    ("int4", 128, True),
    ("int4", 0, False),
    ("int8", 128, False),
    ("fp8", 128, False),
    ("fp8", 0, False),
)
OTHER_FORMS: tuple[tuple[Kind, int, bool], ...] = (
    ("int4", 32, True),
    ("int4", 64, False),
    ("int8", 32, True),
    ("int8", 0, False),
    ("int8", 0, True),
    ("fp4", 32, False),
)
ROWS, ALL_ROWS = (1, 5, 33), (1, 5, 16, 33, 64)  # in each run, and in make test-long
SHAPES = ((64, 256), (100, 384), (33, 160))  # outputs and inputs; a group may be cut off at the end


def rows_of(num_rows: int, inputs: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn((num_rows, inputs), generator=torch.Generator().manual_seed(num_rows)).to(dtype)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    ("kind", "group", "minimums", "rows"),
    [*((*form, ROWS) for form in FORMS), *long(*((*form, ALL_ROWS) for form in (*FORMS, *OTHER_FORMS)))],
)
def test_products_with_codes_are_those_with_their_weights(
    kind: Kind, group: int, rows: tuple[int, ...], *, minimums: bool
) -> None:
    for (outputs, inputs), num_rows in pairs(SHAPES, rows):
        bias = rows_of(1, outputs)[0]
        weight, values = coded_matrix(kind, (outputs, inputs), group or inputs, minimums=minimums, bias=bias)
        x = rows_of(num_rows, inputs + 8)[:, :inputs]
        expected = x.double() @ values.t() + bias.double()
        assert error(product(x, weight), expected) < NEAR[torch.float32], (outputs, inputs, num_rows)


@pytest.mark.parametrize("dtype", [*long(torch.float16), torch.bfloat16])
@pytest.mark.parametrize("kind", ["int4", "int8", "fp4", "fp8"])
def test_codes_are_multiplied_with_inputs_of_16_bits_without_being_rounded(kind: Kind, dtype: torch.dtype) -> None:
    weight, values = coded_matrix(kind, (96, 192), 32)
    x = rows_of(7, 192, dtype)
    assert error(product(x, weight), x.double() @ values.t()) < NEAR[dtype]
    of_codes = values.t() / weight.scales.double().repeat_interleave(32, 0)
    found = product(torch.eye(192, dtype=dtype), replace(weight, scales=torch.ones_like(weight.scales)))
    assert torch.equal(found, of_codes.to(dtype))


@pytest.mark.parametrize("inputs", [70, 31, 200])
def test_inputs_of_floats_need_not_fill_a_block(inputs: int) -> None:
    weight, values = coded_matrix("fp8", (40, inputs), inputs)
    x = rows_of(3, inputs)
    assert error(product(x, weight), x.double() @ values.t()) < NEAR[torch.float32]
    by_blocks, values = coded_matrix("fp8", (40, inputs), 64)
    assert error(product(x, by_blocks), x.double() @ values.t()) < NEAR[torch.float32]


@pytest.mark.parametrize(("num_rows", "num_sms", "splits"), [(1, 4, 8), *long((20, 4, 4), (1, 1, 2))])
@pytest.mark.parametrize("kind", ["int4", *long("fp8")])
def test_parts_of_the_inputs_sum_to_the_whole_and_are_finished_once(
    kind: Kind, num_rows: int, num_sms: int, splits: int
) -> None:
    bias, residual, chip = rows_of(1, 90)[0], rows_of(num_rows, 90), Device((9, 0), num_sms)
    weight, values = coded_matrix(kind, (90, 4128), 32, bias=bias)
    assert num_splits(num_rows, weight, tile_of(num_rows, weight, is_exact=True), chip) == splits
    x, onto = rows_of(num_rows, 4128), residual.clone()
    expected = (x.double() @ values.t() + bias.double()) * 0.5 + residual.double()
    assert product(x, weight, Finish(onto, 0.5), chip=chip) is onto
    assert error(onto, expected) < NEAR[torch.float32]


def test_steps_of_any_size_take_the_kernels_of_steps_of_powers_of_two() -> None:
    for outputs, inputs in ((1024, 4096), (4096, 14336), (28672, 4096)):
        codes = torch.empty((inputs // 32, outputs, 16), dtype=torch.uint8)
        weight = CodeBlocks("int4", codes, torch.empty((inputs // 128, outputs)), None, inputs, 128)

        def launched(num_rows: int, weight: CodeBlocks = weight) -> tuple[Tile, int]:
            tile = tile_of(num_rows, weight, is_exact=False)
            return tile, num_splits(num_rows, weight, tile, Device((9, 0), 132))

        warm = {launched(1 << power) for power in range(14)}
        assert {launched(num_rows) for num_rows in range(1, 8192, 7)} <= warm


def test_a_residual_joins_a_product_that_is_not_parted() -> None:
    residual, x = rows_of(40, 64), rows_of(40, 256)
    weight, values = coded_matrix("int4", (64, 256), 64)
    expected = (x.double() @ values.t()) * 2.0 + residual.double()
    assert error(product(x, weight, Finish(residual, 2.0)), expected) < NEAR[torch.float32]


@pytest.mark.parametrize(("kind", "group"), [("int8", 64), ("fp8", 0), *long(("int8", 0), ("fp8", 128))])
def test_inputs_of_8_bits_are_multiplied_as_they_were_rounded(kind: Kind, group: int) -> None:
    for (outputs, inputs), num_rows in pairs(SHAPES, (1, 33)):
        weight, values = coded_matrix(kind, (outputs, inputs), group or inputs)
        assert rounds_inputs(weight, INTERPRETER)
        x = rows_of(num_rows, inputs)
        rows = coded_rows(x, weight)
        scales = rows.scales.double().repeat_interleave(rows.group, 1)[:, :inputs]
        rounded = rows.data.double() * scales
        found = product(x, weight, rounded=True)
        assert error(found, rounded @ values.t()) < NEAR[torch.float32]
        assert 1e-4 < error(found, x.double() @ values.t()) < (0.02 if kind == "int8" else 0.04)


def test_rows_are_rounded_to_the_nearest_code() -> None:
    x = rows_of(40, 256) * torch.exp2(torch.randint(-16, 3, (40, 256)).float())
    weight = coded_matrix("fp8", (16, 256), 128)[0]
    rows = coded_rows(x, weight)
    wide = rows.scales.repeat_interleave(128, 1)
    assert torch.equal(rows.data.float(), (x / wide).to(torch.float8_e4m3fn).float())
    rows = coded_rows(x, coded_matrix("int8", (16, 256), 256)[0])
    assert torch.equal(rows.data, (x / rows.scales).round().to(torch.int8))
    assert int(rows.data.abs().max()) == 127


def test_a_row_of_zeros_is_rounded_to_zeros() -> None:
    weight = coded_matrix("fp8", (16, 128), 128)[0]
    assert not product(torch.zeros(2, 128), weight, rounded=True).any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("kind", "group"), [("int8", 0), ("fp8", 0), ("fp8", 128)])
def test_a_row_that_is_not_finite_makes_no_finite_products_when_it_is_rounded(
    kind: Kind, group: int, bad: float
) -> None:
    weight, _ = coded_matrix(kind, (64, 256), group or 256)
    x = rows_of(3, 256)
    x[1, 130] = bad
    found = product(x, weight, rounded=True)
    assert found[1].isnan().all()
    assert found[[0, 2]].isfinite().all()


def test_only_matrices_of_8_bits_around_zero_take_rounded_inputs_and_floats_where_the_chip_has_them() -> None:
    older, newer = Device((8, 0), 108), Device((8, 9), 100)
    cases = [("int8", False, True, True), ("int8", True, False, False), ("fp8", False, False, True)]
    cases += [("int4", False, False, False), ("fp4", False, False, False)]
    for kind, minimums, on_older, on_newer in cases:
        weight = coded_matrix(kind, (16, 64), 32, minimums=minimums)[0]  # type: ignore[arg-type]
        assert (rounds_inputs(weight, older), rounds_inputs(weight, newer)) == (on_older, on_newer)


@pytest.mark.parametrize(("kind", "group", "minimums"), [("fp4", 32, False), ("int4", 128, True), ("fp8", 128, False)])
@pytest.mark.parametrize("num_rows", [1, 70])
def test_slots_are_multiplied_with_the_codes_of_their_experts(
    kind: Kind, group: int, num_rows: int, *, minimums: bool
) -> None:
    count, width, inputs = 4, 72, 160
    shares, chosen = rows_of(num_rows, count).softmax(-1).topk(2)
    of = Grouped.of(shares, chosen, count)
    weight, values = coded_matrix(kind, (count * width, inputs), group, minimums=minimums)
    x, bias = rows_of(num_rows, inputs), rows_of(count, width)
    expert = chosen.flatten().sort().values
    expected = torch.einsum("si,swi->sw", x.double()[of.rows], values.view(count, width, inputs)[expert])
    found = grouped_product(x, weight, bias, of.rows, of, torch.float32)
    assert error(found, expected + bias.double()[expert]) < NEAR[torch.float32]


def test_no_rows_make_no_products() -> None:
    assert product(torch.zeros(0, 64), coded_matrix("int4", (16, 64), 32)[0]).shape == (0, 16)


def test_coded_tensors_that_do_not_fit_are_refused_by_name() -> None:
    weight = coded_matrix("int4", (16, 64), 32)[0]
    with pytest.raises(ValueError, match=r"^x must have shape \[\*, 64\]"):
        product(torch.zeros(2, 32), weight)
    with pytest.raises(ValueError, match=r"^residual must have shape \[2, 16\]"):
        product(torch.zeros(2, 64), weight, Finish(torch.zeros(2, 15)))
    with pytest.raises(ValueError, match=r"^bias must have shape \[16\]"):
        product(torch.zeros(2, 64), replace(weight, bias=torch.zeros(3)))
    with pytest.raises(ValueError, match=r"^scales must have shape \[2, 16\]"):
        replace(weight, scales=weight.scales[:1])
    with pytest.raises(ValueError, match=r"^group must be all inputs or whole blocks, got 16"):
        CodeBlocks("int4", weight.codes, torch.ones(4, 16), None, 64, 16)
    of = Grouped.of(torch.ones(2, 1), torch.zeros(2, 1, dtype=torch.int64), 3)
    with pytest.raises(ValueError, match=r"^weights: 16 outputs, 64 inputs do not fit"):
        grouped_product(torch.zeros(2, 64), weight, None, of.rows, of, torch.float32)
