"""Compiled experts are the formula, each row by itself."""

import ctypes
from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from narrow_floats import in_fp8
from torch import Tensor
from torch.nn.functional import relu, silu

from pdserve.kernels.cpu.calls import Immediate, Program
from pdserve.kernels.cpu.experts import ExpertTiles, Router, SharedRows, TiledExperts, mix
from pdserve.kernels.cpu.layers import (
    BLOCK,
    Activation,
    Tiles,
    interleaved,
    tiled,
    tiled_codes,
    tiled_fp8,
    tiled_gate_up,
)
from pdserve.kernels.routing import Routing
from pdserve.model.routing import routed

HIDDEN, INNER = 64, 96
Form = str | tuple[int | str, int, torch.dtype]  # codes: their bits, those of inputs, and the dtype of rows
FORMS: list[Form] = ["bfloat16", "fp8", *product((4, 8, "fp4"), (8, 16), (torch.float32, torch.bfloat16))]
RULES = [
    Routing(8),
    Routing(3, normalized=False, scale=2.5),
    Routing(1, by_sigmoid=True, normalized=False),
    Routing(2, by_sigmoid=True, bias="bias", groups=(2, 1), scale=1.5),
    Routing(3, by_sigmoid=True, added=0.25),
    Routing(4, by_sigmoid=True, bias="bias", groups=(4, 2)),
    Routing(2, bias="bias", groups=(4, 3)),
]
COUNTS = [4, 8, 24, 64]
NUM_ROWS = [0, 1, 3, 16, 64]
LEVELS = torch.tensor([12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0])  # of MXFP4: see `Tiles`
HALF_A_CODE = {8: 0.5 / 127, 16: 0.5 / (127 * 256)}


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def router_of(weight: Tensor, rule: Routing) -> Router:
    bias = normal(17, len(weight)) * 0.3 if rule.bias else None
    return Router(weight, rule, bias)


