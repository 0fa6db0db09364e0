"""Layouts of models whose layers keep KV in several groups."""

from dataclasses import replace

import pytest

from pdserve.base.errors import ConfigError, ProtocolError
from pdserve.executor.layouts import describe_layout
from pdserve.model.config import ModelConfig
from pdserve.protocol.kvlayout import KvGroup, KvLayout
from pdserve.protocol.link import MAX_KV_GROUPS, layout_from_proto, layout_to_proto

DEEPSEEK_V3 = {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
}
PLAIN = KvLayout("w", 4, 2, 64, 16, "bfloat16")
WINDOW = KvGroup("window", 16, 2, 64, 4, window=512)
GROUPED = replace(PLAIN, others=(WINDOW,))
LATENT = replace(PLAIN, num_kv_heads=1, head_dim=576, kv_parts=1)


@pytest.mark.parametrize("layout", [PLAIN, GROUPED, LATENT])
def test_a_layout_comes_back_from_the_wire_as_it_was(layout: KvLayout) -> None:
    assert layout_from_proto(layout_to_proto(layout)) == layout


def test_layers_that_are_all_alike_are_written_as_they_were_before_there_were_groups() -> None:
    assert not layout_to_proto(PLAIN).others


def test_pages_and_bytes_count_every_group() -> None:
    assert GROUPED.page_bytes == PLAIN.page_bytes == 4 * 2 * 2 * 16 * 64 * 2
    assert GROUPED.paging.most_pages(17) == 2 + 5
    assert GROUPED.paging.most_pages(16) == GROUPED.paging.num_pages(16) == 5
    assert GROUPED.paging.whole_tokens(5) == 16
    assert GROUPED.token_bytes == (4 + 16) * 2 * 2 * 64 * 2


def test_latents_are_one_row_a_token_and_layer() -> None:
    config = ModelConfig.from_hf({"architectures": ["DeepseekV3ForCausalLM"], **DEEPSEEK_V3})
    layout = describe_layout(config, "w", 64, "bfloat16", "cpu")
    assert (layout.num_kv_heads, layout.head_dim, layout.kv_parts) == (1, 512 + 64, 1)
    assert layout.token_bytes == 61 * 576 * 2 == 70_272
    assert (layout.difference(replace(layout, kv_parts=2)) or "").startswith("kv_parts:")


@pytest.mark.parametrize("kv_parts", [0, 3])
def test_rows_are_k_and_v_or_one_for_both(kv_parts: int) -> None:
    first, second = layout_to_proto(GROUPED), layout_to_proto(GROUPED)
    first.kv_parts = second.others[0].kv_parts = kv_parts
    for message in (first, second):
        with pytest.raises(ProtocolError, match=r"layout\.kv_parts: must be 1 or 2"):
            layout_from_proto(message)


@pytest.mark.parametrize("dtype", ["int8", "fp8_e4m3"])
def test_latent_rows_and_states_are_not_coded(dtype: str) -> None:
    state = KvGroup("state", 16, 2, 64, 16, state_elements=1024)
    for layout, kept in ((LATENT, "latent rows"), (replace(PLAIN, others=(state,)), "states")):
        with pytest.raises(ProtocolError, match=rf"layout\.dtype: {dtype} is no type of {kept}"):
            layout_from_proto(layout_to_proto(replace(layout, dtype=dtype)))
    assert layout_from_proto(layout_to_proto(replace(GROUPED, dtype=dtype))).dtype == dtype


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
