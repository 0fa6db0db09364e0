"""The index of who holds which prefix, and what it makes of events."""

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.base.errors import ProtocolError
from pdserve.perfmodel.model import LATELY_S
from pdserve.proto.v1 import link_pb2 as link
from pdserve.protocol.kvlayout import Tier
from pdserve.protocol.prefix_hash import BLOCK_TOKENS, EVERYONE, CacheScope, PrefixHasher, short_hashes
from pdserve.router import wire
from pdserve.router.placement.prefix_index import LIFE_S, Hashes, PrefixIndex, block_hashes
from pdserve.router.requests.events import KvChanged, LinkId

HASHER = PrefixHasher(b"a secret of the cluster", "model")
LINK = LinkId(1)


def hashes_of(token_ids: list[int], salt: str = "") -> Hashes:
    return block_hashes(HASHER, token_ids, CacheScope(salt))


def index_of(num_workers: int = 2, num_pages: int = 1 << 16, page_size: int = BLOCK_TOKENS) -> PrefixIndex:
    """Return an index of workers 1, 2, .. with so many pages each."""
    index = PrefixIndex(HASHER)
    for number in range(1, num_workers + 1):
        index.attach(LinkId(number), page_size, num_pages)
    return index


def pages_in(index: PrefixIndex) -> int:
    return sum(len(worker.reported | worker.routed.keys()) for worker in index._workers.values())


def stored(token_ids: list[int], first: int = 0, last: int | None = None, salt: str = "", size: int = 16) -> KvChanged:
    """Return the report of a prompt's pages from the first one on."""
    pages = hashes_of(token_ids, salt)[size // BLOCK_TOKENS - 1 :: size // BLOCK_TOKENS]
    return KvChanged(LINK, stored=pages[first:last])


@pytest.mark.parametrize("size", [16, 48, 64, 128])
def test_a_prefix_is_matched_in_pages_as_far_as_each_worker_holds_it(size: int) -> None:
    index, tokens = index_of(page_size=size), list(range(size * 4 + 3))
    hashes = hashes_of(tokens, "t")
    index.note([LINK], hashes, 0.0)
    index.note([LinkId(2)], hashes[: 2 * size // BLOCK_TOKENS], 0.0)
    assert index.match(hashes, 1.0) == {1: 4 * size, 2: 2 * size}
    assert index.match(hashes_of(tokens, "other tenant"), 1.0) == {}
    assert index.match(hashes, 1e6) == {}
    index.forget(LINK)
    index.forget(LinkId(2))
    assert pages_in(index) == 0


def test_workers_with_pages_of_different_sizes_hold_the_same_prefix_by_the_same_hashes() -> None:
    index, tokens = PrefixIndex(HASHER), list(range(200))
    for size in (16, 48, 64, 128):
        index.attach(LinkId(size), size, 100)
        index.apply(KvChanged(LinkId(size), stored=stored(tokens, size=size).stored))
    assert index.match(hashes_of(tokens), 0.0) == {16: 192, 48: 192, 64: 192, 128: 128}


def test_a_worker_is_taken_to_hold_no_more_than_fits_in_its_pages() -> None:
    index = index_of(num_pages=100)
    for number in range(300):
        index.note([LINK], hashes_of([number] * BLOCK_TOKENS), 0.0)
    assert pages_in(index) == 100
    assert index.match(hashes_of([299] * BLOCK_TOKENS), 0.0) == {1: BLOCK_TOKENS}


def test_what_workers_reported_is_known_however_much_all_of_them_hold() -> None:
    num_workers, num_pages = 5, 80_000  # 6.4 million tokens
    index = index_of(num_workers, num_pages)
    for worker in range(1, num_workers + 1):
        tokens = [worker] * BLOCK_TOKENS * num_pages
        index.apply(KvChanged(LinkId(worker), stored=hashes_of(tokens)))
        index.note([LinkId(worker)], hashes_of([7, *tokens]), 0.0)  # routed, not reported
    assert index.match(hashes_of([1] * BLOCK_TOKENS * num_pages), 1.0) == {1: num_pages * BLOCK_TOKENS}


def test_a_page_in_the_middle_that_is_removed_hides_what_follows_it_until_it_is_stored_again() -> None:
    index, tokens = index_of(), list(range(64))
    hashes = hashes_of(tokens)
    index.apply(stored(tokens))
    index.apply(KvChanged(LINK, removed=hashes[1:2]))
    assert index.match(hashes, 0.0) == {LINK: 16}
    index.apply(KvChanged(LINK, stored=hashes[1:2]))
    assert index.match(hashes, 0.0) == {LINK: 64}


def test_tenants_do_not_see_each_others_prefixes() -> None:
    index, tokens = index_of(), list(range(64))
    index.apply(stored(tokens, salt="one"))
    assert index.match(hashes_of(tokens, "one"), 0.0) == {LINK: 64}
    assert index.match(hashes_of(tokens, "other"), 0.0) == {}


def test_what_was_routed_to_a_worker_that_reports_is_soon_forgotten_unless_it_is_reported() -> None:
    index, tokens = index_of(), list(range(128))
    hashes = hashes_of(tokens)
    index.apply(stored(tokens, last=4))
    index.note([LINK], hashes, 0.0)
    index.note([LinkId(2)], hashes, 0.0)
    assert index.match(hashes, LATELY_S) == {LINK: 128, 2: 128}
    assert index.match(hashes, LATELY_S + 1) == {LINK: 64, 2: 128}
    assert index.match(hashes, LIFE_S + 1) == {LINK: 64}


def test_nothing_is_left_of_a_worker_that_has_gone() -> None:
    index, tokens = index_of(), list(range(64))
    index.apply(stored(tokens))
    index.note([LINK], hashes_of([5] * 64), 0.0)
    index.forget(LINK)
    assert pages_in(index) == 0


@pytest.mark.parametrize("size", [0, 1, 24])
def test_pages_that_are_no_multiple_of_a_block_are_left_out(size: int) -> None:
    index = PrefixIndex(HASHER)
    index.attach(LINK, size, 100)
    index.note([LINK], hashes_of([1] * 64), 0.0)
    index.apply(stored([1] * 64))
    assert pages_in(index) == 0


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 11)), max_size=40), st.sampled_from([16, 48]))
def test_a_prefix_is_held_exactly_as_far_as_each_of_its_pages_is(actions: list[tuple[bool, int]], size: int) -> None:
    tokens, index, present = list(range(size * 12)), index_of(page_size=size), set[int]()
    for store, page in actions:
        change = stored(tokens, page, page + 1, size=size)
        index.apply(change if store else KvChanged(LINK, removed=change.stored))
        (present.add if store else present.discard)(page)
        assert index.match(hashes_of(tokens), 0.0).get(LINK, 0) == min(set(range(13)) - present) * size


