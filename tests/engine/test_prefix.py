"""Prefixes are found again exactly as far as they are the same and their pages hold them."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.base.errors import ConfigError
from pdserve.engine.kvcache import CacheChange, KvCache, PagesRemoved, PagesStored, Prefix
from pdserve.protocol.adapters import NO_ADAPTER
from pdserve.protocol.page_tables import PageTables
from pdserve.protocol.paging import Paging
from pdserve.protocol.prefix_hash import BLOCK_TOKENS, EVERYONE, CacheScope, PrefixHash, PrefixHasher

PAGE_SIZE, NUM_PAGES = 4, 8
tokens = st.lists(st.integers(0, 3), max_size=20)
prompts = st.tuples(st.lists(st.integers(0, 1), max_size=4 * 2 * PAGE_SIZE), st.sampled_from(["", "tenant"]))


def hasher(secret: bytes = b"secret", model: str = "model", block_tokens: int = PAGE_SIZE) -> PrefixHasher:
    return PrefixHasher(secret, model, block_tokens)


def hashes(token_ids: list[int], salt: str = "", by: PrefixHasher | None = None) -> list[PrefixHash]:
    by = by or hasher()
    return by.extend(by.root(CacheScope(salt)), token_ids)


def cache(num_pages: int = NUM_PAGES, page_size: int = PAGE_SIZE) -> KvCache:
    return KvCache(num_pages, Paging.of(page_size), hasher())


@dataclass
class Served:
    """What serving a prompt brought."""

    prefix: Prefix
    num_reused: int


def serve(kv: KvCache, token_ids: list[int], salt: str = "") -> Served:
    """Compute a prompt and end, reusing what is there."""
    prefix, num_full = Prefix(token_ids, CacheScope(salt)), len(token_ids) // kv.page_size
    hit = kv.hold(prefix, num_full, 1)
    if hit is None:
        return Served(prefix, 0)
    kv.publish(prefix, hit.pages, range(hit.num_spans, num_full))
    kv.pool.release(hit.pages.held)
    return Served(prefix, hit.num_spans)


@given(tokens, tokens)
def test_two_prompts_share_exactly_the_hashes_of_their_common_full_blocks(first: list[int], second: list[int]) -> None:
    common = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        common += 1
    shared = sum(a == b for a, b in zip(hashes(first), hashes(second), strict=False))
    assert shared == common // PAGE_SIZE
    assert [len(hashes(each)) for each in (first, second)] == [len(first) // PAGE_SIZE, len(second) // PAGE_SIZE]


@given(tokens, st.integers(0, 5))
def test_hashes_follow_from_the_one_before_as_if_all_were_computed_at_once(sequence: list[int], blocks: int) -> None:
    first = hashes(sequence[: blocks * PAGE_SIZE])
    parent = first[-1] if first else hasher().root(EVERYONE)
    assert first + hasher().extend(parent, sequence[len(first) * PAGE_SIZE :]) == hashes(sequence)


def test_tenants_models_and_clusters_never_share_a_hash() -> None:
    token_ids = list(range(PAGE_SIZE))
    own = hashes(token_ids, "a")
    assert own != hashes(token_ids, "b")
    assert own != hashes(token_ids, "a", hasher(model="other"))
    assert own != hashes(token_ids, "a", hasher(secret=b"other"))
    assert hasher(model="m").root(CacheScope("odel")) != hasher(model="mo").root(CacheScope("del"))


names = st.text(max_size=3)
scopes = st.builds(CacheScope, names, st.one_of(st.just(NO_ADAPTER), names.map(str.encode)))


@given(st.tuples(st.sampled_from(["m", "mo"]), scopes), st.tuples(st.sampled_from(["m", "mo"]), scopes))
def test_a_root_is_shared_within_one_model_tenant_and_adapter_only(
    one: tuple[str, CacheScope], other: tuple[str, CacheScope]
) -> None:
    roots = [hasher(model=model).root(scope) for model, scope in (one, other)]
    assert (roots[0] == roots[1]) == (one == other)


@given(tokens, st.sampled_from([2, 3, 5]))
def test_a_page_is_named_by_its_last_block_whatever_its_size(token_ids: list[int], blocks: int) -> None:
    kv, wide = cache(), cache(page_size=blocks * PAGE_SIZE)
    own, others = serve(kv, token_ids).prefix.hashes, serve(wide, token_ids).prefix.hashes
    assert others == own[blocks - 1 :: blocks]


@pytest.mark.parametrize("page_size", [1, 8, 24])
def test_a_page_that_blocks_do_not_fill_is_refused(page_size: int) -> None:
    with pytest.raises(ConfigError, match=f"page_size: {page_size} is no multiple of {BLOCK_TOKENS}"):
        KvCache(NUM_PAGES, Paging.of(page_size), PrefixHasher(b"secret", "model"))


def test_no_more_is_hashed_of_a_long_prompt_than_what_is_looked_for() -> None:
    kv, token_ids = cache(2000), list(range(1000 * PAGE_SIZE))
    missed = Prefix(token_ids, EVERYONE)
    assert kv.reuse(missed, 1000).num_spans == 0
    assert 0 < len(missed.hashes) < 100
    assert serve(kv, token_ids).num_reused == 0
    assert serve(kv, token_ids).num_reused == 1000


def test_a_released_prefix_is_reused_until_its_page_is_given_out_again() -> None:
    kv, prefix = cache(num_pages=3), Prefix(range(8), EVERYONE)
    pages = kv.take(2)
    assert pages is not None
    kv.publish(prefix, PageTables((list(pages),)), range(2))
    kv.pool.release(pages)
    assert kv.num_cached == 2
    assert kv.reuse(prefix, 2).pages.held == pages
    kv.pool.release(pages)
    assert kv.take(2) is not None  # the page that was never used, then the prefix's last
    assert kv.reuse(prefix, 2).pages.held == pages[:1]
    kv.check()


def test_a_granted_page_is_not_found_by_what_it_held() -> None:
    kv, prefix = cache(num_pages=1), Prefix(range(4), EVERYONE)
    pages = kv.take(1)
    assert pages is not None
    kv.publish(prefix, PageTables((list(pages),)), range(1))
    kv.pool.release(pages)
    assert kv.grant(1) == pages
    assert not kv.reuse(prefix, 1).pages
    kv.check()


def replay(changes: list[CacheChange]) -> set[PrefixHash]:
    """Return what is stored after these changes, each of which changes something, and follows what was stored."""
    present: set[PrefixHash] = set()
    for change in changes:
        match change:
            case PagesStored(prefix, run):
                assert not present & set(change.hashes)
                assert run.start == 0 or prefix.hashes[run.start - 1] in present
                present |= set(change.hashes)
            case PagesRemoved(removed):
                assert present >= set(removed)
                present -= set(removed)
    return present


@given(st.lists(prompts, max_size=12))
def test_replaying_all_changes_gives_what_can_be_reused(asked: list[tuple[list[int], str]]) -> None:
    kv = cache(5)
    changes = kv.take_changes()
    for token_ids, salt in asked:
        serve(kv, token_ids, salt)
        changes += kv.take_changes()
    present = replay(changes)
    assert present == kv.spans.keys()
    for token_ids, salt in asked:
        prefix = Prefix(token_ids, CacheScope(salt))
        hit = kv.reuse(prefix, len(token_ids) // PAGE_SIZE)
        kv.pool.release(hit.pages.held)
        assert [each in present for each in hashes(token_ids, salt)][: hit.num_spans + 1].count(True) == hit.num_spans
    assert len(present) == kv.num_cached


def test_changes_are_noted_only_once_somebody_takes_them() -> None:
    kv = cache()
    serve(kv, [1] * PAGE_SIZE)
    assert kv.take_changes() == []
    serve(kv, [2] * PAGE_SIZE)
    assert [type(change) for change in kv.take_changes()] == [PagesStored]
    assert kv.take_changes() == []
