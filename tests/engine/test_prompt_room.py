"""Pages of prompts whose layers have windows: they leave while chunks are computed, and every prompt ends."""

from math import ceil

import pytest
from group_engine import PAGE_SIZE, SHAPES, Engine
from hypothesis import given
from hypothesis import strategies as st

from pdserve.engine.prompt_room import PromptRoom
from pdserve.protocol.page_tables import Pages
from pdserve.protocol.paging import PageShape, Paging

OTHERS = ((PageShape(2, window=6),), (PageShape(4, window=3), PageShape(2)), (PageShape(1, 1), PageShape(2, 9)))
others = st.sampled_from(OTHERS)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("shapes", OTHERS)
def test_a_long_prompt_fits_in_pages_of_its_windows(shapes: tuple[PageShape, ...], ahead: bool) -> None:
    length, step_tokens = 200, 8
    paging = Paging((PageShape(PAGE_SIZE), *shapes))
    most = paging.most_pages(length + 5, step_tokens)
    assert most < paging.num_pages(length), "without windows it does not fit"
    engine = Engine(most, *shapes, step_tokens=step_tokens, ahead=ahead)
    engine.answer([7 * i % 101 for i in range(length)], 5)
    assert engine.scheduler.num_preemptions == 0
    assert engine.most_held <= most


@given(others, st.integers(1, 60), st.integers(1, 12), st.integers(1, 6), st.booleans())
def test_a_sequence_holds_at_most_what_is_said(
    shapes: tuple[PageShape, ...], length: int, step_tokens: int, max_tokens: int, ahead: bool
) -> None:
    most = Paging((PageShape(PAGE_SIZE), *shapes)).most_pages(length + max_tokens, step_tokens)
    engine = Engine(most, *shapes, step_tokens=step_tokens, ahead=ahead)
    engine.answer(range(length), max_tokens)
    engine.answer(range(length), max_tokens)


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 2), st.integers(0, 5)), max_size=6), others, st.booleans())
def test_all_prompts_end_in_as_few_pages_as_the_longest_needs(
    prompts: list[tuple[int, int, int]], shapes: tuple[PageShape, ...], ahead: bool
) -> None:
    """They come at any time, share prefixes, and preempt each other."""
    paging, longest = Paging((PageShape(PAGE_SIZE), *shapes)), max([length for length, _, _ in prompts], default=1)
    engine = Engine(paging.most_pages(longest + 6, 5), *shapes, step_tokens=5, ahead=ahead)
    for length, priority, num_steps in prompts:
        engine.add(range(length), 6, priority=priority)
        for _ in range(num_steps):
            engine.step()
    engine.finish()


def test_a_prompt_preempted_in_its_middle_is_computed_again() -> None:
    engine = Engine(30, step_tokens=4)
    small = engine.add([1, 2, 3], 60, priority=1)  # grows until nothing is left for the other
    long = engine.add(range(60), 3)
    computed = [0]
    while not engine.scheduler.num_preemptions:
        computed.append(long.computed)
        engine.step()
    assert 0 < computed[-1] < 60
    assert small.num_output_tokens
    engine.finish()


def test_a_prefix_is_found_after_its_pages_have_left_the_window() -> None:
    engine = Engine(80, step_tokens=4)
    engine.answer(range(60), 3)
    for length in (12, 24, 40, 60):
        sequence = engine.add([*range(length), 99], 2)
        engine.step()
        assert sequence.num_cached_tokens == length
        engine.finish()


@pytest.mark.parametrize("ahead", [False, True])
def test_pages_that_leave_are_replaced_before_others_get_any(ahead: bool) -> None:
    """Hand-offs that are to arrive are granted all that is free after each step."""
    engine = Engine(Paging(SHAPES).most_pages(101, 8) + 3, ahead=ahead)
    engine.add(range(100), 1)
    granted = list[Pages]()
    for _ in range(40):
        engine.step()
        granted.append(engine.cache.grant(engine.cache.pool.num_free) or ())
    for pages in granted:
        engine.cache.pool.ungrant(pages)
    engine.finish()
    assert engine.scheduler.num_preemptions == 0


def test_a_prompt_takes_pages_of_less_urgent_ones_where_nothing_else_can_go_on() -> None:
    """What leaves their windows is held by others, as pages are that a worker shares with another one."""
    engine = Engine(2 * Paging(SHAPES).most_pages(81, 4), step_tokens=4)
    second = engine.add(range(100, 180), 1)
    for _ in range(6):
        engine.step()
    first, pinned = engine.add(range(80), 1, priority=1), list[Pages]()
    engine.scheduler.hold(second)
    engine.step()  # so that the first one begins
    engine.scheduler.resume(second)
    for _ in range(40):
        pinned += [engine.cache.reuse(each.prefix, each.num_published).pages.held for each in (first, second)]
        engine.step()
        if engine.scheduler.num_preemptions:
            break
    assert not second.pages
    assert 0 < first.computed < 80
    for pages in pinned:
        engine.cache.pool.release(pages)
    engine.finish()


@pytest.mark.parametrize(("shapes", "step_tokens"), [(SHAPES[1:], 8), ((PageShape(4, 128),), 512)])
def test_windows_promise_about_the_pages_of_the_full_layers_alone(
    shapes: tuple[PageShape, ...], step_tokens: int
) -> None:
    paging, length = Paging((PageShape(PAGE_SIZE), *shapes)), 131_072
    full = ceil(length / PAGE_SIZE)
    assert full < paging.most_pages(length, step_tokens) < 1.05 * full
    assert paging.num_pages(length) >= 2 * full


@given(others, st.integers(1, 100), st.integers(1, 20), st.integers(1, 200))
def test_the_longest_sequence_that_fits_is_found(
    shapes: tuple[PageShape, ...], num_pages: int, step_tokens: int, limit: int
) -> None:
    paging = Paging((PageShape(PAGE_SIZE), *shapes))
    found = paging.most_tokens(num_pages, step_tokens, limit)
    assert found == 0 or paging.most_pages(found, step_tokens) <= num_pages
    assert found == limit or paging.most_pages(found + 1, step_tokens) > num_pages


def test_a_prompt_without_windows_has_all_its_pages_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PromptRoom, "_refill", None)  # not called
    engine = Engine(40, PageShape(2))
    sequence = engine.add(range(30), 2)
    engine.step()
    assert len(sequence.pages.held) == 8 + 15
    engine.finish()


def test_a_prompt_that_lacks_pages_which_nobody_gives_up_is_told() -> None:
    engine = Engine(Paging(SHAPES).most_pages(81, 4) + 2, step_tokens=4)
    sequence, pinned = engine.add(range(80), 1), list[Pages]()
    for _ in range(40):
        engine.step()
        pinned.append(engine.cache.reuse(sequence.prefix, sequence.num_published).pages.held)  # as hand-offs do
    assert 0 < sequence.computed < 80
    assert engine.scheduler.prompt_room.stalled is sequence
    for pages in pinned:
        engine.cache.pool.release(pages)
    engine.step()
    assert engine.scheduler.prompt_room.stalled is None
    engine.finish()
