import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdserve.base.errors import InvariantError
from pdserve.base.ids import PageId
from pdserve.engine.pages import PagePool
from pdserve.protocol.page_tables import Pages


def test_a_refused_take_changes_nothing() -> None:
    pool = PagePool(4)
    assert pool.take(3) is not None
    assert pool.take(2) is None
    assert pool.num_free == 1
    pool.check()


def test_the_first_page_that_comes_back_does_not_rehash_a_table_that_the_pages_fill() -> None:
    pool = PagePool(10_922)  # fills a hash table exactly
    num_bytes, pages = sys.getsizeof(pool._free), pool.take(1)
    assert pages is not None
    pool.release(pages)
    assert sys.getsizeof(pool._free) == num_bytes


def test_a_page_counts_a_generation_each_time_it_is_given_out() -> None:
    pool = PagePool(1)
    for expected in (1, 2, 3):
        pages = pool.take(1)
        assert pages is not None
        assert pool.generations(pages) == (expected,)
        pool.release(pages)


def test_the_longest_unused_page_is_given_out_first_and_leading_pages_last() -> None:
    pool = PagePool(4)
    pages = pool.take(4)
    assert pages is not None
    pool.release(pages)
    assert pool.take(4) == tuple(reversed(pages))


@pytest.mark.parametrize("wrong", ["release", "adopt", "ungrant", "quarantine", "unquarantine"])
def test_a_page_cannot_leave_a_state_it_is_not_in(wrong: str) -> None:
    pool = PagePool(2)
    with pytest.raises(InvariantError):
        getattr(pool, wrong)((PageId(0),))
    pool.check()


class Pool(RuleBasedStateMachine):
    """Every legal order of operations leaves the four states a partition of the pool."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(7)
        self.held: list[Pages] = []
        self.granted: list[Pages] = []
        self.quarantined: list[Pages] = []

    @rule(count=st.integers(0, 4))
    def take(self, count: int) -> None:
        pages = self.pool.take(count)
        if pages is not None:
            self.held.append(pages)

    @rule(count=st.integers(0, 4))
    def grant(self, count: int) -> None:
        pages = self.pool.grant(count)
        if pages is not None:
            self.granted.append(pages)

    @precondition(lambda self: self.held)
    @rule()
    def share(self) -> None:
        self.pool.share(self.held[0])
        self.held.append(self.held[0])

    @precondition(lambda self: self.held)
    @rule()
    def release(self) -> None:
        self.pool.release(self.held.pop())

    @precondition(lambda self: self.granted)
    @rule(how=st.sampled_from(["adopt", "ungrant", "quarantine"]))
    def settle(self, how: str) -> None:
        pages = self.granted.pop()
        getattr(self.pool, how)(pages)
        if how == "adopt":
            self.held.append(pages)
        if how == "quarantine":
            self.quarantined.append(pages)

    @precondition(lambda self: self.quarantined)
    @rule()
    def unquarantine(self) -> None:
        self.pool.unquarantine(self.quarantined.pop())

    @invariant()
    def adds_up(self) -> None:
        self.pool.check()
        assert self.pool.num_held == len({page for pages in self.held for page in pages})
        assert self.pool.num_granted == sum(map(len, self.granted))
        assert self.pool.num_quarantined == sum(map(len, self.quarantined))


Pool.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPool = Pool.TestCase


@given(st.lists(st.integers(0, 6), unique=True, min_size=1))
def test_shared_pages_stay_until_their_last_holder_lets_go(order: list[int]) -> None:
    pool = PagePool(7)
    pages = tuple(map(PageId, order))
    pool.share(pages)  # revives free pages, as a prefix hit does
    pool.share(pages)
    pool.release(pages)
    assert pool.num_held == len(pages)
    pool.release(pages)
    assert pool.num_free == 7
