"""Layouts of models whose layers keep KV in several groups."""

from dataclasses import replace

import pytest

from pdserve.base.errors import ConfigError, ProtocolError
from pdserve.protocol.kvlayout import KvGroup, KvLayout
from pdserve.protocol.link import MAX_KV_GROUPS, layout_from_proto, layout_to_proto

PLAIN = KvLayout("w", 4, 2, 64, 16, "bfloat16")
WINDOW = KvGroup("window", 16, 2, 64, 4, window=512)
GROUPED = replace(PLAIN, others=(WINDOW,))


@pytest.mark.parametrize("layout", [PLAIN, GROUPED])
def test_a_layout_comes_back_from_the_wire_as_it_was(layout: KvLayout) -> None:
    assert layout_from_proto(layout_to_proto(layout)) == layout


def test_layers_that_are_all_alike_are_written_as_they_were_before_there_were_groups() -> None:
    assert not layout_to_proto(PLAIN).others


def test_pages_and_bytes_count_every_group() -> None:
    assert GROUPED.page_bytes == PLAIN.page_bytes == 4 * 2 * 2 * 16 * 64 * 2
    assert GROUPED.num_pages(17) == 2 + 5
    assert GROUPED.num_pages(16) == GROUPED.paging.num_pages(16) == 5
    assert GROUPED.num_tokens(5) == 16
    assert GROUPED.token_bytes == (4 + 16) * 2 * 2 * 64 * 2


def test_workers_whose_groups_differ_exchange_no_pages() -> None:
    assert GROUPED.difference(GROUPED) is None
    assert (GROUPED.difference(PLAIN) or "").startswith("others:")
    assert GROUPED.difference(replace(GROUPED, others=(replace(WINDOW, window=256),))) is not None


def test_groups_whose_pages_would_waste_memory_are_refused() -> None:
    wasteful = replace(PLAIN, others=(replace(WINDOW, num_layers=11),))
    with pytest.raises(ConfigError, match="page_size: 4 tokens of the window layers fill"):
        wasteful.check()
    with pytest.raises(ProtocolError, match=r"layout\.page_size"):
        layout_from_proto(layout_to_proto(wasteful))


@pytest.mark.parametrize("field", ["num_layers", "num_kv_heads", "head_dim", "page_size"])
def test_an_impossible_group_is_refused_by_its_field(field: str) -> None:
    message = layout_to_proto(GROUPED)
    setattr(message.others[0], field, 0)
    with pytest.raises(ProtocolError, match=rf"layout\.others\.{field}"):
        layout_from_proto(message)


def test_more_groups_than_any_model_has_are_refused() -> None:
    with pytest.raises(ProtocolError, match=f"layout.others: .* over {MAX_KV_GROUPS}"):
        layout_from_proto(layout_to_proto(replace(PLAIN, others=(WINDOW,) * (MAX_KV_GROUPS + 1))))
