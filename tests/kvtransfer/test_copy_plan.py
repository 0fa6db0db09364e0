"""Planned copies do what copying element by element does, between any two layouts."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.errors import InvariantError
from pdserve.ids import PageId
from pdserve.kvlayout import KvLayout
from pdserve.kvtransfer.plan import Part, Runs, plan, refusal, unplannable

LAYOUT = KvLayout("weights", 2, 4, 8, 16, "bfloat16")
POOL = 40  # pages of either side


def part(layout: KvLayout, pages: list[int], first_token: int = 0) -> Part:
    return Part(layout, tuple(map(PageId, pages)), first_token)


def pool(layout: KvLayout, fill: str) -> torch.Tensor:
    shape = (POOL, layout.num_layers, 2, layout.num_kv_heads, layout.page_size, layout.head_dim)
    if fill == "sevens":
        return torch.full(shape, 7.0, dtype=torch.bfloat16)
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)


def memory(pages: torch.Tensor) -> np.ndarray:
    return pages.view(torch.uint8).numpy().reshape(-1)


def carry_out(runs: Runs, source: torch.Tensor, target: torch.Tensor) -> None:
    here, there = memory(source), memory(target)
    for at, to, length in zip(runs.source, runs.target, runs.length, strict=True):
        there[to : to + length] = here[at : at + length]


def first_head(layout: KvLayout) -> int:
    return layout.tp_rank * layout.num_kv_heads


def copy_naively(source: Part, target: Part, tokens: range, pools: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Copy token by token and head by head, each head known by its number among all ranks'."""
    out_of, into = pools
    for token in tokens:
        page, slot = divmod(token - source.first_token, source.layout.page_size)
        to_page, to_slot = divmod(token - target.first_token, target.layout.page_size)
        for head in range(source.layout.num_kv_heads):
            to_head = first_head(source.layout) + head - first_head(target.layout)
            if 0 <= to_head < target.layout.num_kv_heads:
                values = out_of[source.pages[page], :, :, head, slot]
                into[target.pages[to_page], :, :, to_head, to_slot] = values


def forget_unused_slots(target: Part, tokens: range, pages: torch.Tensor) -> None:
    """Zero the slots of the target's pages past the last token."""
    for token in range(tokens.stop, target.tokens.stop):
        page, slot = divmod(token - target.first_token, target.layout.page_size)
        pages[target.pages[page], :, :, :, slot] = 0


@st.composite
def layouts(draw: st.DrawFn) -> KvLayout:
    tp_size = draw(st.sampled_from([1, 2, 4]))
    page_size, rank = draw(st.sampled_from([1, 4, 6, 16, 32])), draw(st.integers(0, tp_size - 1))
    return KvLayout("weights", 2, 4 // tp_size, 8, page_size, "bfloat16", tp_size, rank)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Part, Part, range]:
    """Two parts in any layouts and any pages, and tokens that both hold, to the last."""
    source, target = draw(layouts()), draw(layouts())
    stop = draw(st.integers(1, min(POOL, 4 * max(source.page_size, target.page_size), POOL * source.page_size)))
    stop = min(stop, POOL * min(source.page_size, target.page_size))
    first_page = draw(st.integers(0, (stop - 1) // target.page_size))
    begin = first_page * target.page_size
    start = draw(st.integers(begin, stop - 1))
    from_page = draw(st.integers(0, start // source.page_size))
    order = st.permutations(range(POOL))
    return (
        part(source, draw(order)[: source.num_pages(stop) - from_page], from_page * source.page_size),
        part(target, draw(order)[: target.num_pages(stop) - first_page], begin),
        range(start, stop),
    )


@settings(max_examples=150, deadline=None)
@given(cases())
def test_the_planned_copies_do_what_a_naive_copier_does(case: tuple[Part, Part, range]) -> None:
    source, target, tokens = case
    planned = plan(source, target, tokens)
    assert isinstance(planned, Runs)
    here = pool(source.layout, "random")
    got, want = pool(target.layout, "sevens"), pool(target.layout, "sevens")
    carry_out(planned, here, got)
    copy_naively(source, target, tokens, (here, want))
    forget_unused_slots(target, tokens, got)
    forget_unused_slots(target, tokens, want)
    assert torch.equal(got, want)


@given(cases())
def test_no_two_runs_that_follow_each_other_could_be_one(case: tuple[Part, Part, range]) -> None:
    planned = plan(*case)
    assert isinstance(planned, Runs)
    runs = planned
    ends = runs.source + runs.length, runs.target + runs.length
    follows = (ends[0][:-1] == runs.source[1:]) & (ends[1][:-1] == runs.target[1:])
    assert not follows.any()
    assert (runs.length > 0).all()


def test_equal_layouts_are_copied_page_by_page_and_neighbours_at_once() -> None:
    planned = plan(part(LAYOUT, [3, 4, 5, 9]), part(LAYOUT, [7, 8, 2, 3]), range(50))
    assert isinstance(planned, Runs)
    size = LAYOUT.page_bytes
    assert planned.source.tolist() == [3 * size, 5 * size, 9 * size]
    assert planned.target.tolist() == [7 * size, 2 * size, 3 * size]
    assert planned.length.tolist() == [2 * size, size, size]


def test_another_degree_of_tensor_parallelism_takes_one_run_for_keys_and_one_for_values_of_each_layer() -> None:
    half = replace(LAYOUT, num_kv_heads=2, tp_size=2, tp_rank=1)
    planned = plan(part(LAYOUT, [0]), part(half, [0]), range(16))
    assert isinstance(planned, Runs)
    assert len(planned) == 2 * LAYOUT.num_layers
    assert planned.length.tolist() == [half.page_bytes // 4] * 4


def test_ranks_without_a_common_head_have_nothing_to_copy() -> None:
    first, second = (replace(LAYOUT, num_kv_heads=2, tp_size=2, tp_rank=rank) for rank in (0, 1))
    planned = plan(part(first, [0]), part(second, [0]), range(16))
    assert isinstance(planned, Runs)
    assert len(planned) == 0


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (replace(LAYOUT, weights_hash="others"), "weights_hash: weights != others"),
        (replace(LAYOUT, num_layers=3), "num_layers: 2 != 3"),
        (replace(LAYOUT, head_dim=16), "head_dim: 8 != 16"),
        (replace(LAYOUT, num_kv_heads=2), "num_kv_heads of all ranks: 4 != 2"),
        (replace(LAYOUT, dtype="float16"), "dtype: bfloat16 != float16"),
    ],
)
def test_what_makes_pages_useless_to_another_worker_is_named(other: KvLayout, reason: str) -> None:
    assert (unplannable(LAYOUT, other) or "").startswith(reason)
    assert plan(part(LAYOUT, [0]), part(other, [0]), range(4)) == unplannable(LAYOUT, other)


def test_movers_serve_equal_layouts_alone_and_say_what_could_be_planned() -> None:
    assert refusal(LAYOUT, LAYOUT) is None
    assert refusal(LAYOUT, replace(LAYOUT, head_dim=16)) == "head_dim: 8 != 16"
    other = replace(LAYOUT, page_size=32)
    assert refusal(LAYOUT, other) == "page_size: 16 != 32, and movers write whole pages alone"


@pytest.mark.parametrize("tokens", [range(17), range(8, 40), range(0, 16, 2)])
def test_tokens_outside_of_the_pages_are_our_own_mistake(tokens: range) -> None:
    with pytest.raises(InvariantError, match="is not within the pages"):
        plan(part(LAYOUT, [0]), part(LAYOUT, [0, 1]), tokens)
