"""Layers whose KV lies in several groups of pages: which pages hold what, which are given up, and which are found."""

import pytest
from group_engine import SHAPES, VOCAB, WINDOW, Engine
from hypothesis import given
from hypothesis import strategies as st

from pdserve.base.errors import ConfigError, InvariantError
from pdserve.base.ids import PageId
from pdserve.engine import scheduler
from pdserve.engine.kvcache import KvCache, Prefix
from pdserve.protocol.page_tables import PageTables
from pdserve.protocol.paging import PageOrder, PageShape, Paging
from pdserve.protocol.prefix_hash import EVERYONE, PrefixHasher

sizes = st.sampled_from((1, 2, 4))
pagings = st.builds(
    lambda first, others: Paging((PageShape(first), *others)),
    sizes,
    st.lists(st.builds(PageShape, sizes, st.none() | st.integers(1, 12)), max_size=3),
)


def test_a_page_size_that_does_not_divide_the_largest_is_refused() -> None:
    with pytest.raises(ConfigError, match="page_size"):
        Paging((PageShape(4), PageShape(3)))


def test_a_window_in_the_first_group_is_refused() -> None:
    with pytest.raises(ConfigError, match="window"):
        Paging((PageShape(4, window=8), PageShape(4)))


@given(pagings, st.integers(0, 40), st.integers(0, 12), st.integers(0, 40))
def test_an_order_names_each_page_that_is_needed_once_and_a_shorter_prefix_first(
    paging: Paging, num_known: int, num_spans: int, more: int
) -> None:
    order, start = PageOrder(paging, num_known), num_spans * paging.span
    stop = start + more
    named = order.pages(0, stop)
    assert order.pages(0, start) + order.pages(start, stop) == named
    assert len(named) == order.count(stop) == len(set(named))
    wanted = {
        (group, position // shape.page_size)
        for group, shape in enumerate(paging.shapes)
        for position in range(stop)
        if position // shape.page_size >= paging.first_needed(group, num_known)
    }
    assert set(named) == wanted
    assert order.num_tokens(len(named)) >= stop
    assert order.count(order.num_tokens(len(named))) <= len(named) < order.count(order.num_tokens(len(named)) + 1)


@given(pagings, st.integers(0, 60))
def test_a_page_is_needed_as_long_as_the_next_query_sees_one_of_its_tokens(paging: Paging, position: int) -> None:
    for group, (size, window) in enumerate((shape.page_size, shape.window) for shape in paging.shapes):
        seen = range(0 if window is None else max(0, position - window + 1), position + 1)
        assert paging.first_needed(group, position) == seen.start // size


def test_pages_behind_a_window_are_given_up_while_the_sequence_goes_on() -> None:
    engine = Engine()
    sequence = engine.add([1, 2, 3], max_tokens=50)
    while sequence.num_output_tokens < 45:
        engine.step()
        pages, window = sequence.pages.runs if sequence.pages else ([], [])
        assert len(pages) == -(-sequence.computed // 4)
        assert len(window) <= WINDOW // 2 + 4  # those of the window, a begun one, and a span that is not indexed yet
    assert engine.cache.pool.num_held == len(sequence.pages.held)


def test_a_prefix_is_reused_with_the_pages_of_its_window_alone() -> None:
    engine = Engine()
    prompt = list(range(24))
    engine.answer(prompt, 3)
    sequence = engine.add([*prompt, 77], max_tokens=2)
    engine.step()
    assert sequence.num_cached_tokens == 24
    assert sequence.pages.firsts == [0, (24 - WINDOW + 1) // 2]


def test_pages_that_are_not_indexed_yet_are_kept_until_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "_PUBLISHED_AT_ONCE", 4)
    engine = Engine(60, PageShape(1, window=2))
    prompt = list(range(22))  # computed 8 tokens at a time, then one by one
    engine.answer(prompt, 12)
    for length in (4, 8, 12, 16, 20):
        sequence = engine.add([*prompt[:length], 77], max_tokens=1)
        engine.step()
        assert sequence.num_cached_tokens == length


@given(st.lists(st.integers(0, 23), max_size=30), st.integers(1, 6))
def test_a_hit_is_the_longest_prefix_whose_needed_pages_are_there_in_every_group(
    lost: list[int], num_spans: int
) -> None:
    paging = Paging(SHAPES)
    cache, prefix = KvCache(64, paging, PrefixHasher(b"secret", "model", 4)), Prefix(range(4 * num_spans), EVERYONE)
    order = PageOrder(paging, 0)
    tables = PageTables(([], []))
    tables.add(order, cache.take(order.count(4 * num_spans)) or (), 0, 4 * num_spans)
    cache.publish(prefix, tables, range(num_spans))
    pages = tables.held
    gone = {pages[place % len(pages)] for place in lost}
    cache.pool.release(tuple(page for page in pages if page in gone))
    rest = cache.take(cache.pool.num_free)  # so that the pages of `gone` hold something else
    assert rest is not None
    assert gone <= set(rest)
    present = [set(tables.runs[0]) - gone, set(tables.runs[1]) - gone]

    def is_there(length: int) -> bool:
        """Whether all spans of a prefix that its next query sees are whole in each group."""
        full = all(tables.find(0, number) in present[0] for number in range(length))
        first = paging.first_needed(1, 4 * length) * 2 // 4
        return full and all(tables.find(1, number) in present[1] for number in range(2 * first, 2 * length))

    hit = cache.reuse(prefix, num_spans)
    assert hit.num_spans == max(length for length in range(num_spans + 1) if is_there(length))
    assert [hit.pages.find(0, number) for number in range(hit.num_spans)] == tables.runs[0][: hit.num_spans]
    for number in range(paging.first_needed(1, 4 * hit.num_spans), 2 * hit.num_spans):
        assert hit.pages.find(1, number) == tables.find(1, number)
    cache.check()


def test_a_span_that_has_left_its_window_is_indexed_in_the_other_groups() -> None:
    cache, prefix = KvCache(16, Paging(SHAPES), PrefixHasher(b"secret", "model", 4)), Prefix(range(8), EVERYONE)
    tables = PageTables(([PageId(0), PageId(1)], [PageId(4), PageId(5)]), [0, 2])
    assert cache.take(8) is not None
    cache.publish(prefix, tables, range(2))
    found = {(group, pages) for group, _, pages in cache.indexed}
    assert found == {(0, (0,)), (0, (1,)), (1, (4, 5))}
    assert cache.reuse(prefix, 2).num_spans == 0, "a query at position 8 sees token 3, whose page is not there"


@pytest.mark.parametrize("num_known", [9, 12, 13])
def test_a_hand_off_needs_no_snapshot_before_the_one_that_it_brings(num_known: int) -> None:
    cache = KvCache(16, Paging((PageShape(4), STATE)), PrefixHasher(b"secret", "model", 4))
    prefix, pages, num_spans = Prefix(range(16), EVERYONE), cache.take(4), (num_known - 1) // 4
    assert pages is not None
    cache.publish(prefix, PageTables((list(pages[:3]), [pages[3]]), [0, 2]), range(3))
    assert cache.reuse(prefix, 2).num_spans == 0, "a prompt goes on from the state at its end"
    hit = cache.reuse(prefix, num_spans, num_known)
    assert (hit.num_spans, hit.pages.held, hit.pages.firsts) == (num_spans, pages[:num_spans], [0, num_spans])


@pytest.mark.parametrize("length", range(1, 20))
def test_text_is_the_same_whether_a_prefix_is_cached_or_not(length: int) -> None:
    engine = Engine()
    prompt = [3 * i % VOCAB for i in range(length)]
    for _ in range(3):
        engine.answer(prompt, 9)


def test_pages_that_do_not_follow_those_before_are_not_taken_for_others() -> None:
    order, tables = PageOrder(Paging(SHAPES), 20), PageTables(([], [PageId(9)]))
    with pytest.raises(InvariantError, match="group 1"):
        tables.add(order, tuple(map(PageId, range(order.count(24)))), 0, 24)


STATE = PageShape(4, window=2, is_state=True)
prompts = st.lists(st.integers(1, 30), min_size=1, max_size=5)


@given(prompts, st.integers(24, 40), st.integers(1, 3), st.booleans())
def test_states_give_the_same_text_however_few_pages_there_are_and_whatever_is_cached(
    lengths: list[int], num_pages: int, num_chunk_spans: int, ahead: bool
) -> None:
    """Sequences are preempted, prefixes are found again, and steps are planned ahead."""
    engine = Engine(num_pages, STATE, step_tokens=4 * num_chunk_spans - 1, ahead=ahead)
    for _ in range(2):
        for length in lengths:
            engine.add([3 * i % VOCAB for i in range(length)], max_tokens=9)
        engine.finish()


def test_a_state_takes_one_page_and_one_more_while_it_passes_the_end_of_a_span() -> None:
    engine = Engine(60, STATE)
    sequence = engine.add([1, 2, 3], max_tokens=50)
    while sequence.num_output_tokens < 45:
        engine.step()
        if sequence.pages:
            assert len(sequence.pages.runs[1]) <= 2
            assert sequence.pages.find(1, (sequence.computed - 1) // 4) is not None


def test_a_prefix_goes_on_from_the_snapshot_at_its_end() -> None:
    engine = Engine(40, STATE)
    prompt = list(range(24))
    engine.answer(prompt, 3)
    sequence = engine.add([*prompt[:16], 77, 78], max_tokens=2)
    engine.step()
    assert sequence.num_cached_tokens == 16
    assert sequence.pages.firsts == [0, 3]
    engine.finish()


@pytest.mark.parametrize(("num_tokens", "num_pages"), [(1, 2), (4, 2), (5, 3), (400, 101)])
def test_pages_of_states_are_counted_whole_where_workers_are_compared(num_tokens: int, num_pages: int) -> None:
    paging = Paging((PageShape(4), STATE))
    assert paging.mean_pages(3 * num_tokens, 3) == 3 * num_pages
    assert paging.sent_pages(num_tokens) == num_pages
    assert paging.whole_tokens(10) == 40
