"""Prefill and decode agree with attention in float64, whatever the shapes, and touch nothing that is not theirs.

Unused pages and slots hold NaN and so does the output beforehand: a masked key too many or a row forgotten shows.
"""

import itertools
import math
import os

import gpu_problem as problem
import numpy as np
import pytest
import torch
from gpu_problem import Lens, Problem
from long_cases import long, long_but

from pdserve.kernels.attention import PagedAttention, StepSize
from pdserve.kernels.tuning import Tile

TOLERANCE = {torch.bfloat16: 7.5e-3, torch.float16: 1.5e-3, torch.float32: 1e-5}
SMALL = Tile(32, 32, 4, 2)  # many tile edges in few keys
EXHAUSTIVE = os.environ.get("PDSERVE_KERNEL_GRID") == "full"
HEADS = [(4, 4), (8, 2), (8, 1), (9, 3)]
IN_EACH_RUN = [((4, 4), 16), ((8, 1), 128), ((9, 3), 16)]  # all of both
HEADS_AND_PAGES = long_but(IN_EACH_RUN, itertools.product(HEADS, (16, 64, 128, 384)))
HEAD_DIMS = [64, 80, 96, 128, 256]
DEEPSEEK = (512, 64)  # features of a latent, and of the key that turns
LATENTS_IN_EACH_RUN = [((24, 8), torch.float32), ((40, 8), torch.float16), ((256, 32), torch.bfloat16)]
LONG = pytest.mark.long


def prefill_error(case: Problem, tile: Tile | None = SMALL) -> float:
    attention = PagedAttention(case.spec, "cpu", tile=tile)
    attention.plan(*case.lens.arrays, case.page_table)
    out = case.unwritten(len(case.q))
    attention.run(case.q, *case.pages, out=out, sinks=case.sinks)
    return case.error(out)


def decode_error(case: Problem, tile: Tile | None = None) -> float:
    query_lens, kv_lens = case.lens.arrays
    size = StepSize(len(kv_lens) + 1, int(kv_lens.max()) + 9)
    attention = PagedAttention(case.spec, "cpu", size, tile=tile)
    attention.plan(query_lens, kv_lens, case.page_table)
    q = torch.full((size.max_seqs, *case.q.shape[1:]), torch.nan, dtype=case.q.dtype)
    q[: len(case.q)] = case.q
    out = case.unwritten(len(q))
    attention.run(q, *case.pages, out=out, sinks=case.sinks)
    assert out[len(case.q) :].isnan().all(), "rows of no sequence were written"
    return case.error(out)


def make(heads: tuple[int, int], head_dim: int, page_size: int, lens: Lens, **fields: object) -> Problem:
    return problem.make(problem.spec_of(heads, head_dim, page_size, lens, **fields), lens)


def edge_lens(page_size: int) -> list[int]:
    return [1, page_size - 1, page_size, page_size + 1, 2 * page_size + 3]


@pytest.mark.parametrize(("heads", "page_size"), HEADS_AND_PAGES)
def test_a_ragged_batch_of_chunks_is_right_at_every_page_edge(heads: tuple[int, int], page_size: int) -> None:
    kv = edge_lens(page_size)
    lens = Lens((1, page_size - 1, 5, 2, 17), tuple(kv))
    assert prefill_error(make(heads, 64, page_size, lens)) <= 7.5e-3


@pytest.mark.parametrize(("heads", "page_size"), HEADS_AND_PAGES)
def test_a_ragged_batch_of_decodes_is_right_at_every_page_edge(heads: tuple[int, int], page_size: int) -> None:
    kv = edge_lens(page_size)
    assert decode_error(make(heads, 64, page_size, Lens((1,) * len(kv), tuple(kv)))) <= 7.5e-3


