"""Compiled recurrences over states in pages are the formulas in float64, token by token.

A token's bits, and those of the state behind it, depend on its own sequence alone: not on other sequences, on how its
prompt was cut, or on threads. Pages are written when states are kept, and not before.
"""

import ctypes
import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from recurrences import KINDS, drawn, expected, halves, layer, num_inputs
from torch import Tensor

from pdserve.kernels.cpu.calls import Immediate, Program
from pdserve.kernels.cpu.states import PagedStates, Recurrence, scale

SPAN, FIRST = 8, 5  # tokens of a page; values before a layer's in a page
CLOSE = {torch.float32: 2e-5, torch.bfloat16: 2**-6}
Cut = tuple[int, int, int]  # sequence, first token, end
LENGTHS = (1, 2, 7, 8, 9, 16, 33)


class Sequences:
    """Sequences of random inputs, and a pool whose other values are NaN."""

    def __init__(self, of: Recurrence, dtype: torch.dtype, lengths: Sequence[int]) -> None:
        self.of = of
        self.taken = [drawn(length, num_inputs(of), seed=row).to(dtype) for row, length in enumerate(lengths)]
        counts = [-(-length // SPAN) for length in lengths]
        self.pool = torch.full((sum(counts) + 1, FIRST + of.kept_inputs + of.memory + 3), math.nan)
        supply = np.random.default_rng(0).permutation(len(self.pool))
        self.table = np.full((len(lengths), max(counts)), supply[0])
        ends = np.cumsum(counts)
        for row, (count, end) in enumerate(zip(counts, ends, strict=True)):
            self.table[row, :count] = supply[1 + end - count : 1 + end]
        self.paged = PagedStates(self.pool, SPAN)

    def step(
        self, loaded: ctypes.CDLL, cuts: list[Cut], *, keeps: bool = True, final: Mapping[int, int] | None = None
    ) -> dict[int, Tensor]:
        """Compute the chunks of a step, and return what each sequence's tokens become.

        final: of sequences whose tokens are guesses but for the first, how many are right, the first included.
        """
        cuts = sorted(cuts, key=lambda cut: cut[2] - cut[1])
        rows, begins, ends = (np.array(each) for each in zip(*cuts, strict=True))
        calls, final = Immediate(loaded), final or {}
        self.paged.plan(self.table[rows], ends - begins, ends, np.array([row in final for row in rows]))
        taken = torch.cat([self.taken[row][begin:end] for row, begin, end in cuts])
        out, kept = self.paged.recur(calls, self.of, FIRST, taken)
        if final:
            self.paged.drop(np.array([final.get(row, end - begin) for row, begin, end in cuts]))
        if keeps:
            calls.take(1, kept.call)
        parts = out.split([end - begin for _, begin, end in cuts])
        return {row: part for (row, _, _), part in zip(cuts, parts, strict=True)}

    def state(self, row: int, length: int) -> Tensor:
        """Return the state behind so many tokens."""
        return self.pool[self.table[row, (length - 1) // SPAN], FIRST:-3]


def check(loaded: ctypes.CDLL, kind: str, dtype: torch.dtype) -> None:
    sequences = Sequences(of := layer(kind, dtype), dtype, LENGTHS)
    found = sequences.step(loaded, [(row, 0, length) for row, length in enumerate(LENGTHS)])
    for row, taken in enumerate(sequences.taken):
        torch.testing.assert_close(found[row].double(), expected(of, taken), atol=CLOSE[dtype], rtol=CLOSE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_each_token_of_a_sequence_is_the_formula(loaded: ctypes.CDLL, kind: str, dtype: torch.dtype) -> None:
    check(loaded, kind, dtype)


def test_vectors_of_any_width_give_the_formula(narrow: ctypes.CDLL) -> None:
    for kind in KINDS:
        check(narrow, kind, torch.float32)
        check(narrow, kind, torch.bfloat16)


@pytest.mark.parametrize("cuts", [range(34), [0, 1, 2, 9, 33], [0, 8, 16, 33], [0, 7, 8, 17, 32, 33]])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_of_tokens_and_states_depend_neither_on_chunks_nor_on_company_nor_on_threads(
    loaded: ctypes.CDLL, dtype: torch.dtype, kind: str, cuts: Sequence[int]
) -> None:
    lengths, threads = (33, 12, 5), torch.get_num_threads()
    of = layer(kind, dtype)
    whole, parts = (Sequences(of, dtype, lengths) for _ in range(2))
    expected = whole.step(loaded, [(row, 0, length) for row, length in enumerate(lengths)])
    others = [[(1, 0, 4), (2, 0, 4)], [(1, 4, 5), (2, 4, 5)], [(1, 5, 12)]]
    found: dict[int, list[Tensor]] = {0: [], 1: [], 2: []}
    try:
        torch.set_num_threads(3 if threads == 1 else 1)
        for turn, (begin, end) in enumerate(pairwise(cuts)):
            step = parts.step(loaded, [(0, begin, end), *(others[turn] if turn < len(others) else [])])
            for row, part in step.items():
                found[row].append(part)
    finally:
        torch.set_num_threads(threads)
    for row, length in enumerate(lengths):
        assert torch.equal(torch.cat(found[row]), expected[row])
        assert torch.equal(parts.state(row, length), whole.state(row, length))
    for span in range(1, 5):
        assert torch.equal(parts.state(0, span * SPAN), whole.state(0, span * SPAN)), "a snapshot behind a full span"


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_writes_no_page_before_its_states_are_kept_and_then_no_other(loaded: ctypes.CDLL, kind: str) -> None:
    sequences = Sequences(layer(kind, torch.float32), torch.float32, (20, 20))
    first = [(0, 0, 10), (1, 0, 3)]
    sequences.step(loaded, first, keeps=False)
    assert sequences.pool.isnan().all()
    sequences.step(loaded, first)
    is_written = ~sequences.pool[:, FIRST:-3].isnan()
    assert sorted(is_written.all(1).nonzero().flatten().tolist()) == sorted(
        {*sequences.table[0, :2], sequences.table[1, 0]}
    )
    assert is_written.any(1).sum() == 3
    assert sequences.pool[:, :FIRST].isnan().all()
    assert sequences.pool[:, -3:].isnan().all()
    before, second = sequences.pool.clone(), [(0, 10, 20), (1, 3, 4)]
    alone = sequences.step(loaded, second, keeps=False)
    assert torch.equal(sequences.pool.nan_to_num(), before.nan_to_num())
    again = sequences.step(loaded, second)
    assert all(torch.equal(alone[row], again[row]) for row in alone), "it can be computed again"


@pytest.mark.parametrize("num_final", [1, 2, 3, 5])
@pytest.mark.parametrize("num_guesses", [4, 17])  # in a short chunk, and in one that is not
@pytest.mark.parametrize("kind", KINDS)
def test_of_a_chain_the_state_behind_its_last_right_guess_is_kept_and_those_of_full_spans(
    loaded: ctypes.CDLL, kind: str, num_guesses: int, num_final: int
) -> None:
    lengths, before = (33, 12, 33), 6
    whole, guessed = (Sequences(layer(kind, torch.float32), torch.float32, lengths) for _ in range(2))
    first = [(0, 0, before), (1, 0, 11)]
    for each in (whole, guessed):
        each.step(loaded, first)
    whole.step(loaded, [(0, before, before + num_final), (1, 11, 12), (2, 0, 33)])
    cuts = [(0, before, before + 1 + num_guesses), (1, 11, 12), (2, 0, 33)]
    guessed.step(loaded, cuts, final={0: num_final})
    assert torch.equal(guessed.pool.nan_to_num(), whole.pool.nan_to_num()), "all pages, also those not written"
    last = [(0, before + num_final, 33)]
    assert torch.equal(guessed.step(loaded, last)[0], whole.step(loaded, last)[0])


@pytest.mark.parametrize("kind", sorted({*KINDS} - {"delta of two widths"}))  # all of whose heads have the same keys
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_ranks_leave_the_states_of_one_and_compute_its_results(
    loaded: ctypes.CDLL, kind: str, dtype: torch.dtype
) -> None:
    of, lengths = layer(kind, dtype), (33, 12)
    whole, shared = (Sequences(of, dtype, lengths) for _ in range(2))
    steps = [([(0, 0, 10), (1, 0, 3)], {}), ([(0, 10, 33), (1, 3, 4)], {}), ([(1, 4, 12)], {1: 3})]
    expected = [whole.step(loaded, cuts, final=final) for cuts, final in steps]
    ranks = []
    for part, taken, results in halves(of):
        rank = copy(shared)
        rank.of, rank.taken = part, [each[:, taken].contiguous() for each in shared.taken]
        ranks.append((rank, results))
    for (cuts, final), made in zip(steps, expected, strict=True):
        for rank, results in ranks:
            found = rank.step(loaded, cuts, final=final)
            assert all(torch.equal(found[row], made[row][:, results]) for row in made)
    assert torch.equal(shared.pool.nan_to_num(), whole.pool.nan_to_num()), "all pages, also those not written"


@pytest.mark.parametrize("kind", KINDS)
def test_a_program_of_more_rows_computes_what_calls_one_by_one_do(loaded: ctypes.CDLL, kind: str) -> None:
    """Also for a chain of guesses, of which two are right."""
    lengths = (9, 8, 12)
    of = layer(kind, torch.float32)
    one, other = (Sequences(of, torch.float32, lengths) for _ in range(2))
    for each in (one, other):
        each.step(loaded, [(0, 0, 8), (1, 0, 7), (2, 0, 7)])
    expected = one.step(loaded, cuts := [(0, 8, 9), (1, 7, 8), (2, 7, 12)], final={2: 3})
    program, keeping = Program(loaded), Program(loaded)
    taken = torch.zeros(9, num_inputs(of))
    other.paged.plan(other.table[:1], np.array([1]), np.array([1]))
    out, kept = other.paged.recur(program, of, FIRST, taken)
    keeping.take(9, kept.call)
    other.paged.plan(other.table, np.array([1, 1, 5]), np.array(lengths), np.array([False, False, True]))
    taken[:7] = torch.cat([other.taken[row][begin:end] for row, begin, end in cuts])
    program.run(7)
    other.paged.drop(np.array([1, 1, 3]))
    keeping.run(7)
    assert torch.equal(out[:7], torch.cat([expected[row] for row in range(3)]))
    assert torch.equal(other.pool.nan_to_num(), one.pool.nan_to_num())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_factors_and_gates_are_torchs(loaded: ctypes.CDLL, dtype: torch.dtype) -> None:
    calls = Immediate(loaded)
    for width in (1, 16, 37):
        x, gates = drawn(3, width).to(dtype), drawn(3, width, seed=1).to(dtype)
        assert torch.equal(scale(calls, x, 0.7), x * 0.7)
        assert torch.equal(scale(calls, x, gates[0]), x * gates[0])
        wide = torch.zeros(3, width + 5, dtype=dtype)
        scale(calls, x, 1.0, wide[:, 5:])
        assert torch.equal(wide[:, 5:], x)
        assert not wide[:, :5].any()
        torch.testing.assert_close(scale(calls, x, 1.0, None, gates), x * gates.sigmoid())


def test_layers_and_steps_of_other_shapes_are_refused_by_name(loaded: ctypes.CDLL) -> None:
    of = layer("delta", torch.float32)
    assert of.heads is not None
    sequences = Sequences(of, torch.float32, (5, 5))
    narrower, wide = (replace(of.heads, key_dim=key_dim) for key_dim in (8, 2049))
    sequences.step(loaded, [(0, 0, 5)])
    calls, paged, taken, two = Immediate(loaded), sequences.paged, sequences.taken[0], np.array([1, 1])
    for bad, message in (
        (lambda: paged.recur(calls, of, FIRST, taken[:4]), "taken must be of 5 tokens"),
        (lambda: paged.recur(calls, replace(of, bias=drawn(3)), FIRST, taken), "bias must have shape"),
        (lambda: paged.recur(calls, replace(of, heads=narrower), FIRST, taken), "channels must be"),
        (lambda: paged.recur(calls, replace(of, heads=wide), FIRST, taken), "key_dim must be at most 2048"),
        (lambda: paged.recur(calls, of, FIRST, taken.half()), "taken must be one of"),
        (lambda: paged.plan(sequences.table, np.array([17, 1]), np.array([17, 1])), "short chunks must come first"),
        (lambda: paged.plan(sequences.table + 99, two, two), "page_table names pages that are not there"),
        (lambda: PagedStates(sequences.pool.double(), SPAN), "pool must be one of"),
    ):
        with pytest.raises(ValueError, match=message):
            bad()
