"""Writes random models in bfloat16: the shapes of two published mixtures of experts, and a dense one as active as they.

Usage: write_shapes.py TOKENIZER_DIR OUT. Each folder in OUT has the tokenizer's files (of 49,152 tokens, as SmolLM2's).
"""

import shutil
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GptOssConfig, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

SIZES = {"hidden_size": 1024, "num_hidden_layers": 12, "vocab_size": 49152, "max_position_embeddings": 4096}
HEADS = {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64}
EXPERTS, CHOSEN, INNER = 64, 8, 512

SHAPES: dict[str, PretrainedConfig] = {
    "qwen3-moe": Qwen3MoeConfig(
        **SIZES,
        **HEADS,
        intermediate_size=CHOSEN * INNER,
        moe_intermediate_size=INNER,
        num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        norm_topk_prob=True,
        tie_word_embeddings=True,
    ),
    "gpt-oss": GptOssConfig(
        **SIZES,
        **HEADS,
        intermediate_size=1024,
        num_local_experts=32,
        num_experts_per_tok=4,
        sliding_window=128,
        tie_word_embeddings=True,
    ),
    "dense": Qwen3Config(**SIZES, **HEADS, intermediate_size=CHOSEN * INNER, tie_word_embeddings=True),
}


def main(tokenizer: Path, out: Path) -> None:
    """Write them all."""
    for name, config in SHAPES.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(out / name)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(tokenizer / file, out / name / file)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