@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    [
        pytest.param(*case, marks=() if case[0] is torch.bfloat16 or case[1] == 64 else pytest.mark.long)
        for case in itertools.product(TOLERANCE, HEAD_DIMS)
    ],
)
def test_every_head_dim_is_right(head_dim: int, dtype: torch.dtype) -> None:
    lens = Lens((20, 1), (70, 33))
    assert prefill_error(make((4, 2), head_dim, 32, lens, dtype=dtype)) <= TOLERANCE[dtype]
    assert decode_error(make((4, 2), head_dim, 32, Lens((1, 1), (70, 33)), dtype=dtype)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("soft_cap", [pytest.param(0.5, marks=LONG), 2.0, pytest.param(50.0, marks=LONG)])
@pytest.mark.parametrize("window", [None, 33])
def test_scores_keep_below_their_cap_on_devices(soft_cap: float, window: int | None) -> None:
    fields = {"window": window, "soft_cap": soft_cap}
    assert prefill_error(make((4, 2), 64, 32, Lens((20, 1), (70, 33)), **fields)) <= 7.5e-3
    assert decode_error(make((4, 2), 64, 32, Lens((1, 1), (150, 90)), **fields)) <= 7.5e-3


@pytest.mark.parametrize("window", [None, 33])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_a_sink_takes_its_share_of_the_weights(window: int | None, soft_cap: float | None) -> None:
    fields = {"window": window, "soft_cap": soft_cap, "has_sinks": True}
    assert prefill_error(make((4, 2), 64, 32, Lens((20, 1), (70, 33)), **fields)) <= 7.5e-3
    assert decode_error(make((6, 2), 64, 32, Lens((1, 1), (150, 90)), **fields)) <= 7.5e-3


@pytest.mark.parametrize("window", [1, 32, 33, *(pytest.param(each, marks=LONG) for each in (31, 70, 500))])
def test_a_window_hides_older_keys(window: int) -> None:
    lens = Lens((40, 3), (150, 90))
    assert prefill_error(make((4, 2), 64, 32, lens, window=window)) <= 7.5e-3
    assert decode_error(make((4, 2), 64, 32, Lens((1, 1), (150, 90)), window=window)) <= 7.5e-3


@pytest.mark.parametrize("kv_len", [2048, *long(3001)])
def test_keys_split_over_items_combine_to_the_whole(kv_len: int) -> None:
    case = make((8, 1), 64, 64, Lens((4, 1), (kv_len, 70)), has_sinks=True)
    attention = PagedAttention(case.spec, "cpu", tile=SMALL)
    attention.plan(*case.lens.arrays, case.page_table)
    out = case.unwritten(len(case.q))
    attention.run(case.q, *case.pages, out=out, sinks=case.sinks)
    assert case.error(out) <= 7.5e-3
    case = make((8, 1), 64, 64, Lens((1, 1), (kv_len, 70)), dtype=torch.float32, has_sinks=True)
    assert decode_error(case) <= 1e-5


def latents(num_heads: int, widths: tuple[int, int], page_size: int, lens: Lens, **fields: object) -> Problem:
    """Make a problem of latent rows. widths: of values, and of what is in keys alone."""
    return make((num_heads, 1), sum(widths), page_size, lens, value_dim=widths[0], **fields)


@pytest.mark.parametrize(
    ("num_heads", "page_size"), long_but(((16, 16),), itertools.product((1, 16, 20, 128), (16, 64, 128)))
)
def test_latent_rows_are_keys_and_values_of_all_heads(num_heads: int, page_size: int) -> None:
    kv = edge_lens(page_size)
    chunks = Lens((1, page_size - 1, 5, 2, 17), tuple(kv))
    assert prefill_error(latents(num_heads, DEEPSEEK, page_size, chunks), tile=None) <= 7.5e-3
    assert decode_error(latents(num_heads, DEEPSEEK, page_size, Lens((1,) * len(kv), tuple(kv)))) <= 7.5e-3


@pytest.mark.parametrize(
    ("widths", "dtype"),
    [
        pytest.param(*case, marks=() if case in LATENTS_IN_EACH_RUN else LONG)
        for case in itertools.product(((24, 8), (40, 8), (256, 32), DEEPSEEK), TOLERANCE)
    ],
)
def test_latent_rows_of_every_width_are_right(widths: tuple[int, int], dtype: torch.dtype) -> None:
    chunks, singles = Lens((20, 1, 4), (70, 33, 50)), Lens((1, 1), (70, 33))
    assert prefill_error(latents(6, widths, 32, chunks, dtype=dtype), tile=None) <= TOLERANCE[dtype]
    assert decode_error(latents(6, widths, 32, singles, dtype=dtype)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("num_heads", [20, pytest.param(128, marks=LONG)])
def test_heads_that_fit_no_tile_are_divided_among_several(num_heads: int) -> None:
    tile = Tile(16, 32, 4, 1)
    assert prefill_error(latents(num_heads, (64, 16), 32, Lens((3, 1), (40, 17))), tile) <= 7.5e-3
    assert decode_error(latents(num_heads, (64, 16), 32, Lens((1, 1), (40, 17))), tile) <= 7.5e-3


@pytest.mark.long
@pytest.mark.parametrize("num_heads", [16, 128])
def test_latent_rows_split_over_items_combine_to_the_whole(num_heads: int) -> None:
    assert prefill_error(latents(num_heads, DEEPSEEK, 64, Lens((4, 1), (2048, 70))), tile=None) <= 7.5e-3
    assert decode_error(latents(num_heads, DEEPSEEK, 64, Lens((1, 1), (2048, 70)))) <= 7.5e-3


@pytest.mark.parametrize("head_dim", [64, pytest.param(128, marks=LONG), 256])
def test_the_shipping_tiles_are_right(head_dim: int) -> None:
    assert prefill_error(make((8, 1), head_dim, 64, Lens((37, 3), (300, 129))), tile=None) <= 7.5e-3
    assert decode_error(make((8, 1), head_dim, 64, Lens((1, 1), (300, 129)))) <= 7.5e-3


def test_one_plan_serves_every_layer_and_the_next_plan_replaces_it() -> None:
    first, second = make((4, 2), 64, 16, Lens((1, 1), (40, 17))), make((4, 2), 64, 16, Lens((1, 1), (40, 17)))
    attention = PagedAttention(first.spec, "cpu", StepSize(4, 64))
    q = torch.zeros((4, 4, 64), dtype=torch.bfloat16)
    q[:2] = first.q
    attention.plan(np.array([1] * 4), np.array([3] * 4), np.zeros((4, 1), dtype=np.int32))
    for case in (first, second):
        attention.plan(*case.lens.arrays, case.page_table)
        for _ in range(2):
            assert case.error(attention.run(q, *case.pages)) <= 7.5e-3


@pytest.mark.parametrize(
    ("unused", "page_size", "window"),
    [
        pytest.param(*case, marks=() if case in ((math.inf, 16, 20), (-math.inf, 64, None)) else LONG)
        for case in itertools.product((math.inf, -math.inf), (16, 64), (None, 20))
    ],
)
def test_infinities_left_in_unused_slots_do_not_show(unused: float, page_size: int, window: int | None) -> None:
    kv = (3, page_size + 5, 150)
    for query, error in (((1, 5, 1), prefill_error), ((1, 1, 1), decode_error)):
        lens = Lens(query, kv)
        spec = problem.spec_of((4, 2), 64, page_size, lens, dtype=torch.float16, window=window)
        assert error(problem.make(spec, lens, unused=unused)) <= TOLERANCE[torch.float16]


@pytest.mark.slow
@pytest.mark.skipif(not EXHAUSTIVE, reason="set PDSERVE_KERNEL_GRID=full")
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
@pytest.mark.parametrize("window", [None, 50])
def test_the_whole_grid_is_right(heads: tuple[int, int], head_dim: int, page_size: int, window: int | None) -> None:
    kv = tuple(edge_lens(page_size))
    prefill_case = make(heads, head_dim, page_size, Lens((1, page_size - 1, 5, 2, 17), kv), window=window)
    assert prefill_error(prefill_case) <= 7.5e-3
    assert decode_error(make(heads, head_dim, page_size, Lens((1,) * 5, kv), window=window)) <= 7.5e-3


CODES = ["int8", "fp8_e4m3"]


@pytest.mark.parametrize("code", CODES)
def test_coded_rows_go_with_windows_caps_and_sinks(code: str) -> None:
    fields = {"dtype": torch.float32, "window": 20, "soft_cap": 5.0, "has_sinks": True, "code": code}
    assert prefill_error(make((4, 2), 64, 16, Lens((3, 20), (3, 70)), **fields)) <= 1e-5
    assert decode_error(make((4, 2), 64, 16, Lens((1, 1), (3, 70)), **fields)) <= 1e-5


@pytest.mark.parametrize("code", [pytest.param("int8", marks=LONG), "fp8_e4m3"])
@pytest.mark.parametrize(
    ("heads", "head_dim", "page_size"), [((9, 3), 80, 16), *long(((4, 4), 64, 16), ((8, 1), 128, 64))]
)
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=LONG), pytest.param(torch.float16, marks=LONG)]
)
def test_coded_rows_are_attended_to_as_what_they_stand_for(
    heads: tuple[int, int], head_dim: int, page_size: int, dtype: torch.dtype, code: str
) -> None:
    tolerance = TOLERANCE[torch.float32 if dtype == torch.float32 else torch.bfloat16]  # the type of weights for values
    kv = tuple(edge_lens(page_size))
    lens = Lens((1, page_size - 1, 5, 2, 17), kv)
    assert prefill_error(make(heads, head_dim, page_size, lens, dtype=dtype, code=code)) <= tolerance
    single = Lens((1,) * len(kv), kv)
    assert decode_error(make(heads, head_dim, page_size, single, dtype=dtype, code=code)) <= tolerance
