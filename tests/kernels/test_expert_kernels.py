"""Products of experts are those of each slot with its expert's matrix; a row's sum is in the order of its experts."""

from itertools import product

import pytest
import torch
from long_cases import long
from torch import Tensor

from pdserve.kernels.experts import Added, Grouped, grouped_product, summed

STEPS = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def choices(num_rows: int, count: int, num_chosen: int) -> tuple[Tensor, Tensor]:
    """Return shares and experts; the first expert is chosen twice as often as others."""
    logits = normal(num_rows + count, num_rows, count)
    if count > 1:
        logits[:, 0] += 1.0
    shares, chosen = logits.softmax(-1).topk(num_chosen)
    return shares, chosen


@pytest.mark.parametrize("num_rows", [1, 2, 33, 300])
@pytest.mark.parametrize(("count", "num_chosen"), [(1, 1), (4, 2), (16, 8), (40, 3)])
def test_slots_are_in_the_order_of_experts_and_blocks_cover_each_once(
    num_rows: int, count: int, num_chosen: int
) -> None:
    shares, chosen = choices(num_rows, count, num_chosen)
    of = Grouped.of(shares, chosen, count)
    expected = sorted((int(chosen[row, i]), row) for row, i in product(range(num_rows), range(num_chosen)))
    assert of.rows.tolist() == [row for _, row in expected]
    covered = []
    for expert, begin, end in zip(of.experts.tolist(), of.begins.tolist(), of.ends.tolist(), strict=True):
        if expert < count:
            covered += [(slot, expert) for slot in range(begin, min(end, begin + of.block_slots))]
    assert sorted(covered) == [(slot, expert) for slot, (expert, _) in enumerate(expected)]
    for row in range(num_rows):
        by_expert = sorted(zip(chosen[row].tolist(), shares[row].tolist(), strict=True))
        assert of.shares[row].tolist() == [share for _, share in by_expert]
        assert [expected[place] for place in of.places[row].tolist()] == [(expert, row) for expert, _ in by_expert]


@pytest.mark.parametrize(
    ("num_rows", "count", "num_chosen", "dtype"),
    [
        (1, 8, 2, torch.float32),
        (5, 4, 3, torch.bfloat16),
        *long((40, 8, 2, torch.float16)),
        (70, 3, 2, torch.float32),
        (150, 2, 1, torch.bfloat16),
    ],
)
def test_experts_are_the_formula(num_rows: int, count: int, num_chosen: int, dtype: torch.dtype) -> None:
    width, inputs = 100, 72
    shares, chosen = choices(num_rows, count, num_chosen)
    of = Grouped.of(shares, chosen, count)
    x, step = normal(1, num_rows, inputs + 8, dtype=dtype)[:, :inputs], STEPS[dtype]
    weights, bias = normal(2, count, width, inputs, dtype=dtype), normal(3, count, width, dtype=dtype)
    of_slots = torch.arange(len(of.rows))
    slots = normal(4, len(of.rows), inputs, dtype=dtype)
    expert = chosen.flatten().sort().values
    for given, rows, added in ((x, of.rows, None), (slots, of_slots, bias)):
        expected = torch.einsum("si,swi->sw", given.double()[rows], weights.double()[expert])
        expected += 0.0 if added is None else added.double()[expert]
        for out_dtype in (dtype, torch.float32):
            found = grouped_product(given, weights, added, rows, of, out_dtype).double()
            near = step if out_dtype == dtype else 1e-5
            torch.testing.assert_close(found, expected, rtol=near, atol=16 * near)


@pytest.mark.parametrize("dtype", STEPS)
def test_the_shared_expert_the_scale_and_the_residual_follow_the_sum(dtype: torch.dtype) -> None:
    num_rows, width = 5, 1100
    shares, chosen = choices(num_rows, 6, 3)
    of, step = Grouped.of(shares, chosen, 6), STEPS[dtype]
    made, gates = normal(1, 15, width), normal(2, num_rows)
    shared, residual = normal(3, num_rows, width, dtype=dtype), normal(4, num_rows, width, dtype=dtype)
    sums = (of.shares.double()[:, :, None] * made.double()[of.places]).sum(1)
    with_shared = sums + torch.sigmoid(gates.double())[:, None] * shared.double()
    near = {"rtol": step, "atol": 4 * step}
    torch.testing.assert_close(summed(made, of, Added(), dtype).double(), sums, **near)
    found = summed(made, of, Added(shared), dtype, 0.5)
    torch.testing.assert_close(found.double(), 0.5 * (sums + shared.double()), **near)
    onto = residual.clone()
    assert summed(made, of, Added(shared, gates, onto), dtype, 0.5) is onto
    torch.testing.assert_close(onto.double(), 0.5 * with_shared + residual.double(), **near)


def test_no_rows_have_no_slots() -> None:
    of = Grouped.of(torch.zeros(0, 2), torch.zeros(0, 2, dtype=torch.int64), 4)
    made = grouped_product(torch.zeros(0, 8), torch.zeros(4, 6, 8), None, of.rows, of, torch.float32)
    assert summed(made, of, Added(), torch.bfloat16).shape == (0, 6)


def test_expert_tensors_that_do_not_fit_are_refused_by_name() -> None:
    of = Grouped.of(torch.ones(2, 1), torch.zeros(2, 1, dtype=torch.int64), 4)
    x, weights = torch.zeros(2, 8), torch.zeros(4, 6, 8)
    with pytest.raises(ValueError, match=r"^weights must have shape \[4, \*, 8\]"):
        grouped_product(x, weights[:3], None, of.rows, of, torch.float32)
    with pytest.raises(ValueError, match=r"^bias must have shape \[4, 6\]"):
        grouped_product(x, weights, torch.zeros(4, 5), of.rows, of, torch.float32)
    with pytest.raises(ValueError, match=r"^made must have shape \[2, \*\]"):
        summed(torch.zeros(3, 6), of, Added(), torch.float32)
    with pytest.raises(ValueError, match=r"^residual must have shape \[2, 6\]"):
        summed(torch.zeros(2, 6), of, Added(residual=torch.zeros(1, 6)), torch.float32)
