"""Compiled attention of chunks of several tokens is the plain formula's, in float64, whatever else is in the pool.

A token's bits depend on its own sequence alone: not on how its prompt came in chunks, on other chunks, or on threads.
"""

import ctypes
import math
from collections.abc import Callable
from itertools import pairwise, product

import numpy as np
import pytest
import reference_kernels as reference
import torch
from torch import Tensor
from wider_pools import LAID_OUT

from pdserve.kernels.cpu import attention
from pdserve.kernels.cpu.attention import Chunks, HeadWeights, PagedAttention, Rows, Scoring, serves_chunks
from pdserve.kernels.cpu.calls import Immediate

LAYER, NUM_LAYERS, EPS = 1, 2, 1e-6
CLOSE = 2**-7
# Where each sequence's chunk begins, and its context: full blocks of queries and keys, and one more or less.
SPANS = [(0, 2), (0, 31), (0, 32), (0, 64), (0, 65), (0, 200), (1, 3), (17, 50), (63, 65), (64, 128), (100, 230)]


class Prompts:
    """Sequences, and a pool whose other slots hold NaN."""

    soft_cap: float | None = None  # of scores
    sinks: Tensor | None = None

    def __init__(self, head_dim: int, heads: tuple[int, int], page_size: int, spans: list[tuple[int, int]]) -> None:
        generator = torch.Generator().manual_seed(head_dim + page_size)
        self.spans, self.page_size, (self.num_heads, self.num_kv_heads) = spans, page_size, heads
        lengths = [end for _, end in spans]
        width = sum(heads) + heads[1]
        self.qkvs = [torch.randn(end, width, head_dim, generator=generator).bfloat16() for end in lengths]
        counts = [-(-end // page_size) for end in lengths]
        shape = (sum(counts) + 1, NUM_LAYERS, 2, heads[1], page_size, head_dim)
        padded = (shape[0], math.prod(shape[1:]) + 32)  # pages may be longer than what these layers have of them
        self.pool = torch.full(padded, math.nan, dtype=torch.bfloat16)[:, :-32].view(shape)
        supply = torch.randperm(len(self.pool), generator=generator).tolist()
        self.table = np.zeros((len(spans), max(counts)), dtype=np.int64)
        for row, count in enumerate(counts):
            self.table[row, :count] = [supply.pop() for _ in range(count)]

    def attended(
        self, loaded: ctypes.CDLL, cuts: list[tuple[int, int, int]], window: int | None = None, *, alone: bool = False
    ) -> Tensor:
        """Run one step of chunks, each (sequence, first token, end); q and k are not turned. alone: queries are."""
        qkv = torch.cat([self.qkvs[row][begin:end] for row, begin, end in cuts])
        angles = torch.cat((torch.ones(len(qkv), qkv.shape[2] // 2), torch.zeros(len(qkv), qkv.shape[2] // 2)), 1)
        positions = [(row, position) for row, begin, end in cuts for position in range(begin, end)]
        size = self.page_size
        targets = np.array([(self.table[row, position // size], position % size) for row, position in positions])
        starts = np.cumsum([0, *(end - begin for _, begin, end in cuts)])
        nothing = np.zeros(0, dtype=np.int64)
        chunks = Chunks(self.table[[row for row, _, _ in cuts]], starts, np.array([cut[1] for cut in cuts]), window)
        scoring = Scoring(qkv.shape[2] ** -0.5, self.soft_cap or 0.0)
        paged = PagedAttention(self.pool, self.num_heads, scoring)
        paged.plan([angles], targets, Rows(self.table[:0], nothing, nothing), chunks)
        given = qkv[:, : self.num_heads].contiguous() if alone else qkv
        return paged.run(Immediate(loaded), LAYER, given, HeadWeights(sinks=self.sinks))

    def expected(self, row: int, begin: int, window: int | None) -> Tensor:
        heads = self.qkvs[row].double().transpose(0, 1)
        q, k, v = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads))
        scoring = reference.Scoring(q.shape[2] ** -0.5, window, self.soft_cap, self.sinks)
        out = reference.attention(q.transpose(0, 1), k, v, scoring)
        return out.flatten(1)[begin:]


def checked(loaded: ctypes.CDLL, prompts: Prompts, window: int | None = None) -> None:
    """Fill what comes before the chunks, then compare each chunk with the formula."""
    before = [(row, 0, begin) for row, (begin, _) in enumerate(prompts.spans) if begin]
    if before:
        prompts.attended(loaded, before, window)
    out = prompts.attended(loaded, [(row, *span) for row, span in enumerate(prompts.spans)], window)
    wanted = [prompts.expected(row, begin, window) for row, (begin, _) in enumerate(prompts.spans)]
    torch.testing.assert_close(out.double(), torch.cat(wanted), atol=CLOSE, rtol=CLOSE)


@pytest.mark.parametrize(
    ("head_dim", "heads", "page_size"),
    [
        *product([32, 64, 96, 128, 160, 256, 512], [(6, 2)], [16]),
        (512, (8, 1), 16),
        *product([64], [(1, 1), (9, 3), (14, 2), (10, 1)], [16]),
        *product([64], [(6, 2)], [1, 7, 64, 1000]),
    ],
)
def test_each_token_is_the_formula_over_what_it_sees(
    either: ctypes.CDLL, head_dim: int, heads: tuple[int, int], page_size: int
) -> None:
    checked(either, Prompts(head_dim, heads, page_size, SPANS))


@pytest.mark.parametrize("window", [None, 40])
def test_queries_alone_attend_to_what_is_in_the_pages(loaded: ctypes.CDLL, window: int | None) -> None:
    prompts = Prompts(64, (6, 2), 16, [(0, end) for _, end in SPANS])
    cuts = [(row, *span) for row, span in enumerate(prompts.spans)]
    first, written = prompts.attended(loaded, cuts, window), prompts.pool.clone()
    assert torch.equal(prompts.attended(loaded, cuts, window, alone=True), first)
    assert torch.equal(prompts.pool.nan_to_num(9.0), written.nan_to_num(9.0))


@pytest.mark.parametrize("lay_out", LAID_OUT)
@pytest.mark.parametrize("heads", [(6, 2), (3, 1)])
def test_chunks_attend_in_pages_that_are_laid_out_otherwise(
    loaded: ctypes.CDLL, heads: tuple[int, int], lay_out: Callable[[Tensor], Tensor]
) -> None:
    prompts = Prompts(64, heads, 16, SPANS)
    prompts.pool = lay_out(prompts.pool)
    checked(loaded, prompts, 50)


@pytest.mark.parametrize(("head_dim", "heads"), [(64, (9, 3)), (96, (6, 2)), (256, (2, 1)), (512, (2, 1))])
def test_vectors_of_any_width_give_the_formula(narrow: ctypes.CDLL, head_dim: int, heads: tuple[int, int]) -> None:
    checked(narrow, Prompts(head_dim, heads, 16, SPANS), 50)


@pytest.mark.parametrize("window", [1, 5, 16, 64, 100])
def test_a_token_sees_no_more_than_its_window(loaded: ctypes.CDLL, window: int) -> None:
    checked(loaded, Prompts(64, (6, 2), 16, SPANS), window)


@pytest.mark.parametrize("soft_cap", [0.5, 2.0, 50.0])
@pytest.mark.parametrize("head_dim", [64, 96])
def test_scores_keep_below_their_cap(loaded: ctypes.CDLL, soft_cap: float, head_dim: int) -> None:
    prompts = Prompts(head_dim, (6, 2), 16, SPANS)
    prompts.soft_cap = soft_cap
    checked(loaded, prompts, 50)


@pytest.mark.parametrize("window", [None, 16, 100])
@pytest.mark.parametrize("heads", [(6, 2), (9, 3)])
def test_a_sink_takes_its_share_of_a_tokens_weights(
    loaded: ctypes.CDLL, heads: tuple[int, int], window: int | None
) -> None:
    prompts = Prompts(64, heads, 16, SPANS)
    prompts.sinks = torch.linspace(-4.0, 6.0, heads[0])
    checked(loaded, prompts, window)


def test_pages_before_a_window_may_hold_anything(loaded: ctypes.CDLL) -> None:
    prompts = Prompts(64, (6, 2), 16, [(200, 230)])
    prompts.attended(loaded, [(0, 0, 200)])
    before = 200 - 50 + 1
    prompts.pool[prompts.table[0, : before // 16]] = math.nan
    out = prompts.attended(loaded, [(0, 200, 230)], 50)
    torch.testing.assert_close(out.double(), prompts.expected(0, 200, 50), atol=CLOSE, rtol=CLOSE)


@pytest.mark.parametrize("cuts", [[0, 2, 34, 35, 99, 230], [0, 64, 128, 192, 230], [0, 229, 230]])
def test_bits_depend_neither_on_chunks_nor_on_company_nor_on_threads(loaded: ctypes.CDLL, cuts: list[int]) -> None:
    prompts, threads = Prompts(64, (9, 3), 16, [(0, 230), (0, 77)]), torch.get_num_threads()
    whole = prompts.attended(loaded, [(0, 0, 230), (1, 0, 77)])[:230]
    try:
        torch.set_num_threads(3 if threads == 1 else 1)
        parts = [prompts.attended(loaded, [(0, begin, end)]) for begin, end in pairwise(cuts)]
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(torch.cat(parts), whole)


def test_chunks_that_do_not_fit_are_refused_by_name(loaded: ctypes.CDLL) -> None:
    prompts = Prompts(64, (6, 2), 16, [(0, 40)])
    paged, nothing = PagedAttention(prompts.pool, 6), np.zeros(0, dtype=np.int64)
    rows, targets = Rows(prompts.table[:0], nothing, nothing), np.zeros((40, 2), dtype=np.int64)
    short = Chunks(prompts.table, np.array([0, 39]), np.array([0]))
    narrow = Chunks(prompts.table[:, :2], np.array([0, 40]), np.array([0]))
    for chunks, message in ((short, "chunks must be tokens 0 to 40, got"), (narrow, "page_table must be")):
        with pytest.raises(ValueError, match=message):
            paged.plan([torch.ones(40, 64)], targets, rows, chunks)


def test_heads_that_share_more_than_a_stack_holds_are_not_served(
    loaded: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert serves_chunks(loaded, 256, 16, torch.bfloat16)
    assert not serves_chunks(loaded, 256, 17, torch.bfloat16)
    assert not serves_chunks(loaded, 32, 65, torch.bfloat16)
    assert not serves_chunks(loaded, 80, 1, torch.bfloat16)
    assert not serves_chunks(loaded, 64, 1, torch.float32)


@pytest.mark.parametrize(("head_dim", "group", "latent"), [(64, 3, False), (576, 128, True)])
def test_torch_attends_where_it_alone_knows_a_matrix_unit(
    loaded: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, head_dim: int, group: int, latent: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    for known in (True, False):
        monkeypatch.setattr(attention, "has_matrix_unit", lambda _, known=known: known)
        assert serves_chunks(loaded, head_dim, group, torch.bfloat16, latent=latent) == known
