"""The items of a plan cover each query's keys once, and no others."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.kernels.attention_plan import Cutting, WorkPlan, pages_in_use, split_work

PAGE_SIZE = 64
LENS = st.lists(st.tuples(st.integers(1, 90), st.integers(0, 3000)), min_size=1, max_size=6)


def cut(lens: list[tuple[int, int]], cutting: Cutting) -> WorkPlan:
    query_lens = np.array([query for query, _ in lens])
    return split_work(query_lens, query_lens + np.array([before for _, before in lens]), cutting)


def keys_seen(plan: WorkPlan, num_queries: int, longest: int) -> np.ndarray:
    """Count how often each (query, key) pair is in an item."""
    seen = np.zeros((num_queries, longest), dtype=np.int64)
    for _, q_start, q_count, _, begin, end, _, _ in plan.items:
        seen[q_start : q_start + q_count, begin:end] += 1
    return seen


@settings(max_examples=60, deadline=None)
@given(LENS, st.sampled_from([1, 4, 16]), st.sampled_from([1, 40, 700]), st.sampled_from([None, 1, 100, 5000]))
def test_every_visible_key_of_every_query_is_in_exactly_one_item(
    lens: list[tuple[int, int]], tokens_per_item: int, slots: int, window: int | None
) -> None:
    plan = cut(lens, Cutting(tokens_per_item, 32, 2, slots, PAGE_SIZE, window))
    seen = keys_seen(plan, sum(query for query, _ in lens), 3100)
    start = 0
    for query_len, before in lens:
        for offset in range(query_len):
            position = before + offset
            oldest = 0 if window is None else max(0, position - window + 1)
            assert (seen[start + offset, oldest : position + 1] == 1).all()
        start += query_len
    assert seen.max() == 1


@settings(max_examples=60, deadline=None)
@given(LENS, st.sampled_from([40, 700]), st.sampled_from([None, 0, 5, 300]))
def test_each_split_item_has_its_own_partial_and_each_combine_names_them_all(
    lens: list[tuple[int, int]], slots: int, max_partials: int | None
) -> None:
    plan = cut(lens, Cutting(4, 32, 1, slots, PAGE_SIZE, max_partials=max_partials))
    used = sorted(int(item[6]) for item in plan.items if item[7] > 1)
    assert used == list(range(plan.num_partials))
    assert max_partials is None or plan.num_partials <= max_partials
    named = [first + part for _, _, first, count in plan.combines for part in range(count)]
    assert sorted(named) == used


def test_keys_are_split_when_a_few_items_would_leave_the_chip_idle() -> None:
    few = cut([(256, 131072 - 256)], Cutting(16, 64, 1, 132, PAGE_SIZE))
    assert 120 <= len(few.items) <= 132


def test_keys_are_not_split_when_items_fill_the_chip() -> None:
    full = cut([(1, 8191)] * 32, Cutting(1, 64, 8, 264, PAGE_SIZE))
    assert len(full.items) == 32
    assert full.num_partials == 0


def test_a_captured_plan_never_has_more_items_than_its_grid() -> None:
    plan = cut([(1, 131071)] * 3, Cutting(1, 64, 1, 264, PAGE_SIZE, max_items=20))
    assert len(plan.items) <= 20


def test_the_longest_items_come_first() -> None:
    plan = cut([(80, 500), (3, 7)], Cutting(4, 32, 2, 40, PAGE_SIZE))
    spans = [int(end - begin) for *_, begin, end, _, _ in plan.items]
    assert spans == sorted(spans, reverse=True)


@settings(max_examples=60, deadline=None)
@given(LENS, st.integers(0, 4))
def test_an_item_begins_at_its_own_sequences_pages_of_those_in_use(lens: list[tuple[int, int]], unused: int) -> None:
    kv_lens = np.array([query + before for query, before in lens])
    counts = -(-kv_lens // PAGE_SIZE)
    table = 1000 * np.arange(len(lens))[:, None] + np.arange(counts.max() + unused)
    pages = pages_in_use(table, kv_lens, PAGE_SIZE)
    assert pages.tolist() == [1000 * seq + page for seq, n in enumerate(counts) for page in range(n)]
    first_queries = np.cumsum([0, *(query for query, _ in lens)])
    for first_page, q_start, *_ in cut(lens, Cutting(16, 32, 2, 40, PAGE_SIZE)).items:
        assert pages[first_page] == 1000 * (np.searchsorted(first_queries, q_start, side="right") - 1)
