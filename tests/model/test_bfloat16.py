"""Greedy answers in bfloat16 leave transformers' where rounding decides, for one of its first five tokens."""

from pathlib import Path

import pytest
import torch
from model_zoo import load_oracle
from one_engine import OneEngine

from pdserve.checkpoint.fetch import resolve_model
from pdserve.checkpoint.open import open_checkpoint
from pdserve.protocol.sampling import SamplingParams

pytestmark = pytest.mark.long

TEXT = Path(__file__).with_name("moby_dick.txt")
PARAMS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SPANS = ((0, 20), (300, 450), (50, 750))


@torch.inference_mode()
def test_answers_leave_transformers_for_one_of_its_first_five() -> None:
    path = resolve_model("smollm2-135m-instruct")
    text = open_checkpoint(path).tokenizer().encode(TEXT.read_text(encoding="utf-8"), add_special=False)
    oracle = load_oracle(path).bfloat16()
    for quantization in ("none", "gguf"):
        engine = OneEngine(path, torch.bfloat16, 16, 512, quantization)
        for begin, end in SPANS:
            prompt = text[begin:end]
            answer = [token.token_id for token in engine.generate(prompt, PARAMS)[0]]
            logits = oracle(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
            for token_id, row in zip(answer, logits, strict=True):
                if token_id != int(row.argmax()):
                    assert token_id in row.topk(5).indices.tolist(), (quantization, begin)
                    break
