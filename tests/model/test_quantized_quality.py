"""What quantized products cost in quality: perplexity, and the tokens that the dequantized weights find likely."""

import math
from pathlib import Path

import pytest
import torch
from greedy_runs import spec
from torch import Tensor
from whole_attention import torch_attention

from pdserve.checkpoint.checkpoint import Checkpoint, ChosenQuantization, weights_in_form
from pdserve.checkpoint.fetch import resolve_model
from pdserve.checkpoint.open import open_checkpoint
from pdserve.engine.runner import Runner
from pdserve.engine.step import Chunk, StepPlan
from pdserve.model.loading import load_model

pytestmark = pytest.mark.slow

TEXT = Path(__file__).with_name("moby_dick.txt")
PAGE_SIZE = 16
EXACT_PERPLEXITY = 90.38  # of SmolLM2's dequantized weights in float32


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_checkpoint(resolve_model("smollm2-135m-instruct"))


@pytest.fixture(scope="module")
def token_ids(checkpoint: Checkpoint) -> list[int]:
    return checkpoint.tokenizer().encode(TEXT.read_text(encoding="utf-8"), add_special=False)


@torch.inference_mode()
def logits_of(checkpoint: Checkpoint, form: ChosenQuantization, dtype: torch.dtype, token_ids: list[int]) -> Tensor:
    """Return float32 [num_tokens, vocab_size]."""
    model = load_model(checkpoint.config, weights_in_form(checkpoint, form), dtype)
    pages = tuple(range(-(-len(token_ids) // PAGE_SIZE)))
    plan = StepPlan((Chunk(token_ids, 0, pages, (spec(),)),))
    attention = torch_attention(model, Runner(model, len(pages), PAGE_SIZE).kv, plan)
    return model.forward(torch.tensor(token_ids), attention, None).float()


def perplexity(logits: Tensor, token_ids: list[int]) -> float:
    following = torch.tensor(token_ids[1:])[:, None]
    return math.exp(-float(logits[:-1].log_softmax(-1).gather(1, following).mean()))


def test_perplexity_of_the_files_codes_is_that_of_the_dequantized_weights(
    checkpoint: Checkpoint, token_ids: list[int]
) -> None:
    logits = logits_of(checkpoint, "gguf", torch.bfloat16, token_ids)
    assert perplexity(logits, token_ids) == pytest.approx(EXACT_PERPLEXITY, rel=0.02)


@pytest.mark.long
def test_what_codes_find_likeliest_is_among_the_first_five_of_the_dequantized_weights(
    checkpoint: Checkpoint, token_ids: list[int]
) -> None:
    exact = logits_of(checkpoint, "none", torch.float32, token_ids)
    assert perplexity(exact, token_ids) == pytest.approx(EXACT_PERPLEXITY, rel=1e-3)
    likely = exact.topk(5).indices
    for form, dtype in (
        ("none", torch.bfloat16),
        ("gguf", torch.bfloat16),
        ("gguf", torch.float32),
        ("int8", torch.bfloat16),
    ):
        logits = logits_of(checkpoint, form, dtype, token_ids)
        assert perplexity(logits, token_ids) == pytest.approx(EXACT_PERPLEXITY, rel=0.02), (form, dtype)
        assert (likely == logits.argmax(-1)[:, None]).any(-1).all(), (form, dtype)


@pytest.mark.long
def test_4_bits_rounded_at_load_cost_a_third_at_most(checkpoint: Checkpoint, token_ids: list[int]) -> None:
    logits = logits_of(checkpoint, "int4", torch.bfloat16, token_ids)
    assert perplexity(logits, token_ids) < 1.33 * EXACT_PERPLEXITY
