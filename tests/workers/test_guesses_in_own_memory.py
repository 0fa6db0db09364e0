"""Ranks with memory of their own verify guesses: tokens and pages are those without guesses."""

from pathlib import Path

import pytest
from equal_states import SHAPES
from guesses_of_ranks import ASKED, OWN, RANKS, assert_guesses_change_no_token
from model_zoo import UNEVEN, write_model


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "method", "settings"),
    [
        ("llama3", "ngram", RANKS),
        ("llama3", "ngram", OWN),
        ("llama3", "suffix", {**OWN, "tensor_parallel_size": 4}),
        ("gemma3", "suffix", RANKS),
        ("deepseek-v3", "ngram", RANKS),
        ("falcon-h1", "ngram", RANKS),
        ("lfm2", "ngram", OWN),
        ("lfm2", "suffix", RANKS),
        ("qwen3.5", "ngram", RANKS),
    ],
)
def test_looked_up_guesses_change_no_token_of_ranks_with_memory_of_their_own(
    family: str, method: str, settings: dict[str, object], tmp_path: Path
) -> None:
    shape = UNEVEN if family == "gemma3" else SHAPES.get(family, {})
    model = write_model(family, tmp_path, **shape)
    first, again = assert_guesses_change_no_token(model, ASKED, {"method": method}, **settings)
    assert first.num_guesses >= first.num_right > 20
    assert again.num_cached > len(ASKED[0][0]), "pages that steps with guesses have filled"
