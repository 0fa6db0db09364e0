"""A journal tells exactly what can be reused."""

from hypothesis import given
from hypothesis import strategies as st

from pdserve.engine.journal import CacheEvent, Journal, PagesRemoved, PagesStored
from pdserve.engine.kvcache import Content, KvCache
from pdserve.engine.prefix import PageName, PrefixNames

PAGE_SIZE, NUM_PAGES = 2, 5
prompts = st.tuples(st.lists(st.integers(0, 1), max_size=8), st.sampled_from(["", "tenant"]))


def serve(kv: KvCache, token_ids: list[int], salt: str) -> None:
    """Compute a prompt and end, reusing what is there."""
    names = kv.names(token_ids, salt)
    reused = kv.reuse(names)
    fresh = kv.take(kv.num_pages(len(token_ids)) - len(reused))
    if fresh is None:
        kv.pool.release(reused)
        return
    pages = reused + fresh
    kv.publish(names, pages, range(len(reused), len(names)), Content(token_ids, salt))
    kv.pool.release(pages)


def replay(events: list[CacheEvent]) -> set[PageName]:
    """Return what is stored after these events, each of which has to be news, and to follow what is stored."""
    present: set[PageName] = set()
    for event in events:
        match event:
            case PagesStored(parent, names):
                assert not present & set(names)
                assert parent is None or parent in present
                present |= set(names)
            case PagesRemoved(names):
                assert present >= set(names)
                present -= set(names)
    return present


@given(st.lists(prompts, max_size=12))
def test_replaying_a_journal_gives_what_can_be_reused(asked: list[tuple[list[int], str]]) -> None:
    names = PrefixNames(b"key", "weights", PAGE_SIZE)
    kv = KvCache(NUM_PAGES, PAGE_SIZE, names)
    journal = kv.journal = Journal()
    events: list[CacheEvent] = []
    for token_ids, salt in asked:
        serve(kv, token_ids, salt)
        events += journal.take()
    present = replay(events)
    for token_ids, salt in asked:
        known = kv.names(token_ids, salt)
        held = kv.reuse(known)
        kv.pool.release(held)
        assert [name in present for name in known][: len(held) + 1].count(True) == len(held)
    assert len(present) == kv.num_cached


@given(prompts)
def test_what_is_stored_is_told_with_its_tokens_and_salt(asked: tuple[list[int], str]) -> None:
    token_ids, salt = asked
    kv = KvCache(NUM_PAGES, PAGE_SIZE, PrefixNames(b"key", "weights", PAGE_SIZE))
    journal = kv.journal = Journal()
    serve(kv, token_ids, salt)
    full = len(token_ids) // PAGE_SIZE
    names = tuple(kv.names(token_ids, salt))
    told = PagesStored(None, names, tuple(token_ids[: full * PAGE_SIZE]), PAGE_SIZE, salt)
    assert journal.take() == ((told,) if full else ())
    assert journal.take() == ()
