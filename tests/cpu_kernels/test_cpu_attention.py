"""Compiled attention gives the plain formula's result over a row's own keys, in float64, whatever else is in the pool.

A row's bits depend on its own sequence alone: not on other rows, not on the number of threads.
"""

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
import reference_kernels as reference
import torch
from torch import Tensor
from wider_pools import LAID_OUT

from pdserve.kernels.cpu.attention import SPLIT, HeadWeights, PagedAttention, QkNorm, Rows, Scoring, serves
from pdserve.kernels.cpu.calls import Immediate

NUM_LAYERS = 2
LAYER = 1
EPS = 1e-6
SCALE = 1.25  # of scores, times the usual one
CLOSE = {torch.float32: 3e-6, torch.bfloat16: 2**-7}
CONTEXTS = [1, 2, 15, 16, 17, 100, SPLIT - 1, SPLIT, SPLIT + 1, 3 * SPLIT + 5]
HEADS = [(1, 1), (3, 3), (6, 2), (8, 2), (14, 2), (10, 1)]  # of q, of K and V


@dataclass
class Case:
    """Sequences in a pool: all but each one's last token are in their pages already."""

    pool: Tensor
    qkv: Tensor
    weights: HeadWeights
    cos_sin: Tensor
    targets: np.ndarray
    rows: Rows
    expected: Tensor  # float64