def test_a_reported_page_costs_no_more_than_its_hash_and_its_place_in_a_set() -> None:
    index, num_pages = index_of(), 20_000
    packed = b"".join(HASHER.extend(HASHER.root(EVERYONE), list(range(num_pages * BLOCK_TOKENS))))
    tracemalloc.start()
    try:
        index.apply(KvChanged(LINK, stored=short_hashes(packed)))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held / num_pages < 150


@pytest.mark.parametrize("field", ["stored", "removed"])
def test_a_message_with_half_a_hash_is_refused(field: str) -> None:
    message = link.AttachRequest(kv_events=link.KvEvents(**{field: bytes(24)}))
    with pytest.raises(ProtocolError, match=f"kv_events.{field}: 24 bytes"):
        wire.worker_events(LINK, message)


@pytest.mark.parametrize(
    ("number", "tier"),
    [
        (link.TIER_UNSPECIFIED, Tier.DEVICE),  # a worker that knows no tiers
        (link.TIER_DEVICE, Tier.DEVICE),
        (link.TIER_HOST, Tier.HOST),
        (link.TIER_DISK, Tier.DISK),
        (9, None),  # of a later version
    ],
)
def test_a_router_learns_of_which_tier_pages_are(number: int, tier: Tier | None) -> None:
    events = link.KvEvents(stored=bytes(16), tier=number)  # type: ignore[arg-type]
    (event,) = wire.worker_events(LINK, link.AttachRequest(kv_events=events))
    assert isinstance(event, KvChanged)
    assert (event.stored, event.tier) == (short_hashes(bytes(16)), tier)


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK, None])
def test_pages_of_another_tier_are_not_taken_for_those_of_the_device(tier: Tier | None) -> None:
    index, tokens = PrefixIndex(HASHER), list(range(2 * BLOCK_TOKENS))
    index.attach(LINK, BLOCK_TOKENS, 8)
    hashes = hashes_of(tokens)
    index.apply(KvChanged(LINK, stored=hashes, tier=tier))
    assert index.match(hashes, 0.0) == {}
    index.apply(KvChanged(LINK, stored=hashes))
    index.apply(KvChanged(LINK, removed=hashes, tier=tier))
    assert index.match(hashes, 0.0) == {LINK: 2 * BLOCK_TOKENS}
