"""The catalog's model answers what anybody asks first as its dequantized weights in float32 do, greedily."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from one_engine import OneEngine

from pdserve.checkpoint.fetch import resolve_model
from pdserve.checkpoint.open import open_checkpoint
from pdserve.protocol.sampling import SamplingParams
from pdserve.text.chat import ChatMessage

QUESTIONS = Path(__file__).with_name("first_questions.txt")
MOST_OTHERS = 6  # of 20 answers of 24 tokens; rounding decides between words that are equally likely


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Compute in one thread: on busy cores, threads would wait for each other at each of torch's products."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
def test_the_capital_of_france_is_paris() -> None:
    assert answers("auto", torch.bfloat16, ["What is the capital of France?"], 8) == ["The capital of France is Paris."]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_first_questions_are_answered_as_by_the_dequantized_weights() -> None:
    questions = QUESTIONS.read_text(encoding="utf-8").splitlines()
    assert len(questions) == 20
    exact = answers("none", torch.float32, questions, 24)
    others = {
        question: (right, served)
        for question, right, served in zip(
            questions, exact, answers("auto", torch.bfloat16, questions, 24), strict=True
        )
        if right != served
    }
    assert len(others) <= MOST_OTHERS, others
    first_words = [right.split()[0] != served.split()[0] for right, served in others.values()]
    assert sum(first_words) <= 1, others


@torch.inference_mode()
def answers(quantization: str, dtype: torch.dtype, questions: list[str], max_tokens: int) -> list[str]:
    path = resolve_model("smollm2-135m-instruct")
    checkpoint = open_checkpoint(path)
    tokenizer, template = checkpoint.tokenizer(), checkpoint.chat()
    assert template is not None
    engine = OneEngine(path, dtype, 16, 512, quantization)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    texts = []
    for question in questions:
        prompt = tokenizer.encode(template.render([ChatMessage("user", question)]), add_special=False)
        tokens = engine.generate(prompt, params)[0]
        texts.append(tokenizer.decode([token.token_id for token in tokens]))
    return texts
