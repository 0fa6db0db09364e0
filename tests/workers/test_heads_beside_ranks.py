"""A head on the first of several ranks changes no token, and is as right as on one."""

from pathlib import Path

import pytest
from eagle3_heads import longest_walks, write_forgetful_model, write_head_that_looks_back
from engine_answers import guessed

from pdserve.protocol.sampling import SamplingParams


@pytest.mark.parametrize(
    "form",
    [{}, *(pytest.param(each, marks=pytest.mark.long) for each in ({"dtype": "bfloat16"}, {"quantization": "int8"}))],
    ids=str,
)
def test_a_head_on_the_first_of_two_ranks_is_right_by_what_all_ranks_compute(
    tmp_path: Path, form: dict[str, str]
) -> None:
    tensors = write_forgetful_model(tmp_path / "model")
    head = write_head_that_looks_back(tmp_path / "head", tmp_path / "model", tensors)
    first, params = longest_walks(tensors, 1)[0][0], SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    plain = guessed(tmp_path / "model", params, [first], **form).tokens
    given = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 5}
    ranks = {"speculative_config": given, "tensor_parallel_size": 2}
    found = guessed(tmp_path / "model", params, [first, *plain, first], **form, **ranks)
    assert found.tokens == plain
    assert found.num_right == found.num_guesses > 5
