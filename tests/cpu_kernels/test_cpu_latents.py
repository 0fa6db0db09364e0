"""Compiled attention over rows that are keys and values of all heads is the plain formula, in float64.

A token's bits depend on its own sequence alone: not on other sequences, on how its prompt was cut, or on threads.
"""

import ctypes
import math
from itertools import pairwise, product

import numpy as np
import pytest
import reference_kernels as reference
import torch
from long_cases import long
from torch import Tensor

from pdserve.kernels.cpu.attention import SPLIT, Chunks, PagedAttention, Rows, Scoring, serves, serves_chunks
from pdserve.kernels.cpu.calls import Immediate

NUM_LAYERS, LAYER, SCALE = 2, 1, 0.2
CLOSE = {torch.float32: 5e-6, torch.bfloat16: 2**-7}
Cut = tuple[int, int, int]  # sequence, first token, end
CONTEXTS = [1, 2, 15, 17, 64, 65, 200, SPLIT - 1, SPLIT, SPLIT + 1, 2 * SPLIT + 77]
SPANS = [(0, 2), (0, 31), (0, 33), (0, 64), (0, 200), (1, 3), (17, 50), (63, 65), (64, 128), (100, 330)]


class Latents:
    """Sequences, and a pool whose other slots hold NaN."""

    def __init__(
        self, sizes: tuple[int, int], num_heads: int, lengths: list[int], page_size: int, dtype: torch.dtype
    ) -> None:
        """sizes: of latents, and of what turns."""
        generator = torch.Generator().manual_seed(num_heads + page_size)
        (self.rank, self.turning), self.num_heads, self.page_size = sizes, num_heads, page_size
        shape = (num_heads + 1, self.rank + self.turning)
        self.heads = [torch.randn(length, *shape, generator=generator).to(dtype) for length in lengths]
        turns = [torch.rand(length, self.turning // 2, generator=generator) * 6 for length in lengths]
        self.angles = [torch.cat((each.cos(), each.sin()), -1) for each in turns]
        counts = [-(-length // page_size) for length in lengths]
        self.pool = torch.full((sum(counts) + 1, NUM_LAYERS, 1, 1, page_size, shape[1]), math.nan, dtype=dtype)
        supply = torch.randperm(len(self.pool), generator=generator).tolist()
        self.table = np.zeros((len(lengths), max(counts)), dtype=np.int64)
        for row, count in enumerate(counts):
            self.table[row, :count] = [supply.pop() for _ in range(count)]

    def turned(self, row: int) -> Tensor:
        """Return all heads of a sequence as attention sees them."""
        heads, angles = self.heads[row].double(), self.angles[row].double()
        last = reference.rope(heads[..., self.rank :], angles)
        return torch.cat((heads[..., : self.rank], last), -1).to(self.pool.dtype).double()

    def place(self, row: int, end: int) -> None:
        """Write the rows of a sequence's first tokens into its pages."""
        keys = self.turned(row)[:end, -1].to(self.pool.dtype)
        positions = np.arange(end)
        pages, slots = self.table[row, positions // self.page_size], positions % self.page_size
        self.pool[pages, LAYER, 0, 0, slots] = keys

    def attended(self, loaded: ctypes.CDLL, cuts: list[Cut], num_single: int = 0) -> Tensor:
        """Run one step of chunks, of which the first ones are single tokens that attend as rows do."""
        size, nothing = self.page_size, np.zeros(0, dtype=np.int64)
        places = [(row, position) for row, begin, end in cuts for position in range(begin, end)]
        targets = np.array([(self.table[row, position // size], position % size) for row, position in places])
        single, several = cuts[:num_single], cuts[num_single:]
        ends = np.array([end for _, _, end in single], dtype=np.int64)
        rows = Rows(self.table[[row for row, _, _ in single]], np.zeros_like(ends), ends) if single else None
        starts = np.cumsum([num_single, *(end - begin for _, begin, end in several)])
        chunks = Chunks(self.table[[cut[0] for cut in several]], starts, np.array([cut[1] for cut in several]))
        paged = PagedAttention(self.pool, self.num_heads, Scoring(SCALE))
        angles = torch.cat([self.angles[row][begin:end] for row, begin, end in cuts])
        empty = Rows(self.table[:0], nothing, nothing)
        paged.plan([angles], targets, rows or empty, chunks if several else None)
        heads = torch.cat([self.heads[row][begin:end] for row, begin, end in cuts])
        return self.values(paged.run(Immediate(loaded), LAYER, heads))

    def values(self, out: Tensor) -> Tensor:
        """Leave out the features that mean nothing."""
        return out.view(len(out), self.num_heads, -1)[..., : self.rank]

    def expected(self, row: int, begin: int, end: int) -> Tensor:
        heads = self.turned(row)[:end]
        keys = heads[:, -1:].transpose(0, 1)
        out = reference.attention(heads[:, :-1], keys, keys, reference.Scoring(SCALE))
        return self.values(out.flatten(1))[begin:]


def check_rows(loaded: ctypes.CDLL, latents: Latents) -> None:
    lengths = [len(heads) for heads in latents.heads]
    for row, length in enumerate(lengths):
        latents.place(row, length - 1)
    out = latents.attended(loaded, [(row, length - 1, length) for row, length in enumerate(lengths)], len(lengths))
    expected = torch.cat([latents.expected(row, length - 1, length) for row, length in enumerate(lengths)])
    close = CLOSE[latents.pool.dtype]
    torch.testing.assert_close(out.double(), expected, atol=close, rtol=close)


def check_chunks(loaded: ctypes.CDLL, latents: Latents) -> None:
    for row, (begin, _) in enumerate(SPANS):
        latents.place(row, begin)
    out = latents.attended(loaded, [(row, *span) for row, span in enumerate(SPANS)])
    expected = torch.cat([latents.expected(row, *span) for row, span in enumerate(SPANS)])
    torch.testing.assert_close(out.double(), expected, atol=2**-7, rtol=2**-7)


ENDS = [end for _, end in SPANS]
LARGE = long(*((*case, 16) for case in (((512, 64), 4), ((64, 32), 128))))
SIZES = [(24, 8), (64, 32), (48, 16)]
GRID = [
    *LARGE,
    *product(SIZES, [4], [16]),
    *product([(64, 32)], [1, 3, 16, 20], [16]),
    *product([(64, 32)], [4], [1, 7, 64, 1000]),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("sizes", "num_heads", "page_size"), [*GRID, ((40, 8), 4, 16)])
def test_a_rows_heads_are_the_formula_over_its_own_rows(
    loaded: ctypes.CDLL, sizes: tuple[int, int], num_heads: int, page_size: int, dtype: torch.dtype
) -> None:
    check_rows(loaded, Latents(sizes, num_heads, CONTEXTS, page_size, dtype))


@pytest.mark.parametrize(("sizes", "num_heads", "page_size"), GRID)
def test_each_token_of_a_chunk_is_the_formula_over_what_it_sees(
    loaded: ctypes.CDLL, sizes: tuple[int, int], num_heads: int, page_size: int
) -> None:
    check_chunks(loaded, Latents(sizes, num_heads, ENDS, page_size, torch.bfloat16))


def test_as_many_heads_as_deepseek_v3_has_fit_on_a_stack(loaded: ctypes.CDLL) -> None:
    latents = Latents((512, 64), 128, [66], 16, torch.bfloat16)
    for cuts in ([(0, 0, 65)], [(0, 65, 66)]):
        out = latents.attended(loaded, cuts, num_single=len(cuts) if cuts[0][1] else 0)
        torch.testing.assert_close(out.double(), latents.expected(*cuts[0]), atol=2**-7, rtol=2**-7)


@pytest.mark.parametrize(("sizes", "num_heads"), [((24, 8), 3), *long(((512, 64), 16))])
def test_vectors_of_any_width_give_the_formula(narrow: ctypes.CDLL, sizes: tuple[int, int], num_heads: int) -> None:
    check_rows(narrow, Latents(sizes, num_heads, CONTEXTS, 16, torch.bfloat16))
    check_rows(narrow, Latents(sizes, num_heads, CONTEXTS, 16, torch.float32))
    check_chunks(narrow, Latents(sizes, num_heads, ENDS, 16, torch.bfloat16))


@pytest.mark.parametrize("cuts", [[0, 2, 34, 35, 99, 230], [0, 64, 128, 192, 230]])
def test_bits_depend_neither_on_chunks_nor_on_company_nor_on_threads(loaded: ctypes.CDLL, cuts: list[int]) -> None:
    latents, threads = Latents((64, 32), 5, [230, 77], 16, torch.bfloat16), torch.get_num_threads()
    whole = latents.attended(loaded, [(0, 0, 230), (1, 0, 77)])[:230]
    together = latents.attended(loaded, [(1, 76, 77), (0, 229, 230)], 2)[1]
    try:
        torch.set_num_threads(3 if threads == 1 else 1)
        parts = [latents.attended(loaded, [(0, begin, end)]) for begin, end in pairwise(cuts)]
        alone = latents.attended(loaded, [(0, 229, 230)], 1)[0]
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(alone, together)


def test_rows_of_other_shapes_are_refused_by_name(loaded: ctypes.CDLL) -> None:
    latents = Latents((64, 32), 4, [3], 16, torch.bfloat16)
    two = latents.pool.expand(-1, -1, -1, 2, -1, -1).contiguous()
    for bad, message in (
        (lambda: PagedAttention(two, 4), "pool must have K and V, or a row for both"),
        (lambda: PagedAttention(latents.pool, 129), "num_heads must be at most 128"),
        (lambda: PagedAttention(latents.pool[..., :90].contiguous(), 4), "head_dim must be a multiple of 16 to 1024"),
    ):
        with pytest.raises(ValueError, match=message):
            bad()
    assert serves(576, torch.bfloat16, latent_heads=128)
    assert not serves(576, torch.bfloat16)
    assert not serves(1040, torch.bfloat16, latent_heads=1)


def test_rows_of_latents_may_be_wider_than_heads(loaded: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert serves_chunks(loaded, 576, 128, torch.bfloat16, latent=True)
    assert not serves_chunks(loaded, 576, 128, torch.bfloat16)
