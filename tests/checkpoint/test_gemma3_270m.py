"""The catalogue's Gemma 3, with types of several block formats and windows: its texts are those of transformers."""

from pathlib import Path

import pytest
import torch
from greedy_runs import greedy_texts
from model_zoo import first_disagreement, load_oracle

from pdserve.checkpoint.fetch import resolve_model
from pdserve.checkpoint.open import open_checkpoint
from pdserve.engine.runner import Runner
from pdserve.model.loading import load_model

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]

PROMPTS = [
    *("The capital of France is", "Once upon a time there was a", "def fibonacci(n):\n", "1, 2, 3, 4,"),
    "  Two spaces, and 日本語は",
    "The history of the city begins long ago. " * 65,  # more tokens than a window
]
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def file() -> Path:
    return resolve_model("gemma3-270m")


def test_greedy_texts_are_those_of_transformers_with_the_same_file(file: Path) -> None:
    checkpoint = open_checkpoint(file)
    tokenizer = checkpoint.tokenizer()
    prompts = [tokenizer.encode(text, add_special=True) for text in PROMPTS]
    assert len(prompts[-1]) > 512 + NUM_TOKENS
    model = load_model(checkpoint.config, checkpoint.weights(), torch.float32)
    answers = greedy_texts(Runner(model, 200, 16), prompts, NUM_TOKENS, 64)
    texts = [tokenizer.decode(answer) for answer in answers]
    assert "France" in texts[0]
    assert texts[3].startswith(" 5, 6, 7, 8")
    del model
    oracle = load_oracle(file)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert first_disagreement(oracle, prompt, answer) is None
