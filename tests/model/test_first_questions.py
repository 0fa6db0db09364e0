"""The catalog's model answers what anybody asks first as its dequantized weights in float32 do, greedily."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from one_engine import OneEngine

from pdserve.checkpoint.fetch import resolve_model
from pdserve.checkpoint.open import open_checkpoint
from pdserve.protocol.sampling import SamplingParams
from pdserve.text.chat import ChatMessage, ChatTemplate
from pdserve.text.tokenizer import Tokenizer

QUESTIONS = Path(__file__).with_name("first_questions.txt")
MOST_OTHERS = 9  # of 20 answers of 24 tokens
NEARLY = 0.75  # of log probabilities: what rounding may change
LIKELIEST = SamplingParams(temperature=0.0, max_tokens=1, logprobs=20)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.slow
def test_the_capital_of_france_is_paris() -> None:
    served = engine_of("auto", torch.bfloat16)
    assert served.tokenizer.decode(served.answer("Name the capital of France.", 8)) == "The capital of France is Paris."


@pytest.mark.long
@pytest.mark.timeout(600)
def test_first_questions_are_answered_as_by_the_dequantized_weights() -> None:
    """Rounding may decide only between words that are nearly as likely."""
    questions = QUESTIONS.read_text(encoding="utf-8").splitlines()
    assert len(questions) == 20
    exact, served = (engine_of(*form) for form in (("none", torch.float32), ("auto", torch.bfloat16)))
    others = 0
    for question in questions:
        prompt, right, given = exact.prompt(question), exact.answer(question, 24), served.answer(question, 24)
        if right == given:
            continue
        same = next(place for place, (a, b) in enumerate(zip(right, given, strict=False)) if a != b)
        likely = exact.engine.generate([*prompt, *right[:same]], LIKELIEST)[0][0].logprobs
        assert likely is not None
        found = dict(likely.top)
        assert found[given[same]] > max(found.values()) - NEARLY, (question, right, given)
        others += 1
    assert others <= MOST_OTHERS


@dataclass(frozen=True, slots=True)
class Answering:
    """A model in one form, with the tokenizer and the template of its chats."""

    engine: OneEngine
    tokenizer: Tokenizer
    template: ChatTemplate

    def prompt(self, question: str) -> list[int]:
        return self.tokenizer.encode(self.template.render([ChatMessage("user", question)]), add_special=False)

    @torch.inference_mode()
    def answer(self, question: str, max_tokens: int) -> list[int]:
        tokens = self.engine.generate(self.prompt(question), SamplingParams(temperature=0.0, max_tokens=max_tokens))
        return [token.token_id for token in tokens[0]]


def engine_of(quantization: str, dtype: torch.dtype) -> Answering:
    path = resolve_model("smollm2-135m-instruct")
    checkpoint = open_checkpoint(path)
    template = checkpoint.chat()
    assert template is not None
    return Answering(OneEngine(path, dtype, 16, 512, quantization), checkpoint.tokenizer(), template)
