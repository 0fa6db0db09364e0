"""Hand-offs that are measured arrive, and what they need stands beside them."""

import pytest

from lab.handoffs import PAIRS, SHAPES, measure_handoffs


@pytest.mark.slow
@pytest.mark.long
def test_each_pair_of_degrees_hands_off_all_pages_and_names_their_bytes() -> None:
    found = list(measure_handoffs("SmolLM2-135M", num_pages=2, rounds=1))
    four = [" -> ".join(pair) for pair in PAIRS if "tp 4" in pair]
    assert [each.pair for each in found] == [name for name in map(" -> ".join, PAIRS) if name not in four]
    assert {each.kv_bytes for each in found} == {2 * SHAPES["SmolLM2-135M"].page_bytes}
    assert [found[0].descriptors, found[0].to_equal] == [2, 1]
    assert all(min(each.copy_ms, each.digests_ms, each.gb_per_s) > 0 for each in found)
