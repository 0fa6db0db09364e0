"""Ranks with a device each keep parts of states, with guesses and without: tokens are those of one CPU."""

from dataclasses import replace
from pathlib import Path

import pytest
from equal_states import SHAPES
from guesses_of_ranks import ALONE, DEVICES, FEW, OWN, SMALL, assert_guesses_change_no_token, found
from long_cases import long_but
from model_zoo import STATES, prompt, write_model
from mtp_modules import write_model_with_module

ASKED = [(prompt(70, 1), replace(FEW, max_tokens=5)), (prompt(5, 2), replace(FEW, frequency_penalty=0.1, max_tokens=7))]

VARIED = [  # some guesses of which are wrong
    (prompt(20, 1), replace(FEW, temperature=2.0, seed=3, max_tokens=14)),
    (prompt(5, 2), replace(FEW, frequency_penalty=2.0, max_tokens=14)),
]


@pytest.mark.parametrize("settings", [ALONE, DEVICES], ids=("one rank", "two"))
@pytest.mark.parametrize("family", long_but(("lfm2",), STATES))
def test_parts_of_states_on_devices_change_no_token(family: str, settings: dict[str, object], tmp_path: Path) -> None:
    folder = write_model(family, tmp_path, **SHAPES[family])
    whole = found(folder, ASKED)
    parts = found(folder, ASKED, **SMALL, **settings)
    assert [each.texts for each in parts] == [each.texts for each in whole]
    assert parts[1].num_cached > 0, "a prefix is found again with the states behind it"


@pytest.mark.long
@pytest.mark.parametrize("settings", [ALONE, DEVICES], ids=("one rank", "two"))
@pytest.mark.parametrize("family", ["bamba", "falcon-h1", "lfm2"])
def test_guesses_beside_parts_of_states_change_no_token(
    family: str, settings: dict[str, object], tmp_path: Path
) -> None:
    folder = write_model(family, tmp_path, **SHAPES[family])
    first, _ = assert_guesses_change_no_token(folder, VARIED, {"method": "ngram"}, **SMALL, **settings)
    assert first.num_guesses > first.num_right > 0


@pytest.mark.long
@pytest.mark.parametrize("settings", [OWN, ALONE, DEVICES], ids=("one rank on CPUs", "one", "two"))
@pytest.mark.parametrize("family", ["qwen3.5", "qwen3.5-moe"])
def test_a_module_guesses_beside_parts_of_states_what_it_guesses_beside_whole_ones(
    family: str, settings: dict[str, object], tmp_path: Path
) -> None:
    folder = write_model_with_module(family, tmp_path, **SHAPES[family])
    whole, parts = (
        assert_guesses_change_no_token(folder, VARIED, {"method": "mtp"}, **SMALL, **each) for each in ({}, settings)
    )
    assert [each.drafted for each in parts] == [each.drafted for each in whole]
    assert sum(len(guesses) for _, guesses in parts[0].drafted) > 5