def codes_of(seed: int, width: int, inputs: int, *, fp4: bool, bits: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return a random matrix in codes, and in float64."""
    shape = (width, inputs // BLOCK)
    draw = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (*shape, BLOCK), generator=draw, dtype=torch.uint8)
    scales = ((torch.rand(shape, generator=draw) + 0.5) * 2.0**-bits).half()
    minimums = scales * -(2 ** (bits - 1))
    packed = codes if bits == 8 else codes[..., :16] | (codes[..., 16:] << 4)
    levels = LEVELS[codes.long()] if fp4 else codes
    return (packed, scales, minimums), (minimums.double()[..., None] + scales.double()[..., None] * levels).flatten(1)


@dataclass(frozen=True)
class Case:
    """Experts as the kernels take them, and their matrices in float64."""

    experts: TiledExperts
    gate: Tensor  # [count, INNER, HIDDEN]
    up: Tensor
    down: Tensor  # [count, HIDDEN, INNER]
    input_bits: int | None

    @property
    def dtype(self) -> torch.dtype:
        return self.experts.router.weight.dtype

    def rows(self, num_rows: int) -> Tensor:
        return normal(num_rows, num_rows, HIDDEN).to(self.dtype)

    def off_by(self, x: Tensor, matrix: Tensor) -> Tensor:
        """Return what the products of inputs in codes are off by at most: float64, as the products."""
        if self.input_bits is None:
            return (x.abs() @ matrix.abs().T) * 1e-6
        steps = x.unflatten(1, (-1, BLOCK)).abs().amax(-1) * HALF_A_CODE[self.input_bits]
        return 1.01 * steps @ matrix.unflatten(1, (-1, BLOCK)).abs().sum(-1).T + (x.abs() @ matrix.abs().T) * 1e-5

    def mixed(self, calls: Immediate | Program, x: Tensor) -> Tensor:
        return mix(calls, x, self.experts, None, None)

    def assert_right(self, calls: Immediate, x: Tensor) -> None:
        expected, off = self.expected(x)
        assert ((self.mixed(calls, x).double() - expected).abs() <= off).all()

    def expected(self, x: Tensor, choice: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Return a loop over rows in float64, and what results may be off by. choice: what x's router would choose."""
        shares, chosen = choices(x, self.experts.router) if choice is None else choice
        out, off = (torch.zeros(len(x), HIDDEN, dtype=torch.float64) for _ in range(2))
        eps = 2.0**-8 if self.dtype == torch.bfloat16 else 1e-5
        for row, place in product(range(len(x)), range(chosen.shape[1])):
            expert, share = int(chosen[row, place]), float(shares[row, place])
            given = x[row : row + 1].double()
            gates, ups = given @ self.gate[expert].T, given @ self.up[expert].T
            off_gates, off_ups = self.off_by(given, self.gate[expert]), self.off_by(given, self.up[expert])
            inner = silu(gates) * ups
            off_inner = 1.1 * off_gates * (ups.abs() + off_ups) + silu(gates).abs() * off_ups + eps * inner.abs()
            made = inner @ self.down[expert].T
            off_made = off_inner @ self.down[expert].abs().T + self.off_by(inner.abs() + off_inner, self.down[expert])
            out[row] += share * made[0]
            off[row] += share * (off_made[0] + 1e-5 * made.abs()[0])
        return out, off + eps * (out.abs() + off)


def choices(x: Tensor, router: Router) -> tuple[Tensor, Tensor]:
    logits = (x.double() @ router.weight.double().T).float()
    added = logits if router.logits_bias is None else logits + router.logits_bias
    return routed(added, router.ranks_bias, router.routing)


def case_of(form: Form, count: int, rule: Routing) -> Case:
    if form == "fp8":
        made, pairs = [], []
        for expert in range(count):
            (gates, gate), (ups, up) = (in_fp8(2 * expert + i, INNER, HIDDEN) for i in range(2))
            downs, down = in_fp8(1000 + expert, HIDDEN, INNER)
            both = tiled_fp8(*(interleaved(*each) for each in zip(gates, ups, strict=True)))
            first = Tiles(both, 8, INNER, torch.bfloat16, gated=True, is_float=True)
            pairs.append((first, Tiles(tiled_fp8(*downs), 8, HIDDEN, torch.bfloat16, is_float=True)))
            made.append((gate, up, down))
        matrices, dtype, input_bits = tuple(torch.stack(each) for each in zip(*made, strict=True)), torch.bfloat16, None
    elif isinstance(form, str):
        gate, up = (normal(seed, count, INNER, HIDDEN).bfloat16() * 0.2 for seed in (1, 2))
        down = normal(3, count, HIDDEN, INNER).bfloat16() * 0.2
        pairs = [(tiled_gate_up(gate[i], up[i]), tiled(down[i])) for i in range(count)]
        matrices, dtype, input_bits = (gate.double(), up.double(), down.double()), torch.bfloat16, None
    else:
        code, input_bits, dtype = form
        fp4 = code == "fp4"
        bits = 4 if fp4 else int(code)
        made, pairs = [], []
        for expert in range(count):
            (gates, gate), (ups, up) = (codes_of(2 * expert + i, INNER, HIDDEN, bits=bits, fp4=fp4) for i in range(2))
            downs, down = codes_of(-1 - expert, HIDDEN, INNER, bits=bits, fp4=fp4)
            both = tiled_codes(*(interleaved(*each) for each in zip(gates, ups, strict=True)))
            first = Tiles(both, bits, INNER, dtype, gated=True, input_bits=input_bits, is_float=fp4)
            pairs.append((first, Tiles(tiled_codes(*downs), bits, HIDDEN, dtype, input_bits=input_bits, is_float=fp4)))
            made.append((gate, up, down))
        matrices = tuple(torch.stack(each) for each in zip(*made, strict=True))
    router = router_of(normal(4, count, HIDDEN).to(dtype) * 0.2, rule)
    return Case(TiledExperts.of(router, Activation.SILU, pairs), *matrices, input_bits)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("count", COUNTS)
def test_experts_in_bfloat16_are_the_formula(calls: Immediate, count: int, rule: Routing) -> None:
    num_groups, kept = rule.groups
    case = case_of("bfloat16", count, replace(rule, num_chosen=min(rule.num_chosen, count * kept // num_groups)))
    for num_rows in NUM_ROWS:
        case.assert_right(calls, case.rows(num_rows))


@pytest.mark.parametrize("form", FORMS[1:])
def test_experts_in_codes_are_the_formula(calls: Immediate, form: Form) -> None:
    for count, rule in ((4, Routing(3)), (24, RULES[3])):
        case = case_of(form, count, rule)
        for num_rows in (1, 5, 40):
            case.assert_right(calls, case.rows(num_rows))


@pytest.mark.parametrize("form", ["bfloat16", "fp8", (4, 16, torch.float32), (8, 8, torch.bfloat16)])
def test_vectors_of_any_width_compute_alike(narrow: ctypes.CDLL, form: Form) -> None:
    case = case_of(form, 8, RULES[3])
    for num_rows in (1, 20):
        case.assert_right(Immediate(narrow), case.rows(num_rows))


@pytest.mark.parametrize("form", ["bfloat16", (8, 16, torch.float32)])
def test_many_rows_of_one_expert_are_computed_block_by_block(calls: Immediate, form: Form) -> None:
    case = case_of(form, 4, Routing(2))
    case.assert_right(calls, case.rows(700))
    assert case.experts.counts.sum() == 1400
    assert case.experts.counts.max() > 240


@pytest.mark.parametrize("form", ["bfloat16", "fp8", (8, 16, torch.float32), (4, 8, torch.bfloat16)])
def test_a_rows_bits_depend_on_neither_company_nor_threads(loaded: ctypes.CDLL, calls: Immediate, form: Form) -> None:
    case, num_rows, before = case_of(form, 24, Routing(4)), 80, torch.get_num_threads()
    x = case.rows(num_rows)
    together = case.mixed(calls, x)
    for first, count in ((0, 1), (7, 1), (3, 20), (40, 40)):
        assert torch.equal(case.mixed(calls, x[first : first + count]), together[first : first + count])
    program = Program(loaded)
    out = case.mixed(program, x)
    try:
        for threads, count in ((1, 5), (2, 1), (5, 80), (3, 17), (2, 64)):
            torch.set_num_threads(threads)
            program.run(count)
            assert torch.equal(out[:count], together[:count])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("form", ["bfloat16", (8, 16, torch.float32)])
def test_the_shared_expert_the_scale_and_the_residual_come_in_this_order(calls: Immediate, form: Form) -> None:
    case = case_of(form, 8, Routing(2))
    x, rtol = case.rows(20), 2.0**-7 if case.dtype == torch.bfloat16 else 1e-5
    alone = case.mixed(calls, x.float().to(x.dtype)).double()
    made, residual = (normal(seed, 20, HIDDEN).to(x.dtype) for seed in (30, 31))
    gate = normal(32, 1, HIDDEN).to(x.dtype)
    gates = torch.sigmoid(x.double() @ gate.double().T)
    for gated_by, share in ((gate, gates), (None, torch.ones_like(gates))):
        shared = SharedRows(made, gated_by)
        sums = 0.5 * (alone + share * made.double())
        near = {"rtol": rtol, "atol": rtol * float(alone.abs().max())}
        torch.testing.assert_close(mix(calls, x, case.experts, shared, None, 0.5).double(), sums, **near)
        onto = residual.clone()
        assert mix(calls, x, case.experts, shared, onto, 0.5) is onto
        torch.testing.assert_close(onto.double(), sums + residual.double(), **near)


def test_biases_are_added_to_what_each_expert_multiplies(calls: Immediate) -> None:
    case, count = case_of("bfloat16", 8, Routing(3)), 8
    zeros = [torch.zeros_like(each) for each in (case.experts.gate_up.data[0], case.experts.down.data[0])]
    first, last = normal(1, count, 2 * INNER).bfloat16(), normal(2, count, HIDDEN).bfloat16()
    experts = replace(
        case.experts,
        gate_up=replace(case.experts.gate_up, data=torch.stack([zeros[0]] * count), bias=first),
        down=replace(case.experts.down, bias=last),
    )
    x = case.rows(9)
    shares, chosen = choices(x, experts.router)
    by_tile = first.double().unflatten(1, (-1, 2, 16))
    inner = (silu(by_tile[:, :, 0]) * by_tile[:, :, 1]).flatten(1)
    made = torch.einsum("ei,ehi->eh", inner, case.down) + last.double()
    expected = (shares.double()[:, :, None] * made[chosen]).sum(1)
    torch.testing.assert_close(mix(calls, x, experts, None, None).double(), expected, rtol=0.02, atol=0.1)


@pytest.mark.parametrize("form", ["bfloat16", (8, 16, torch.float32), (4, 16, torch.bfloat16)])
@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_experts_without_a_gate_are_the_formula(calls: Immediate, form: Form, num_rows: int) -> None:
    pairs, matrices = [], []
    for expert in range(8):
        tiles, own = zip(*(matrix_of(form, 2 * expert + i) for i in range(2)), strict=True)
        pairs.append(tiles)
        matrices.append(own)
    dtype = torch.bfloat16 if form == "bfloat16" else form[2]
    router = router_of(normal(4, 8, HIDDEN).to(dtype) * 0.2, RULES[5])
    experts, x = TiledExperts.of(router, Activation.SQUARED_RELU, pairs), normal(num_rows, num_rows, HIDDEN).to(dtype)
    expected = torch.zeros(num_rows, HIDDEN, dtype=torch.float64)
    for row, (shares, chosen) in enumerate(zip(*choices(x, router), strict=True)):
        for share, expert in zip(shares.tolist(), chosen.tolist(), strict=True):
            up, down = matrices[expert]
            expected[row] += share * (relu(x[row].double() @ up.T).square() @ down.T)
    near = 2.0**-7 if dtype == torch.bfloat16 else 1e-4
    atol = near * float(expected.abs().max()) if num_rows else 0.0
    torch.testing.assert_close(mix(calls, x, experts, None, None).double(), expected, rtol=near, atol=atol)


def matrix_of(form: Form, seed: int) -> tuple[Tiles, Tensor]:
    """Return ups of an expert where the seed is even, else downs: in tiles, and in float64."""
    width, inputs = (INNER, HIDDEN) if seed % 2 == 0 else (HIDDEN, INNER)
    if isinstance(form, str):
        matrix = normal(seed, width, inputs).bfloat16() * 0.2
        return tiled(matrix), matrix.double()
    bits, input_bits, dtype = form
    codes, exact = codes_of(seed, width, inputs, bits=bits, fp4=False)
    return Tiles(tiled_codes(*codes), bits, width, dtype, input_bits=input_bits), exact


@pytest.mark.parametrize("form", ["bfloat16", (8, 16, torch.float32)])
def test_experts_may_take_other_features_than_their_router(calls: Immediate, form: Form) -> None:
    case = case_of(form, 8, RULES[5])
    x, others = case.rows(20), normal(3, 20, 32).to(case.dtype)
    router = router_of(normal(5, 8, 32).to(case.dtype), RULES[5])
    of_others = replace(case, experts=replace(case.experts, router=router))
    found = mix(calls, torch.cat((others, x), 1), of_others.experts, None, None)
    shares, chosen = choices(others, router)
    expected, off = of_others.expected(x, (shares, chosen))
    assert ((found.double() - expected).abs() <= off).all()


def test_only_the_experts_that_are_chosen_are_multiplied(calls: Immediate) -> None:
    case = case_of("bfloat16", 24, Routing(2))
    x = case.rows(3)
    _, chosen = choices(x, case.experts.router)
    others = [expert for expert in range(24) if expert not in chosen.flatten().tolist()]
    expected = case.mixed(calls, x)
    case.experts.gate_up.data[others], case.experts.down.data[others] = torch.nan, torch.nan
    assert torch.equal(case.mixed(calls, x), expected)


def test_rows_are_counted_by_expert(calls: Immediate) -> None:
    case = case_of("bfloat16", 24, Routing(4))
    expected = torch.zeros(24, dtype=torch.int64)
    for num_rows in (1, 40, 0, 100):
        x = case.rows(num_rows)
        case.mixed(calls, x)
        expected += choices(x, case.experts.router)[1].flatten().bincount(minlength=24)
    assert torch.equal(case.experts.counts, expected)


def test_a_row_that_is_not_finite_spoils_itself_alone(calls: Immediate) -> None:
    case = case_of("bfloat16", 8, RULES[3])
    x = case.rows(40)
    expected = case.mixed(calls, x)
    for bad in (torch.nan, torch.inf, -torch.inf):
        spoiled = x.clone()
        spoiled[11, 5] = bad
        found = case.mixed(calls, spoiled)
        assert found[11].isnan().any()
        assert torch.equal(torch.cat((found[:11], found[12:])), torch.cat((expected[:11], expected[12:])))


def test_experts_that_do_not_fit_are_refused_by_name(calls: Immediate) -> None:
    case = case_of("bfloat16", 4, Routing(2))
    x, weight = case.rows(2), case.experts.router.weight
    with pytest.raises(ValueError, match=r"^x must have shape \[\*, 64\]"):
        case.mixed(calls, x[:, :32])
    with pytest.raises(ValueError, match=r"^x must have shape \[\*, 128\]"):
        mix(calls, torch.cat((x, x, x), 1), case.experts, None, None)
    with pytest.raises(ValueError, match=r"^x must be one of"):
        case.mixed(calls, x.float())
    with pytest.raises(ValueError, match=r"^residual must have shape \[2, 64\]"):
        mix(calls, x, case.experts, None, x[:1])
    with pytest.raises(ValueError, match=r"^shared must have shape \[2, 64\]"):
        mix(calls, x, case.experts, SharedRows(x[:1], None), None)
    for bad, message in (
        ({"routing": Routing(5)}, "num_chosen: 5 of 4 experts"),
        ({"routing": Routing(3, groups=(2, 1))}, "num_chosen: 3 of 2 experts"),
        ({"routing": Routing(1, groups=(3, 1))}, "groups: .* of 4 experts"),
        ({"ranks_bias": torch.zeros(3)}, "ranks_bias must have shape"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(Router(weight, Routing(1)), **bad)
    narrow = ExpertTiles.like(4, tiled(torch.zeros(32, 64).bfloat16()))
    with pytest.raises(ValueError, match="expert 2 has other codes"):
        narrow.put(2, tiled(torch.zeros(32, 62).bfloat16()))
