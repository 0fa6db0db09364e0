"""What the router makes of what workers tell of their pages."""

import tracemalloc

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve import kvevents
from pdserve.errors import ProtocolError
from pdserve.kvevents import AllBlocksCleared, BlockRemoved, BlockStored, Hash, KvEvent
from pdserve.router.events import LinkId
from pdserve.router.pages import BLOCK, WorkerPages
from pdserve.router.prefixes import LIFE_S, TOLD_LIFE_S, PrefixTable, block_names

LINK = LinkId(1)
NUMBER = bytes(8)


def table_of() -> PrefixTable:
    """Return a table of two workers."""
    table = PrefixTable()
    for link in (LINK, LinkId(2)):
        table.attach(link, 1 << 20)
    return table


def stored(first: int, tokens: list[int], size: int, parent: Hash | None = None, salt: str = "") -> BlockStored:
    hashes: list[Hash] = list(range(first, first + len(tokens) // size))
    return BlockStored(hashes, parent, tokens, size, extra_keys=[(salt,)] if salt else None)


@pytest.mark.parametrize("size", [1, 16, 48, 64, 100, 128, 200])
def test_blocks_are_held_whatever_the_size_of_pages(size: int) -> None:
    table, tokens = table_of(), list(range(size * 10))
    table.tell(LINK, [stored(0, tokens, size)])
    assert table.match(block_names(tokens, ""), 0.0).get(LINK, 0) == len(tokens) // BLOCK * BLOCK


def test_a_prefix_told_in_pieces_is_held_once_its_last_page_has_come() -> None:
    table, tokens = table_of(), list(range(BLOCK))
    names = block_names(tokens, "")
    table.tell(LINK, [stored(0, tokens[:48], 16)])
    assert table.match(names, 0.0) == {}
    table.tell(LINK, [stored(3, tokens[48:], 16, parent=2)])
    assert table.match(names, 0.0) == {LINK: BLOCK}
    table.tell(LINK, [BlockRemoved([1])])
    assert table.match(names, 0.0) == {}


def test_tenants_do_not_see_each_others_prefixes() -> None:
    table, tokens = table_of(), list(range(BLOCK))
    table.tell(LINK, [stored(0, tokens, 16, salt="one")])
    assert table.match(block_names(tokens, "one"), 0.0) == {LINK: BLOCK}
    assert table.match(block_names(tokens, "other"), 0.0) == {}


def test_pages_after_one_that_was_never_told_of_are_left_out() -> None:
    table, tokens = table_of(), list(range(BLOCK))
    table.tell(LINK, [stored(0, tokens, 16, parent=77), BlockRemoved([5])])
    assert len(table) == 0


def test_what_was_routed_to_a_worker_that_tells_is_soon_forgotten_unless_it_is_told() -> None:
    table, tokens = table_of(), list(range(2 * BLOCK))
    names = block_names(tokens, "")
    table.tell(LINK, [stored(0, tokens[:BLOCK], 16)])
    table.note([LINK], names, 0.0)
    table.note([LinkId(2)], names, 0.0)
    assert table.match(names, TOLD_LIFE_S) == {LINK: 2 * BLOCK, 2: 2 * BLOCK}
    assert table.match(names, TOLD_LIFE_S + 1) == {LINK: BLOCK, 2: 2 * BLOCK}
    assert table.match(names, LIFE_S + 1) == {LINK: BLOCK}


@pytest.mark.parametrize("clear", [True, False], ids=["cleared", "gone"])
def test_nothing_is_left_of_a_worker_that_was_cleared_or_has_gone(clear: bool) -> None:
    table, tokens = table_of(), list(range(BLOCK))
    table.tell(LINK, [stored(0, tokens, 16)])
    if clear:
        table.tell(LINK, [AllBlocksCleared(), stored(9, tokens, 16, parent=3)])
    else:
        table.forget(LINK)
    assert len(table) == 0


actions = st.lists(st.tuples(st.booleans(), st.integers(0, 11)), max_size=40)


@given(actions, st.sampled_from([16, 24, 48, 100]))
def test_a_block_is_held_only_while_each_of_its_pages_is(actions: list[tuple[bool, int]], size: int) -> None:
    tokens = list(range(size * 12))
    names, table = block_names(tokens, ""), table_of()
    present: set[int] = set()
    for store, page in actions:
        if store and page not in present and (page == 0 or page - 1 in present):
            part = tokens[page * size : (page + 1) * size]
            table.tell(LINK, [stored(page, part, size, parent=page - 1 if page else None)])
            present.add(page)
        elif not store and page in present:
            table.tell(LINK, [BlockRemoved([page])])
            present.discard(page)
        whole = min(set(range(13)) - present) * size // BLOCK * BLOCK
        assert table.match(names, 0.0).get(LINK, 0) <= whole
    table.tell(LINK, [BlockRemoved(list(present))])
    assert len(table) == 0


def test_a_block_whose_first_page_is_gone_before_its_last_one_comes_is_not_held() -> None:
    table, tokens = table_of(), list(range(BLOCK))
    table.tell(LINK, [stored(0, tokens[:32], 16), BlockRemoved([0])])
    table.tell(LINK, [stored(2, tokens[32:], 16, parent=1)])
    assert table.match(block_names(tokens, ""), 0.0) == {}


def test_a_worker_that_stores_and_removes_for_ever_costs_no_more_memory() -> None:
    pages, tokens = WorkerPages(), list(range(BLOCK))
    pages.stored(stored(0, tokens[:48], 16))
    tracemalloc.start()
    try:
        for number in range(3000):  # what follows a page that stays
            pages.stored(stored(100 + number, [number] * 16, 16, parent=2))
            pages.removed([100 + number])
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 20_000


@pytest.mark.parametrize("size", [16, 64])
def test_a_page_costs_a_few_hundred_bytes(size: int) -> None:
    table, num_pages, tokens = table_of(), 20_000, list(range(20_000 * size))
    runs = {first: tokens[first * size : (first + 200) * size] for first in range(0, num_pages, 200)}
    events = [stored(first << 40, run, size) for first, run in runs.items()]
    tracemalloc.start()
    try:
        table.tell(LINK, events)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held / num_pages < 320


@pytest.mark.parametrize("token_id", [-1, 1 << 32])
def test_a_batch_with_an_impossible_token_is_refused(token_id: int) -> None:
    with pytest.raises(ProtocolError, match="token_ids"):
        kvevents.decode(NUMBER, kvevents.encode([BlockStored([1], None, [token_id], 1)], 0.0))


EVENTS: tuple[KvEvent, ...] = (
    BlockStored([1, 2**64 - 1], None, [1, 2, 3, 4], 2, medium="GPU", extra_keys=[("tenant",), None]),
    BlockRemoved([1, b"bytes"], "GPU"),
    AllBlocksCleared(),
)


def test_what_is_encoded_is_decoded() -> None:
    batch = kvevents.decode((7).to_bytes(8, "big"), kvevents.encode(list(EVENTS), 1.5))
    assert batch == kvevents.Batch(7, EVENTS)


def test_events_are_maps_in_an_array_with_all_fields_that_others_need() -> None:
    at_s, (stored_event, *_), *rest = msgspec.msgpack.decode(kvevents.encode(list(EVENTS), 1.5))
    assert at_s == 1.5
    assert not any(rest)
    assert stored_event["type"] == "BlockStored"
    needed = {"block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"}
    assert needed <= stored_event.keys()


def test_older_publishers_events_and_unknown_kinds_are_understood() -> None:
    events = [["BlockStored", [5], None, [1, 2], 2, None, "GPU"], ["BlockRemoved", [5]], {"type": "Moved"}, ["Other"]]
    batch = kvevents.decode(NUMBER, msgspec.msgpack.encode([0.0, events, 3]))
    assert batch.events == (BlockStored([5], None, [1, 2], 2, medium="GPU"), BlockRemoved([5]))


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode([0.0]),
        msgspec.msgpack.encode([0.0, [{"type": "BlockStored"}]]),
        msgspec.msgpack.encode([0.0, [["BlockStored", [1], None, [1], 2]]]),
        msgspec.msgpack.encode([0.0, [["BlockStored", [], None, [], "x"]]]),
    ],
)
def test_what_is_no_batch_is_refused(raw: bytes) -> None:
    with pytest.raises(ProtocolError):
        kvevents.decode(NUMBER, raw)
    with pytest.raises(ProtocolError):
        kvevents.decode(b"short", kvevents.encode([], 0.0))
