"""Small random models of each family, as Hugging Face directories, and what transformers makes of a text."""

import random
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB = 512
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "eos_token_id": 1,
    "bos_token_id": 0,
    "pad_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
FAMILIES = {
    "llama3": lambda s: LlamaForCausalLM(LlamaConfig(**s, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=False)),
    "mistral": lambda s: MistralForCausalLM(MistralConfig(**s, sliding_window=96)),
    "qwen2": lambda s: Qwen2ForCausalLM(Qwen2Config(**s)),
    "qwen3": lambda s: Qwen3ForCausalLM(Qwen3Config(**s, head_dim=32)),
}


def write_model(family: str, folder: Path, **shape: int) -> Path:
    """Write a random float32 model with weights large enough that its greedy text does not settle on one token."""
    torch.manual_seed(7)
    model = FAMILIES[family]({**SHAPE, **shape}).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith("norm.weight"):
                parameter.mul_(4.0)
            if name.endswith("bias"):
                parameter.normal_(std=0.5)
    model.save_pretrained(folder)
    _write_tokenizer(folder / "tokenizer.json")
    return folder


def _write_tokenizer(path: Path) -> None:
    """Write a tokenizer that knows bytes, and words that no text is split into."""
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces += [f"word{i}" for i in range(len(pieces), VOCAB)]
    tokenizer = Tokenizer(BPE({piece: i for i, piece in enumerate(pieces)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path))


def load_oracle(path: Path) -> PreTrainedModel:
    """Load a model with transformers, in float32."""
    if path.suffix == ".gguf":
        return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


SAME_LOGIT = (
    1e-4  # of logits whose standard deviation is about 2; float32 differs by a tenth of it in sums of another order
)


@torch.inference_mode()
def first_disagreement(oracle: PreTrainedModel, prompt: Sequence[int], answer: Sequence[int]) -> int | None:
    """Return where `answer` first differs from the oracle's greedy continuation of `prompt`, or None.

    One pass over prompt and answer: as long as the answer agrees, each position's likeliest token is what greedy
    decoding would have drawn there. Of two tokens that are as likely but for rounding, either is right: in an answer
    of thousands of tokens there are such.
    """
    text = torch.tensor([[*prompt, *answer]])
    logits = oracle(text).logits[0, len(prompt) - 1 : -1]
    drawn = logits.gather(-1, torch.tensor(answer)[:, None])[:, 0]
    wrong = (logits.amax(-1) - drawn > SAME_LOGIT).nonzero()
    return int(wrong[0]) if len(wrong) else None


def prompt(length: int, seed: object = 0) -> list[int]:
    """Return random tokens, others for each length and seed."""
    rng = random.Random(f"{length} {seed}")
    return [rng.randrange(3, VOCAB) for _ in range(length)]


def assert_right(oracle: PreTrainedModel, asked: Sequence[int], tokens: Sequence[int], count: int) -> None:
    """Assert that a greedy answer has so many tokens, and is the oracle's."""
    assert len(tokens) == count
    assert first_disagreement(oracle, asked, tokens) is None
