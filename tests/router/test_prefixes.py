"""The table of who holds which prefix."""

from pdserve.router.events import (
    LinkId,
)
from pdserve.router.prefixes import BLOCK, PrefixTable, block_names


def test_a_prefix_is_matched_as_far_as_each_worker_holds_it() -> None:
    table, tokens = PrefixTable(), list(range(BLOCK * 4))
    names = block_names(tokens, "t")
    table.note([LinkId(1)], names, 0.0)
    table.note([LinkId(2)], names[:2], 0.0)
    assert table.match(names, 1.0) == {1: 4 * BLOCK, 2: 2 * BLOCK}
    assert table.match(block_names(tokens, "other tenant"), 1.0) == {}
    assert table.match(names, 1e6) == {}
    table.forget(LinkId(1))
    table.forget(LinkId(2))
    assert len(table) == 0


def test_the_prefix_table_is_bounded() -> None:
    table = PrefixTable(max_names=100)
    for number in range(300):
        table.note([LinkId(1)], block_names([number] * BLOCK, ""), 0.0)
    assert len(table) == 100