def random_case(
    dtype: torch.dtype,
    head_dim: int,
    heads: tuple[int, int],
    page_size: int,
    window: int | None = None,
    learnt: str = "",
) -> Case:
    generator = torch.Generator().manual_seed(head_dim + page_size)
    num_heads, num_kv_heads = heads
    columns = -(-max(CONTEXTS) // page_size)
    num_pages = sum(-(-end // page_size) for end in CONTEXTS) + 1
    pool = torch.full((num_pages, NUM_LAYERS, 2, num_kv_heads, page_size, head_dim), math.nan, dtype=dtype)
    supply = torch.randperm(num_pages, generator=generator).tolist()
    weights = (torch.rand(2, head_dim, generator=generator) + 0.5).to(dtype).unbind(0)
    head_norms = None if "norms" not in learnt else QkNorm(*weights, EPS, after_rope=learnt == "norms after")
    sinks = torch.randn(num_heads, generator=generator) * 4 if learnt == "sinks" else None
    table = np.zeros((len(CONTEXTS), columns), dtype=np.int64)
    targets, qkvs, angles, expected = [], [], [], []
    for row, end in enumerate(CONTEXTS):
        pages = [supply.pop() for _ in range(-(-end // page_size))]
        table[row, : len(pages)] = pages
        k, v = torch.randn(2, end, num_kv_heads, head_dim, generator=generator).to(dtype)
        q = torch.randn(num_heads, head_dim, generator=generator).to(dtype)
        for position in range(end - 1):
            page = pool[pages[position // page_size], LAYER]
            page[0, :, position % page_size], page[1, :, position % page_size] = k[position], v[position]
        qkvs.append(torch.cat((q, k[-1], v[-1])))
        targets.append((pages[-1], (end - 1) % page_size))
        turns = torch.rand(head_dim // 2, generator=generator) * 6
        angles.append(torch.cat((turns.cos(), turns.sin())))
        q, last = q.double(), k[-1].double()
        if learnt == "norms before":
            q, last = (reference.rms_norm(x, w.double(), EPS) for x, w in zip((q, last), weights, strict=True))
        q, last = (reference.rope(x[None], angles[-1].double()[None])[0].to(dtype).double() for x in (q, last))
        if learnt == "norms after":
            q, last = (reference.rms_norm(x, w.double(), EPS) for x, w in zip((q, last), weights, strict=True))
        keys = torch.cat((k[:-1].double(), last[None]))
        scoring = reference.Scoring(SCALE * head_dim**-0.5, window, sinks=sinks)
        rows = reference.attention(q[None], keys.transpose(0, 1), v.double().transpose(0, 1), scoring)
        expected.append(rows.flatten())
    ends = np.array(CONTEXTS)
    begins = np.zeros_like(ends) if window is None else np.maximum(ends - window, 0)
    return Case(
        pool, torch.stack(qkvs), HeadWeights(head_norms, sinks), torch.stack(angles), np.array(targets),
        Rows(table, begins, ends), torch.stack(expected),
    )  # fmt: skip


def attended(loaded: ctypes.CDLL, case: Case, rows: slice = slice(None), *, by_q_alone: bool = False) -> Tensor:
    """Return what some of the case's rows attend to, as one step. by_q_alone: to K and V that are in pages already."""
    num_heads = case.qkv.shape[1] - 2 * case.pool.shape[3]
    scoring = Scoring(SCALE * case.pool.shape[-1] ** -0.5)
    paged = PagedAttention(case.pool, num_heads, scoring, num_ropes=2)
    chosen = Rows(case.rows.page_table[rows], case.rows.begins[rows], case.rows.ends[rows])
    other = torch.full_like(case.cos_sin[rows], math.nan)
    paged.plan([other, case.cos_sin[rows]], case.targets[rows], chosen)
    qkv = case.qkv[rows, : num_heads if by_q_alone else None].clone()
    return paged.run(Immediate(loaded), LAYER, qkv, case.weights, rope=1)


GRID = [
    *product([torch.float32, torch.bfloat16], [16, 48, 64, 80, 96, 128, 256, 512], [(6, 2)], [16]),
    *product([torch.bfloat16], [64, 128], HEADS, [16]),
    (torch.bfloat16, 512, (8, 1), 16),
    *product([torch.float32], [64], [(6, 2)], [1, 4, 7, 64, 1000]),
]


@pytest.mark.parametrize(("dtype", "head_dim", "heads", "page_size"), GRID)
def test_each_row_is_the_formula_over_its_own_keys(
    loaded: ctypes.CDLL, dtype: torch.dtype, head_dim: int, heads: tuple[int, int], page_size: int
) -> None:
    case = random_case(dtype, head_dim, heads, page_size)
    torch.testing.assert_close(attended(loaded, case).double(), case.expected, atol=CLOSE[dtype], rtol=CLOSE[dtype])


@pytest.mark.parametrize(
    ("dtype", "head_dim", "heads"),
    [
        *product([torch.float32, torch.bfloat16], [64, 80], [(6, 2)]),
        (torch.float32, 128, (8, 2)),
        (torch.bfloat16, 256, (5, 1)),
        (torch.bfloat16, 512, (8, 1)),
    ],
)
def test_vectors_of_any_width_attend_alike(
    narrow: ctypes.CDLL, dtype: torch.dtype, head_dim: int, heads: tuple[int, int]
) -> None:
    case = random_case(dtype, head_dim, heads, 16, learnt="norms before")
    close = 2 * CLOSE[dtype]
    torch.testing.assert_close(attended(narrow, case).double(), case.expected, atol=close, rtol=close)


@pytest.mark.parametrize("lay_out", LAID_OUT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_attend_in_pages_that_are_laid_out_otherwise(
    loaded: ctypes.CDLL, dtype: torch.dtype, lay_out: Callable[[Tensor], Tensor]
) -> None:
    case = random_case(dtype, 64, (6, 2), 16)
    case.pool = lay_out(case.pool)
    torch.testing.assert_close(attended(loaded, case).double(), case.expected, atol=CLOSE[dtype], rtol=CLOSE[dtype])


@pytest.mark.parametrize("norms", ["before", "after"])
def test_norms_come_before_or_after_the_rotation(loaded: ctypes.CDLL, norms: str) -> None:
    case = random_case(torch.float32, 64, (6, 2), 16, learnt=f"norms {norms}")
    torch.testing.assert_close(attended(loaded, case).double(), case.expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("left_behind", [30.0, math.inf, -math.inf])
def test_what_others_left_in_a_page_is_not_seen(loaded: ctypes.CDLL, left_behind: float) -> None:
    case = random_case(torch.float32, 64, (6, 2), 16)
    case.pool[case.pool.isnan()] = left_behind
    torch.testing.assert_close(attended(loaded, case).double(), case.expected, atol=3e-6, rtol=0)


@pytest.mark.parametrize("window", [1, 5, 16, SPLIT, SPLIT + 3])
def test_a_row_sees_no_more_than_its_window(loaded: ctypes.CDLL, window: int) -> None:
    case = random_case(torch.float32, 64, (6, 2), 16, window=window)
    torch.testing.assert_close(attended(loaded, case).double(), case.expected, atol=3e-6, rtol=0)


@pytest.mark.parametrize("window", [None, 16, SPLIT + 3])
@pytest.mark.parametrize("heads", [(6, 2), (3, 3)])
def test_a_sink_takes_its_share_of_a_rows_weights(
    loaded: ctypes.CDLL, heads: tuple[int, int], window: int | None
) -> None:
    case = random_case(torch.float32, 64, heads, 16, window, learnt="sinks")
    torch.testing.assert_close(attended(loaded, case).double(), case.expected, atol=3e-6, rtol=0)


@pytest.mark.parametrize("sink", [-math.inf, 500.0])
def test_a_sink_may_take_nothing_or_all(loaded: ctypes.CDLL, sink: float) -> None:
    case = random_case(torch.float32, 64, (6, 2), 16)
    plain = attended(loaded, case)
    case.weights = HeadWeights(sinks=torch.full((6,), sink))
    wanted = plain if sink < 0 else torch.zeros_like(plain)
    torch.testing.assert_close(attended(loaded, case), wanted, atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_and_keys_are_normed_first(loaded: ctypes.CDLL, dtype: torch.dtype) -> None:
    case = random_case(dtype, 64, (6, 2), 16, learnt="norms before")
    close = 2 * CLOSE[dtype]
    torch.testing.assert_close(attended(loaded, case).double(), case.expected, atol=close, rtol=close)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rows_bits_depend_on_neither_company_nor_threads(loaded: ctypes.CDLL, dtype: torch.dtype) -> None:
    case, threads = random_case(dtype, 64, (6, 2), 16), torch.get_num_threads()
    together = attended(loaded, case)
    alone = torch.cat([attended(loaded, case, slice(row, row + 1)) for row in range(len(CONTEXTS))])
    try:
        torch.set_num_threads(3 if threads == 1 else 1)
        otherwise = attended(loaded, case)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(together, alone)
    assert torch.equal(together, otherwise)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_alone_attend_to_what_is_in_the_pages_and_write_nothing(
    loaded: ctypes.CDLL, dtype: torch.dtype
) -> None:
    case = random_case(dtype, 64, (6, 2), 16, learnt="norms before")
    first, written = attended(loaded, case), case.pool.clone()
    assert torch.equal(attended(loaded, case, by_q_alone=True), first)
    assert torch.equal(case.pool.nan_to_num(9.0), written.nan_to_num(9.0))


def test_other_numbers_of_heads_are_refused(loaded: ctypes.CDLL) -> None:
    case = random_case(torch.float32, 64, (6, 2), 16)
    paged = PagedAttention(case.pool, 6)
    paged.plan([case.cos_sin], case.targets, case.rows)
    for num_heads in (5, 7, 8, 9, 11):
        with pytest.raises(ValueError, match=f"qkv must have 10 heads, got {num_heads}"):
            paged.run(Immediate(loaded), LAYER, torch.zeros(len(case.qkv), num_heads, 64))


def test_only_the_slots_of_the_tokens_are_written(loaded: ctypes.CDLL) -> None:
    case = random_case(torch.float32, 64, (6, 2), 16)
    case.pool[case.pool.isnan()] = 9.0
    before = case.pool.clone()
    attended(loaded, case)
    changed = (case.pool != before).any(-1).nonzero()
    assert {(page, layer, slot) for page, layer, _, _, slot in changed.tolist()} == {
        (page, LAYER, slot) for page, slot in case.targets.tolist()
    }


def test_what_does_not_fit_is_refused_by_name(loaded: ctypes.CDLL) -> None:
    case = random_case(torch.float32, 64, (6, 2), 16)
    paged = PagedAttention(case.pool, 6)
    paged.plan([case.cos_sin], case.targets, case.rows)
    calls = Immediate(loaded)
    short = Rows(case.rows.page_table[:, :2], case.rows.begins, case.rows.ends)
    empty = Rows(case.rows.page_table, case.rows.ends, case.rows.ends)
    ones, wide = torch.ones(64), torch.ones(128)[::2]

    def given(norms: QkNorm | None, sinks: Tensor | None = None) -> Tensor:
        return paged.run(calls, LAYER, case.qkv, HeadWeights(norms, sinks))

    for bad, message in (
        (lambda: PagedAttention(case.pool.transpose(3, 4), 2), "pool must have contiguous rows"),
        (lambda: PagedAttention(case.pool.transpose(0, 1), 6), "pool must have pages that lie"),
        (lambda: PagedAttention(case.pool[:1].expand(3, -1, -1, -1, -1, -1), 6), "pool must have pages that lie"),
        (lambda: PagedAttention(case.pool[:, :, :, :1].expand(-1, -1, -1, 2, -1, -1), 6), "and runs in them"),
        (lambda: PagedAttention(case.pool, 5), "num_heads must be a multiple of 2"),
        (lambda: PagedAttention(case.pool[..., :63].contiguous(), 6), "head_dim must be"),
        (lambda: paged.plan([case.cos_sin], case.targets, short), "page_table must be"),
        (lambda: paged.plan([case.cos_sin], case.targets, empty), "kv_lens must count"),
        (lambda: paged.plan([case.cos_sin[:1]], case.targets, case.rows), "cos_sin must have"),
        (lambda: paged.run(calls, LAYER, case.qkv.double()), "qkv must be one of"),
        (lambda: paged.run(calls, NUM_LAYERS, case.qkv), "layer must be below 2"),
        (lambda: paged.run(calls, LAYER, case.qkv, rope=1), "rope must be below 1"),
        (lambda: paged.run(calls, LAYER, case.qkv[:3]), f"qkv must be of {len(CONTEXTS)} tokens"),
        (lambda: given(QkNorm(ones, ones[:63], EPS)), "k_norm must have shape"),
        (lambda: given(QkNorm(ones.bfloat16(), ones, EPS)), "q_norm must be one of"),
        (lambda: given(QkNorm(ones, wide, EPS)), "k_norm must have stride 1"),
        (lambda: given(None, ones[:5]), "sinks must have shape"),
        (lambda: given(None, ones[:6].double()), "sinks must be one of"),
    ):
        with pytest.raises(ValueError, match=message):
            bad()
    assert not serves(20, torch.float32)
    assert not serves(64, torch.float16)
