"""docs/handoff.md says how many bytes a hand-off sends; two workers send exactly these."""

from pathlib import Path

import pytest
from handoff_bytes import LENGTHS, MODELS, Model, layout_bytes, table
from long_cases import long

from pdserve.protocol.paging import PageOrder

DOCUMENT = (Path(__file__).parents[2] / "docs" / "handoff.md").read_text().splitlines()


@pytest.mark.parametrize("lengths", [LENGTHS[:2], *long(LENGTHS[2:])], ids=["short", "long"])
def test_the_table_has_what_two_workers_send_of_each_model(lengths: tuple[int, ...]) -> None:
    lines = list(table(lengths))
    assert lines
    assert [line for line in lines if line not in DOCUMENT] == []


def test_the_table_has_no_other_lines() -> None:
    start = DOCUMENT.index("### Bytes")
    lines = DOCUMENT[start : DOCUMENT.index("## 5. Leases")]
    count = sum(length <= model.max_model_len for model in MODELS for length in LENGTHS)
    assert sum(line.startswith("|") for line in lines) == count + 2


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
@pytest.mark.parametrize("length", [1, 15, 16, 127, 128, 129, 1023, 1025, 4095, 4097, 8000])
def test_receivers_reserve_what_the_formula_says(model: Model, length: int) -> None:
    reserved = PageOrder(model.layout.paging, length).count(length)
    assert reserved == model.pages_by_formula(length)
    assert reserved * model.layout.page_bytes <= layout_bytes(model, length)
