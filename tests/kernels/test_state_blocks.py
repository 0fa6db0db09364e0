"""Long chunks, which heads compute in blocks of tokens, are the formulas in float64, and leave the states of these.

Pages hold two full blocks.
"""

import math
from collections.abc import Sequence
from itertools import pairwise, product

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from kernel_catalog import of_tokens
from launch_grids import Grids
from long_cases import long
from recurrences import GATES, drawn, expected, gated_by, layer, num_inputs

from pdserve.kernels import states
from pdserve.kernels.cpu.states import Recurrence
from pdserve.kernels.device import state_blocks
from pdserve.kernels.states import BLOCK, MIN_BLOCKED, PagedStates, StatesSpec

SPAN = 2 * BLOCK
CLOSE = {torch.float32: 2e-5, torch.bfloat16: 2**-6}
FEW, MANY = (1, 65), (1, 63, 64, 65, 200, 1000)  # tokens of sequences
ALL_KINDS = ("delta of 64", "delta of 128", "space of 64", "space of 128", "delta of two widths", "space")


class Sequences:
    """Sequences of inputs, and a pool with their pages; what nothing was written to holds NaN."""

    def __init__(self, of: Recurrence, taken: Sequence[torch.Tensor], min_blocked: int = MIN_BLOCKED) -> None:
        self.of, self.taken = of, taken
        counts = [-(-len(each) // SPAN) for each in taken]
        self.pool = torch.full((sum(counts) + 1, of.kept_inputs + of.memory + 3), math.nan)
        supply = iter(np.random.default_rng(0).permutation(len(self.pool)).tolist())
        self.table = np.zeros((len(taken), max(counts)), dtype=np.int64)
        for row, count in enumerate(counts):
            self.table[row, :count] = [next(supply) for _ in range(count)]
        changes, products = of_tokens(of)
        sizes = 1, of.kept_inputs, of.memory, changes, SPAN, sum(map(len, taken)), len(taken)
        self.paged = PagedStates(self.pool, StatesSpec(*sizes, products=products, min_blocked=min_blocked))

    def step(self, *chunks: tuple[int, int, int]) -> list[torch.Tensor]:
        """Compute some chunks: each a sequence, its first token, and the one behind its last."""
        rows, begins, ends = (np.array(each) for each in zip(*chunks, strict=True))
        lens = ends - begins
        self.paged.plan(self.table[rows], lens, ends)
        made = self.paged.recur(self.of, 0, torch.cat([self.taken[row][begin:end] for row, begin, end in chunks]))
        self.paged.keep()
        return list(made.split(lens.tolist()))

    def state(self, row: int, length: int) -> torch.Tensor:
        return self.pool[self.table[row, (length - 1) // SPAN], :-3]


def inputs(of: Recurrence, lengths: Sequence[int], dtype: torch.dtype) -> list[torch.Tensor]:
    return [drawn(length, num_inputs(of), seed=row).to(dtype) for row, length in enumerate(lengths)]


def assert_near(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(got.double(), want.double(), atol=CLOSE[dtype], rtol=CLOSE[dtype])


def cases(kinds: Sequence[str]) -> list[object]:
    always = (("delta of two widths", torch.float32, FEW), ("space", torch.bfloat16, (66,)))
    return [
        *(pytest.param(*case) for case in always),
        *long(("delta of 128", torch.float32, (66,)), ("space of 128", torch.bfloat16, (66,))),
        *long(*((kind, dtype, MANY) for kind in kinds for dtype in CLOSE)),
    ]


@pytest.mark.parametrize(("kind", "dtype", "lengths"), cases(ALL_KINDS))
def test_sequences_of_unlike_lengths_in_one_step_are_the_formulas(
    kind: str, dtype: torch.dtype, lengths: Sequence[int]
) -> None:
    of = layer(kind, dtype)
    taken = inputs(of, lengths, dtype)
    made = Sequences(of, taken).step(*((row, 0, length) for row, length in enumerate(lengths)))
    for got, each in zip(made, taken, strict=True):
        assert_near(got, expected(of, each), dtype)


@pytest.mark.parametrize(
    ("kind", "cuts"),
    [
        *long(("delta of two widths", (0, 64, SPAN + 4))),
        *long(*((kind, (0, 70, 71, 90, 2 * SPAN, 2 * SPAN + 20)) for kind in ALL_KINDS)),
    ],
)
def test_a_chunk_goes_on_from_any_state_and_leaves_those_at_the_ends_of_pages(kind: str, cuts: Sequence[int]) -> None:
    """Whatever computed it: one token, a short chunk or a long one. A second sequence goes on from a full page."""
    of = layer(kind, torch.float32)
    *_, length = cuts
    first = drawn(length, num_inputs(of))
    blocked, single = (
        Sequences(of, [first, torch.cat((first[:SPAN], drawn(70, num_inputs(of), seed=1)))], least)
        for least in (MIN_BLOCKED, 10_000)
    )
    made = torch.cat([blocked.step((0, *cut))[0] for cut in pairwise(cuts)])
    assert_near(made, expected(of, first), torch.float32)
    single.step((0, 0, length))
    for each in (*range(SPAN, length, SPAN), length):
        assert_near(blocked.state(0, each), single.state(0, each), torch.float32)
    blocked.table[1, 0] = blocked.table[0, 0]
    (made,) = blocked.step((1, SPAN, SPAN + 70))
    assert_near(made, expected(of, blocked.taken[1])[SPAN:], torch.float32)


@pytest.mark.parametrize(
    ("kind", "gates"),
    [
        ("delta of two widths", "both"), ("space", "both"),
        *long(("delta of two widths", "alike")),
        *long(*product(("delta of 64", "space of 64"), GATES)),
    ],
)  # fmt: skip
def test_gates_of_any_strength_are_the_formulas(kind: str, gates: str) -> None:
    of = layer(kind, torch.float32)
    length = 200 if kind.endswith("64") else 70
    of, taken = gated_by(gates, of, drawn(length, num_inputs(of)))
    sequences = Sequences(of, [taken])
    assert_near(sequences.step((0, 0, length))[0], expected(of, taken), torch.float32)
    assert sequences.state(0, length).isfinite().all()


def test_short_chunks_are_computed_token_by_token_beside_long_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    of = layer("space", torch.float32)
    heads = of.heads
    assert heads is not None
    short, within, across = (
        Grids.of(monkeypatch, module, name)
        for module, name in (
            (states.device_states, "recur"),
            (state_blocks, "within_blocks"),
            (state_blocks, "across_blocks"),
        )
    )
    Sequences(of, inputs(of, (7, 8), torch.float32), min_blocked=8).step((0, 0, 7), (1, 0, 8))
    assert (short.seen, within.seen, across.seen) == ([(1, 4, 1)], [(1, 4)], [(1, 4, 1)])


@triton.jit
def invert(x_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803, ANN001, ANN201
    at = x_ptr + tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(at, state_blocks._inverse(tl.load(at), BLOCK))


def test_a_triangle_is_inverted_where_powers_of_it_would_overflow_what_float32_tells_apart() -> None:
    """Of ones: its powers reach 1e18, and its inverse has -1 below the diagonal and 0 elsewhere."""
    for lower in (torch.ones(BLOCK, BLOCK).tril(-1), 0.1 * drawn(BLOCK, BLOCK).tril(-1)):
        found, whole = lower.clone(), torch.eye(BLOCK) + lower
        invert[1,](found, BLOCK)
        torch.testing.assert_close(found.double(), whole.double().inverse(), atol=2e-5, rtol=2e-5)
