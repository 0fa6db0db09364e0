"""Listeners know what can be reused, whenever they come and however slowly they listen."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from pdserve.engine.journal import Journal
from pdserve.engine.kvcache import Content, KvCache
from pdserve.engine.pages import Pages
from pdserve.engine.prefix import PrefixNames
from pdserve.kvevents import BlockRemoved, BlockStored, Hash, KvEvent
from pdserve.worker import cached_pages
from pdserve.worker.cached_pages import HASH_BYTES, SLICE_TOKENS, CachedPages, Listener

PAGE_SIZE = 2


class Cache:
    """A real prefix cache, and what is told of it."""

    def __init__(self, num_pages: int, page_size: int = PAGE_SIZE, pages: CachedPages | None = None) -> None:
        self.kv = KvCache(num_pages, page_size, PrefixNames(b"key", "weights", page_size))
        self._journal = self.kv.journal = Journal()
        self.pages = pages or CachedPages()

    def serve(self, token_ids: list[int], salt: str = "", beside: int = 0) -> None:
        """Compute a prompt and end. The last `beside` of its pages are computed although they may be cached."""
        for _ in self.compute(token_ids, salt, beside):
            pass

    def compute(self, token_ids: list[int], salt: str, beside: int) -> Iterator[None]:
        """Compute a prompt, page by page."""
        names = self.kv.names(token_ids, salt)
        reused = self.kv.reuse(names[: max(0, len(names) - beside)])
        fresh = self.kv.take(self.kv.num_pages(len(token_ids)) - len(reused))
        if fresh is None:
            self.kv.pool.release(reused)
            return
        pages: Pages = reused + fresh
        for number in range(len(reused), len(names)):
            self.kv.publish(names, pages, range(number, number + 1), Content(token_ids, salt))
            yield
        self.kv.pool.release(pages)

    def tell(self) -> None:
        self.pages.apply(self._journal.take())

    def reusable(self, asked: list[tuple[list[int], str]]) -> set[int]:
        """Return the hashes of all pages that these prompts would reuse."""
        hashes = set[int]()
        for token_ids, salt in asked:
            names = self.kv.names(token_ids, salt)
            held = self.kv.reuse(names)
            self.kv.pool.release(held)
            hashes.update(int.from_bytes(name[:HASH_BYTES], "big") for name in names[: len(held)])
        return hashes


@dataclass
class Known:
    """What a listener makes of what it hears."""

    listener: Listener
    parents: dict[Hash, Hash | None] = field(default_factory=dict)

    def hear(self, events: list[KvEvent]) -> None:
        for event in events:
            match event:
                case BlockStored(hashes, parent):
                    for page in hashes:
                        assert page not in self.parents  # nothing twice
                        assert parent is None or parent in self.parents  # no gap
                        self.parents[page], parent = parent, page
                case BlockRemoved(hashes):
                    for page in hashes:
                        del self.parents[page]

    def hear_all(self, cache: Cache) -> None:
        while cache.pages.has_news(self.listener):
            self.hear(cache.pages.next_events(self.listener))


prompts = st.tuples(st.lists(st.integers(0, 1), max_size=8), st.sampled_from(["", "tenant"]))
serving = st.tuples(prompts, st.integers(0, 4))
moves = st.lists(st.one_of(serving, st.sampled_from(["come", "hear", "tell", "step"])), max_size=40)


@given(moves, st.integers(1, 3))
def test_whoever_comes_at_any_time_ends_up_knowing_what_can_be_reused(moves: list[object], slice_pages: int) -> None:
    cache = Cache(6, pages=CachedPages(slice_pages * PAGE_SIZE, slice_pages))
    known, asked, running = list[Known](), list[tuple[list[int], str]](), list[Iterator[None]]()
    for move in moves:
        if move == "come":
            known.append(Known(cache.pages.listen()))
        elif move == "hear":
            for each in known:
                each.hear(cache.pages.next_events(each.listener))
        elif move == "tell":
            cache.tell()
        elif isinstance(move, tuple):
            (token_ids, salt), beside = move
            asked.append((token_ids, salt))
            running.append(cache.compute(token_ids, salt, beside))
            next(running[-1], None)
        elif running and next(running[0], "over") == "over":
            running.pop(0)
    cache.tell()
    for each in known:
        each.hear_all(cache)
        assert set(each.parents) == cache.reusable(asked)


def test_a_page_whose_parent_is_gone_is_told_of_again_with_its_parent() -> None:
    cache = Cache(num_pages=6)
    known = Known(cache.pages.listen())
    cache.serve([1, 1])
    cache.serve([1, 1, 2, 2], beside=2)  # its second page outlives the first one's, which is older
    cache.tell()
    known.hear_all(cache)
    assert len(known.parents) == 2
    others = [cache.kv.take(1) for _ in range(4)]  # the fourth one is the first page's
    cache.tell()
    known.hear_all(cache)
    assert not known.parents
    for pages in others:
        cache.kv.pool.release(pages or ())
    cache.serve([1, 1])
    cache.tell()
    known.hear_all(cache)
    assert set(known.parents) == cache.reusable([([1, 1, 2, 2], "")])


def test_a_page_that_was_removed_and_stored_again_is_told_of_in_that_order_however_slowly() -> None:
    cache = Cache(4, pages=CachedPages(100, 1))
    known, prompt = Known(cache.pages.listen()), [1, 1, 2, 2, 3, 3]
    cache.serve(prompt)
    cache.tell()
    known.hear_all(cache)
    cache.serve([4] * 8)
    cache.serve(prompt)
    cache.tell()
    known.hear_all(cache)
    assert set(known.parents) == cache.reusable([(prompt, ""), ([4] * 8, "")])


def test_what_follows_a_page_that_is_cut_off_is_told_of_with_it() -> None:
    cache = Cache(num_pages=8)
    known, prompt = Known(cache.pages.listen()), [1, 1, 2, 2, 3, 3]
    cache.serve([1, 1])
    running = cache.compute(prompt, "", beside=3)  # with a first page of its own that is not the cached one
    next(running)
    next(running)
    others = [cache.kv.take(1) for _ in range(5)]  # the cached first page is the last of them
    next(running)
    cache.tell()
    known.hear_all(cache)
    assert not known.parents
    for pages in others:
        cache.kv.pool.release(pages or ())
    next(running, None)
    cache.serve([1, 1])
    cache.tell()
    known.hear_all(cache)
    assert set(known.parents) == cache.reusable([(prompt, "")])
    assert len(known.parents) == 3


def test_what_is_told_at_once_is_bounded_and_what_is_gone_costs_no_memory() -> None:
    size, num_pages = 16, 2 * SLICE_TOKENS // 16
    cache = Cache(num_pages, size)
    for number in range(20 * num_pages // 8):
        cache.serve([number] * size * 8)
        cache.tell()
    late = cache.pages.listen()
    told = []
    while cache.pages.has_news(late):
        events = cache.pages.next_events(late)
        told.append(sum(len(event.token_ids) for event in events if isinstance(event, BlockStored)))
    assert sum(told) == num_pages * size
    assert max(told) <= SLICE_TOKENS
    assert len(cache.pages._names) <= 2 * num_pages + cached_pages._SPARE
