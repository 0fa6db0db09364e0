"""Recurrences over states in pages are the formulas in float64, however sequences are cut into chunks."""

import itertools
import math

import numpy as np
import pytest
import torch
from kernel_catalog import of_tokens
from long_cases import long, long_but
from recurrences import KINDS, drawn, expected, layer, num_inputs

from pdserve.kernels.cpu.states import Recurrence
from pdserve.kernels.states import PagedStates, StatesSpec

SPAN, LENGTHS = 8, (1, 7, 9, 17)  # tokens of a page; of sequences
NUM_LAYERS, PLACE = 2, 1
ROOM = 3  # of padding
CLOSE = {torch.float32: 2e-5, torch.bfloat16: 2**-6}


def spec_of(of: Recurrence, max_tokens: int, num_layers: int = NUM_LAYERS) -> StatesSpec:
    changes, _ = of_tokens(of)
    return StatesSpec(num_layers, of.kept_inputs, of.memory, changes, SPAN, max_tokens, len(LENGTHS) + ROOM)


def computed(of: Recurrence, taken: list[torch.Tensor], size: int) -> list[torch.Tensor]:
    """Compute sequences in steps of at most so many tokens of each; pages that nothing was written to hold NaN.

    Steps of single tokens are padded.
    """
    counts = [-(-len(each) // SPAN) for each in taken]
    pool = torch.full((sum(counts) + 1, NUM_LAYERS * (of.kept_inputs + of.memory) + 3), math.nan)
    supply = iter(np.random.default_rng(0).permutation(len(pool)).tolist())
    table = np.zeros((len(taken), max(counts)), dtype=np.int64)
    for row, count in enumerate(counts):
        table[row, :count] = [next(supply) for _ in range(count)]
    paged, made = PagedStates(pool, spec_of(of, 4 * max(LENGTHS))), [list[torch.Tensor]() for _ in taken]
    for begin in range(0, max(map(len, taken)), size):
        rows = [row for row, each in enumerate(taken) if len(each) > begin]
        parts = [taken[row][begin : begin + size] for row in rows]
        lens = np.array([len(part) for part in parts])
        paged.plan(table[rows], lens, begin + lens)
        inputs = torch.cat(parts)
        if size == 1:
            inputs = torch.cat((inputs, inputs.new_ones(ROOM, inputs.shape[1])))
        for place in range(NUM_LAYERS):
            out = paged.recur(of, place, inputs if place == PLACE else inputs.flip(0))
            if place == PLACE:
                for row, part in zip(rows, out[: lens.sum()].split(lens.tolist()), strict=True):
                    made[row].append(part)
        paged.keep()
    assert pool[:, NUM_LAYERS * (of.kept_inputs + of.memory) :].isnan().all(), "nothing is written behind states"
    return [torch.cat(each) for each in made]


ALWAYS = (("conv", torch.bfloat16),)  # test_state_blocks has the others


@pytest.mark.parametrize(("kind", "dtype"), long_but(ALWAYS, itertools.product(KINDS, CLOSE)))
def test_states_go_on_from_page_to_page_in_triton(kind: str, dtype: torch.dtype) -> None:
    of = layer(kind, dtype)
    taken = [drawn(length, num_inputs(of), seed=row).to(dtype) for row, length in enumerate(LENGTHS)]
    for size in (1, 5, 17):
        for got, inputs in zip(computed(of, taken, size), taken, strict=True):
            close = CLOSE[dtype]
            torch.testing.assert_close(got.double(), expected(of, inputs), atol=close, rtol=close)


@pytest.mark.parametrize("kind", ["conv", *long("delta"), "space"])
def test_a_step_whose_states_are_not_kept_changes_no_page(kind: str) -> None:
    of = layer(kind, torch.float32)
    pool = torch.zeros(2, of.kept_inputs + of.memory)
    paged, inputs = PagedStates(pool, spec_of(of, 9, num_layers=1)), drawn(9, num_inputs(of))
    table, lens = np.array([[1, 0]]), np.array([9])
    paged.plan(table, lens, lens)
    first = paged.recur(of, 0, inputs)
    assert not pool.any()
    paged.plan(table, lens, lens)
    assert torch.equal(paged.recur(of, 0, inputs), first)
    paged.keep()
    assert pool.any(1).all()


@pytest.mark.parametrize("num_final", [1, *long(2), 4])
@pytest.mark.parametrize("kind", ["conv", *long("delta"), "space"])
def test_of_a_chain_the_state_behind_its_last_right_guess_is_kept_in_triton(kind: str, num_final: int) -> None:
    """Beside a sequence without guesses, with padding behind both, as a replayed step has it."""
    of, before = layer(kind, torch.float32), np.array([6, 3])
    taken = [drawn(11, num_inputs(of), seed=row) for row in range(2)]
    table, pools = np.array([[1, 2], [3, 0]]), [torch.full((5, of.kept_inputs + of.memory), math.nan) for _ in range(2)]
    whole, guessed = (PagedStates(pool, spec_of(of, 24, num_layers=1)) for pool in pools)

    def step(
        paged: PagedStates, begins: np.ndarray, ends: np.ndarray, room: int, **guesses: np.ndarray
    ) -> torch.Tensor:
        paged.plan(table, ends - begins, ends, **guesses)
        parts = [inputs[begin:end] for inputs, begin, end in zip(taken, begins, ends, strict=True)]
        return paged.recur(of, 0, torch.cat((*parts, torch.ones(room, num_inputs(of)))))

    for paged in (whole, guessed):
        step(paged, np.zeros(2, dtype=np.int64), before, 0)
        paged.keep()
    step(whole, before, before + np.array([num_final, 1]), 0)
    whole.keep()
    made = step(guessed, before, before + np.array([4, 1]), ROOM - 1, has_guesses=np.array([True, False]))
    guessed.keep(np.array([num_final, 1]))
    torch.testing.assert_close(pools[1], pools[0], equal_nan=True)
    torch.testing.assert_close(made[:4].double(), expected(of, taken[0])[6:10], atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(made[4].double(), expected(of, taken[1])[3], atol=2e-5, rtol=2e-5)


def test_more_than_there_is_room_for_is_refused_by_name() -> None:
    of = layer("conv", torch.float32)
    with pytest.raises(ValueError, match="pool has no room for 2 states of 42"):
        PagedStates(torch.zeros(2, 50), spec_of(of, 9, num_layers=2))
    paged, lens = PagedStates(torch.zeros(2, 50), spec_of(of, 9, num_layers=1)), np.array([10])
    with pytest.raises(ValueError, match="query_lens: 10 tokens, 9 at most"):
        paged.plan(np.array([[0, 1]]), lens, lens)
    with pytest.raises(ValueError, match="plan must be called first"):
        paged.keep()
    lens = np.array([4])
    paged.plan(np.array([[0]]), lens, lens)
    with pytest.raises(ValueError, match="taken must be of 4 to 4 tokens, got 5"):
        paged.recur(of, 0, torch.zeros(5, num_inputs(of)))
    with pytest.raises(ValueError, match="layers must be alike"):
        paged.recur(layer("space", torch.float32), 0, torch.zeros(4, 500))
