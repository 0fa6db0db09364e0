"""A head on the first of several ranks changes no token, and guesses what it guesses beside one rank."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from eagle3_heads import random_head_beside
from engine_answers import GREEDY, Guessed, all_guessed, guessed
from long_cases import long
from model_zoo import prompt, write_model
from mtp_modules import write_model_with_a_module_that_is_often_right, write_model_with_module
from published_formats import published

from pdserve.base.errors import ConfigError

PARAMS, PROMPTS = replace(GREEDY, max_tokens=9), [prompt(40, seed=seed) for seed in range(12)]
FAMILIES = ("llama3", "qwen2", "qwen3", "qwen3-moe", "gemma2", "gpt-oss")
HALVES: list[dict[str, str]] = [{"dtype": "bfloat16"}, {"dtype": "float16"}]
CODES = [{"dtype": dtype, "quantization": bits} for dtype in ("float32", "bfloat16") for bits in ("int8", "int4")]

MODULE: dict[str, object] = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 4}}
MODULES: dict[str, dict[str, int]] = {  # and shapes of which two ranks have whole groups of 32 codes
    "deepseek-v3": {"v_head_dim": 32},
    "glm4-moe": {},
    "glm4-lite": {"v_head_dim": 32},
}


def with_head(model: Path) -> dict[str, object]:
    return {"speculative_config": {**random_head_beside(model), "num_speculative_tokens": 4}}


def guesses_of(
    model: Path, num_ranks: int = 2, head: dict[str, object] | None = None, **form: str
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return what a head guesses beside one rank and beside several, behind the same tokens.

    How long steps take decides where it guesses, and how much: the common beginning is returned.
    """
    head, answered = head or with_head(model), partial(all_guessed, model, PARAMS, PROMPTS, **form)
    plain = answered(tensor_parallel_size=num_ranks)
    ones, others = (answered(**head, tensor_parallel_size=count) for count in (1, num_ranks))
    assert [each.tokens for each in others] == [each.tokens for each in plain]
    pairs = list[tuple[tuple[int, ...], tuple[int, ...]]]()
    for one, several in zip(ones, others, strict=True):
        both = one.drafts.keys() & several.drafts.keys()
        pairs += [(one.drafts[n], several.drafts[n]) for n in both if one.tokens[:n] == several.tokens[:n]]
    pairs = [(a[: len(b)], b[: len(a)]) for a, b in pairs if a and b]
    assert sum(len(a) for a, _ in pairs) > 12
    return pairs


@pytest.mark.parametrize(
    ("family", "num_ranks", "shape"),
    [
        ("llama3", 2, {}),
        *long(
            *((family, 2, {}) for family in FAMILIES[1:]),
            ("llama3", 4, {}),
            ("llama3", 2, {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}),
        ),
    ],
)
def test_a_head_on_the_first_of_several_ranks_guesses_what_it_guesses_on_one(
    tmp_path: Path, family: str, num_ranks: int, shape: dict[str, int]
) -> None:
    for one, several in guesses_of(write_model(family, tmp_path, **shape), num_ranks):
        assert several == one


@pytest.mark.long
@pytest.mark.parametrize("form", [*HALVES, *CODES], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_first_guesses_beside_ranks_are_those_of_one_in_halves_and_codes(
    tmp_path: Path, family: str, form: dict[str, str]
) -> None:
    """Sums of other parts are rounded otherwise, so a tie may fall to another token."""
    assert_nearly_same(guesses_of(write_model(family, tmp_path), **form))


@pytest.mark.long
@pytest.mark.parametrize("file", ["fp8 of large blocks", "awq"])
def test_first_guesses_beside_ranks_are_those_of_one_in_codes_of_a_file(tmp_path: Path, file: str) -> None:
    published(file, write_model("llama3", tmp_path / "plain"), tmp_path / "coded")
    assert_nearly_same(guesses_of(tmp_path / "coded", dtype="bfloat16"))


def assert_nearly_same(guesses: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
    assert sum(one[0] == several[0] for one, several in guesses) > 0.7 * len(guesses) > 1


@pytest.mark.long
@pytest.mark.parametrize("family", ["deepseek-v3", "glm4-moe", "glm4-lite"])
def test_a_module_on_the_first_of_several_ranks_guesses_what_it_guesses_on_one(tmp_path: Path, family: str) -> None:
    model = write_model_with_module(family, tmp_path)
    assert all(several == one for one, several in guesses_of(model, head=MODULE))


@pytest.mark.long
@pytest.mark.parametrize("form", [*HALVES, *CODES], ids=str)
@pytest.mark.parametrize("family", MODULES)
def test_a_module_beside_ranks_is_right_as_often_as_beside_one_in_halves_and_codes(
    tmp_path: Path, family: str, form: dict[str, str]
) -> None:
    """Which expert is chosen may hang on a rounding: guesses of a random module do not tell what is wrong."""
    model = write_model_with_a_module_that_is_often_right(family, tmp_path, **MODULES[family])
    answered = partial(all_guessed, model, PARAMS, PROMPTS, **MODULE, **form)
    one, several = (share_of_right_guesses(answered(tensor_parallel_size=count)) for count in (1, 2))
    assert several > 0.7 * one > 0.35


def share_of_right_guesses(answers: list[Guessed]) -> float:
    """Behind the first wrong one of a draft they are not counted: how many are made depends on how long steps take."""
    rights = list[bool]()
    for each in answers:
        for n, guesses in each.drafts.items():
            agreeing = [guess == token for guess, token in zip(guesses, each.tokens[n:], strict=False)]
            rights += agreeing[: agreeing.index(False) + 1] if False in agreeing else agreeing
    assert len(rights) > 12
    return sum(rights) / len(rights)


@pytest.mark.long
def test_a_head_on_ranks_of_dummy_weights_has_the_embedding_of_these(tmp_path: Path) -> None:
    model = write_model("llama3", tmp_path)
    (model / "model.safetensors").unlink()
    for one, several in guesses_of(model, load_format="dummy"):
        assert several == one


def test_codes_in_which_no_head_was_compared_beside_ranks_are_refused_by_name(tmp_path: Path) -> None:
    published("gptq", write_model("llama3", tmp_path / "plain"), tmp_path / "coded")
    problem = "speculative_config.method: eagle3 is not served beside several ranks with dtype bfloat16 and .* gptq yet"
    with pytest.raises(ConfigError, match=problem):
        guessed(tmp_path / "coded", PARAMS, dtype="bfloat16", tensor_parallel_size=2, **with_head(tmp_path / "coded"))
