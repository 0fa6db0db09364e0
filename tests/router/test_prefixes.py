"""The table of who holds which prefix."""

from pdserve.kvevents import BlockStored
from pdserve.router.events import LinkId
from pdserve.router.prefixes import BLOCK, PrefixTable, block_names


def table_of(num_workers: int = 2, num_tokens: int = 1 << 20) -> PrefixTable:
    """Return a table of workers 1, 2, .. that hold so many tokens each."""
    table = PrefixTable()
    for link in range(1, num_workers + 1):
        table.attach(LinkId(link), num_tokens)
    return table


def test_a_prefix_is_matched_as_far_as_each_worker_holds_it() -> None:
    table, tokens = table_of(), list(range(BLOCK * 4))
    names = block_names(tokens, "t")
    table.note([LinkId(1)], names, 0.0)
    table.note([LinkId(2)], names[:2], 0.0)
    assert table.match(names, 1.0) == {1: 4 * BLOCK, 2: 2 * BLOCK}
    assert table.match(block_names(tokens, "other tenant"), 1.0) == {}
    assert table.match(names, 1e6) == {}
    table.forget(LinkId(1))
    table.forget(LinkId(2))
    assert len(table) == 0


def test_a_worker_is_taken_to_hold_no_more_than_fits_in_its_pages() -> None:
    table = table_of(num_tokens=100 * BLOCK)
    for number in range(300):
        table.note([LinkId(1)], block_names([number] * BLOCK, ""), 0.0)
    assert len(table) == 100
    assert table.match(block_names([299] * BLOCK, ""), 0.0) == {1: BLOCK}


def test_what_workers_told_of_is_known_however_much_all_of_them_hold() -> None:
    num_workers, num_blocks = 5, 20_000  # 6.4 million tokens
    table = table_of(num_workers, num_blocks * BLOCK)
    for worker in range(num_workers):
        tokens = [token for block in range(num_blocks) for token in (worker, block, *[0] * (BLOCK - 2))]
        table.tell(LinkId(worker + 1), [BlockStored(list(range(num_blocks)), None, tokens, BLOCK)])
        table.note([LinkId(worker + 1)], block_names([worker, 7] * BLOCK * num_blocks, ""), 0.0)  # routed, not told
    first = [token for block in range(num_blocks) for token in (0, block, *[0] * (BLOCK - 2))]
    assert table.match(block_names(first, ""), 1.0) == {1: num_blocks * BLOCK}
