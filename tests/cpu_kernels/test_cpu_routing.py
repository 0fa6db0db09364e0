"""Compiled routing chooses as `routing.routed` says, from logits that are the formula's."""

from dataclasses import replace
from itertools import combinations, product

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from pdserve.kernels.cpu.calls import Call, Calls, Immediate, Kind, Mixture
from pdserve.kernels.cpu.experts import Router
from pdserve.kernels.cpu.library import DTYPES
from pdserve.kernels.routing import Routing
from pdserve.model.routing import routed


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def chosen_by(calls: Calls, logits: Tensor, router: Router) -> tuple[Tensor, Tensor]:
    """Return each row's shares and experts, in the order of the experts."""
    (num_rows, count), rule = logits.shape, router.routing
    slots, ends = num_rows * rule.num_chosen, 2 * (count + 1)
    room = torch.full((ends + 5 * slots,), -1, dtype=torch.int32)
    mixture = Mixture(
        chosen=room.data_ptr(), num_experts=count, num_chosen=rule.num_chosen, by_sigmoid=rule.by_sigmoid,
        normalized=rule.normalized, num_groups=rule.groups[0], num_kept_groups=rule.groups[1],
        group_best=rule.group_best,
    )  # fmt: skip
    call = Call(kind=Kind.ROUTING, x=logits.data_ptr(), x_stride=count, scale=rule.scale, mixture=mixture)
    call.bias = None if router.ranks_bias is None else router.ranks_bias.data_ptr()
    call.weights = None if router.shares is None else router.shares.data_ptr()
    calls.take(num_rows, call)
    experts, _, shares = room[ends : ends + 3 * slots].view(3, num_rows, rule.num_chosen)
    return shares.view(torch.float32), experts


@st.composite
def routers(draw: st.DrawFn) -> tuple[Router, Tensor]:
    """Draw a rule, and logits of which many are equal."""
    num_groups, a_group = draw(st.integers(1, 4)), draw(st.integers(1, 10))
    kept, count = draw(st.integers(1, num_groups)), num_groups * a_group
    rule = Routing(
        draw(st.integers(1, min(8, kept * a_group))),
        by_sigmoid=draw(st.booleans()),
        groups=(num_groups, kept),
        group_best=draw(st.integers(1, 2)),
        normalized=draw(st.booleans()),
        scale=draw(st.sampled_from([1.0, 2.5])),
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    levels = torch.tensor([-1.5, 0.0, 0.25, 2.0])[: draw(st.integers(1, 4))]
    logits = levels[torch.randint(0, len(levels), (3, count), generator=generator)]
    added = torch.tensor([0.0, 0.3, -0.7])[torch.randint(0, 3, (count,), generator=generator)]
    bias = added if draw(st.booleans()) else None
    for row in logits.double():
        scores = torch.sigmoid(row) if rule.by_sigmoid else torch.softmax(row, 0)
        assume(
            are_far_apart_or_equal(row.tolist(), added.tolist() if bias is not None else [0.0] * count, scores, rule)
        )
    return Router(torch.zeros(count, 2), rule, bias), logits


def are_far_apart_or_equal(row: list[float], added: list[float], scores: Tensor, rule: Routing) -> bool:
    """Say whether no order hangs on a rounding: sums of different terms may be equal but for it."""
    ranks = {place: (float(scores[place]) + added[place], (row[place], added[place])) for place in range(len(row))}
    size = len(row) // rule.groups[0]
    best = rule.group_best
    groups = [
        sorted(ranks[place] for place in range(first, first + size))[-best:] for first in range(0, len(row), size)
    ]
    sums = [(sum(rank for rank, _ in group), tuple(terms for _, terms in group)) for group in groups]
    compared = (*combinations(set(ranks.values()), 2), *combinations(set(sums), 2))
    return all(abs(one[0] - other[0]) > 1e-5 for one, other in compared if one[1] != other[1])


@given(routers())
@settings(max_examples=150)
def test_rows_choose_as_torch_does_and_of_equals_the_first(calls: Immediate, drawn: tuple[Router, Tensor]) -> None:
    router, logits = drawn
    shares, experts = chosen_by(calls, logits, router)
    weights, chosen = routed(logits, router.ranks_bias, router.routing)
    expected, order = chosen.sort(-1)
    assert torch.equal(experts.long(), expected)
    torch.testing.assert_close(shares, weights.gather(1, order), rtol=1e-5, atol=1e-7)


def test_factors_of_experts_multiply_their_shares_at_last(calls: Immediate) -> None:
    logits, factors = normal(1, 6, 12), normal(2, 12)
    router = Router(torch.zeros(12, 2), Routing(4, scale=2.0), shares=factors)
    shares, experts = chosen_by(calls, logits, router)
    plain, _ = chosen_by(calls, logits, replace(router, shares=None))
    torch.testing.assert_close(shares, plain * factors[experts.long()])


def test_scores_that_are_no_numbers_choose_as_torch_does(calls: Immediate) -> None:
    logits = normal(1, 6, 12)
    logits[1, 7], logits[2], logits[3, 2], logits[4, 3] = torch.nan, torch.nan, torch.inf, -torch.inf
    for by_sigmoid, groups in product((True, False), ((1, 1), (3, 2))):
        router = Router(torch.zeros(12, 2), Routing(4, by_sigmoid, None, groups))
        _, expected = routed(logits, None, router.routing)
        assert torch.equal(chosen_by(calls, logits, router)[1].long(), expected.sort(-1).values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("count", "inputs"), [(1, 2), (3, 33), (8, 64), (21, 1000)])
def test_logits_are_products_in_float32_with_their_bias(
    calls: Immediate, count: int, inputs: int, dtype: torch.dtype
) -> None:
    weight, wide, bias = normal(1, count, inputs).to(dtype), normal(2, 40, inputs + 5).to(dtype), normal(3, count)
    x = wide[:, :inputs]
    for num_rows, added in product((0, 1, 5, 40), (None, bias)):
        out = torch.zeros(40, count)
        call = Call(
            kind=Kind.LOGITS, type=DTYPES[dtype], x=x.data_ptr(), x_stride=x.stride(0), out=out.data_ptr(),
            out_stride=count, inputs=inputs, width=count, weights=weight.data_ptr(),
            bias=None if added is None else added.data_ptr(),
        )  # fmt: skip
        calls.take(num_rows, call)
        expected = x[:num_rows].double() @ weight.double().T + (0.0 if added is None else added.double())
        torch.testing.assert_close(out[:num_rows].double(), expected, rtol=1e-5, atol=1e-4)
        assert (out[num_rows:] == 0).all()
