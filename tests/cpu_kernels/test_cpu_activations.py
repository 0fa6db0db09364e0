"""Activations and soft caps that follow a compiled product are the formulas in float64, within stated bounds."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from torch import Tensor

from pdserve.kernels.cpu.calls import Immediate
from pdserve.kernels.cpu.layers import Activation, Finish, multiply, tiled, tiled_gate_up
from pdserve.model import design
from pdserve.model.activations import XIelu, activate, bent_times, xielu_scalars

POSITIVE, NEGATIVE = torch.tensor([0.7], dtype=torch.float64), torch.tensor([-0.3], dtype=torch.float64)
BENDS = XIelu(POSITIVE, NEGATIVE)
CAP = 30.0


@dataclass(frozen=True)
class Formula:
    """What is to follow a product, and how far off it may be, `relative` to itself and `of_input` to what it is of."""

    finish: Finish
    of: Callable[[Tensor], Tensor]
    relative: float
    of_input: float

    def check(self, calls: Immediate) -> None:
        x, values = every_size()
        found = multiply(calls, x, ONES, None, torch.empty(len(x), 1), self.finish).flatten().double()
        expected = self.of(values)
        off = (found - expected).abs()
        allowed = self.relative * expected.abs() + self.of_input * values.abs() + 1e-36  # what is smaller may be lost
        assert (off <= allowed).all(), float((off / allowed).max())


def plain(of: design.Activation, relative: float, of_input: float) -> Formula:
    return Formula(Finish(Activation[of.name]), lambda x: activate(x, of), relative, of_input)


ONES = tiled(torch.ones(1, 2).bfloat16())
FORMULAS = {
    "silu": plain(design.Activation.SILU, 4e-7, 0.0),
    "gelu": plain(design.Activation.GELU, 2e-7, 2e-7),
    "gelu_tanh": plain(design.Activation.GELU_TANH, 4e-7, 1e-8),
    "squared_relu": plain(design.Activation.SQUARED_RELU, 1e-7, 0.0),
    "xielu": Formula(
        Finish(Activation.XIELU, tuple(float(each) for each in xielu_scalars(BENDS))),
        lambda x: activate(x, BENDS), 3e-7, 3e-7,
    ),
    "cap": Formula(Finish(cap=CAP), lambda x: torch.tanh(x / CAP) * CAP, 4e-7, 0.0),
    "scale, then cap": Formula(Finish(scale=0.3, cap=CAP), lambda x: torch.tanh(0.3 * x / CAP) * CAP, 4e-7, 0.0),
}  # fmt: skip


def every_size() -> tuple[Tensor, Tensor]:
    """Return pairs of bfloat16, and their sums, which have more digits: [num_rows, 2], [num_rows]."""
    sizes = torch.cat([torch.linspace(0, 12, 6001), torch.logspace(-30, 1.95, 2000)])
    values = torch.cat([sizes, -sizes])
    high = values.bfloat16()
    pairs = torch.stack([high, (values - high.float()).bfloat16()], 1)
    return pairs, pairs.double().sum(1)


@pytest.mark.parametrize("name", FORMULAS)
def test_results_in_float32_are_as_close_to_the_formula_as_is_said(loaded: ctypes.CDLL, name: str) -> None:
    FORMULAS[name].check(Immediate(loaded))


def test_vectors_of_any_width_are_as_close_to_the_formulas(narrow: ctypes.CDLL) -> None:
    for formula in FORMULAS.values():
        formula.check(Immediate(narrow))


@pytest.mark.parametrize(("name", "bad"), list(product(FORMULAS, [torch.nan, torch.inf, -torch.inf])))
def test_what_is_not_finite_ends_as_in_the_formula(loaded: ctypes.CDLL, name: str, bad: float) -> None:
    x = torch.tensor([[bad, 0.0], [1.0, 0.0]]).bfloat16()
    found = multiply(Immediate(loaded), x, ONES, None, torch.empty(2, 1), FORMULAS[name].finish).flatten()
    expected = FORMULAS[name].of(x.double().sum(1)).float()
    torch.testing.assert_close(found, expected, equal_nan=True)


@pytest.mark.parametrize("num_rows", [1, 5, 40])
@pytest.mark.parametrize("name", [each for each in FORMULAS if "cap" not in each])
def test_gates_are_bent_and_multiply_their_ups(loaded: ctypes.CDLL, name: str, num_rows: int) -> None:
    formula, draw = FORMULAS[name], torch.Generator().manual_seed(num_rows)
    gate, up, x = (torch.randn(shape, generator=draw).bfloat16() for shape in ((45, 64), (45, 64), (num_rows, 64)))
    bias = torch.randn(45, generator=draw).bfloat16()
    tiles = tiled_gate_up(gate, up, (bias, bias))
    gates, ups = (x.double() @ each.double().t() + bias.double() for each in (gate, up))
    found = multiply(Immediate(loaded), x, tiles, finish=formula.finish)
    torch.testing.assert_close(found.double(), formula.of(gates) * ups, rtol=2**-8, atol=2**-7)


@pytest.mark.parametrize("num_rows", [1, 40])
def test_gates_and_ups_are_clamped_together(loaded: ctypes.CDLL, num_rows: int) -> None:
    draw = torch.Generator().manual_seed(num_rows)
    gate, up, x = (torch.randn(shape, generator=draw).bfloat16() for shape in ((45, 64), (45, 64), (num_rows, 64)))
    gates, ups = (x.double() @ each.double().t() for each in (gate, up))
    for each in (gates, ups):
        assert (each > 7.0).any()
        assert (each < -7.0).any()
    calls, finish = Immediate(loaded), Finish(Activation.SWIGLU_OAI)
    expected = bent_times(gates, ups, design.Activation.SWIGLU_OAI)
    found = multiply(calls, x, tiled_gate_up(gate, up), finish=finish)
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=2**-7)
    x[0, 0] = torch.nan
    assert multiply(calls, x, tiled_gate_up(gate, up), finish=finish)[0].isnan().all()
