from hypothesis import given
from hypothesis import strategies as st

from pdserve.engine.kvcache import Content, KvCache
from pdserve.engine.prefix import PrefixNames

PAGE_SIZE = 4
tokens = st.lists(st.integers(0, 3), max_size=20)


def cache(num_pages: int = 8, key: bytes = b"key") -> KvCache:
    return KvCache(num_pages, PAGE_SIZE, PrefixNames(key, "weights", PAGE_SIZE))


@given(tokens, tokens)
def test_two_sequences_share_exactly_the_names_of_their_common_full_pages(first: list[int], second: list[int]) -> None:
    names = [cache().names(tokens, "tenant") for tokens in (first, second)]
    common = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        common += 1
    shared = sum(a == b for a, b in zip(*names, strict=False))
    assert shared == common // PAGE_SIZE
    assert [len(n) for n in names] == [len(first) // PAGE_SIZE, len(second) // PAGE_SIZE]


@given(tokens, st.integers(0, 20))
def test_names_grow_with_the_sequence_as_if_named_at_once(sequence: list[int], split: int) -> None:
    names = cache().names(sequence[:split], "")
    cache().extend_names(names, sequence, "")
    assert names == cache().names(sequence, "")


def test_tenants_and_clusters_never_share_a_name() -> None:
    sequence = list(range(4))
    assert cache().names(sequence, "a") != cache().names(sequence, "b")
    assert cache().names(sequence, "a") != cache(key=b"other").names(sequence, "a")


def test_a_released_prefix_is_reused_until_its_page_is_given_out_again() -> None:
    kv = cache(num_pages=3)
    names = kv.names(list(range(8)), "")
    pages = kv.take(2)
    assert pages is not None
    kv.publish(names, pages, range(2), Content(range(8), ""))
    kv.pool.release(pages)
    assert kv.num_cached == 2
    assert kv.reuse(names) == pages
    kv.pool.release(pages)
    assert kv.take(2) is not None  # the page that was never used, then the prefix's last
    assert kv.reuse(names) == pages[:1]
    kv.check()


def test_a_granted_page_is_not_found_by_its_old_name() -> None:
    kv = cache(num_pages=1)
    names = kv.names(list(range(4)), "")
    pages = kv.take(1)
    assert pages is not None
    kv.publish(names, pages, range(1), Content(range(4), ""))
    kv.pool.release(pages)
    assert kv.grant(1) == pages
    assert kv.reuse(names) == ()
    kv.check()
