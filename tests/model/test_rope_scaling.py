"""Each scaling gives the angles transformers gives."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from pdserve.model.config import ModelConfig
from pdserve.model.rope import Rope, rotate_

SCALINGS = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 512},
}


@pytest.mark.parametrize("kind", SCALINGS)
def test_rotation_is_that_of_transformers(kind: str) -> None:
    parameters = {"rope_type": kind, "rope_theta": 10000.0, **SCALINGS[kind]}
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "max_position_embeddings": 2048}
    theirs = LlamaConfig(**sizes, rope_parameters=parameters, architectures=["LlamaForCausalLM"])
    positions = torch.tensor([0, 1, 511, 512, 2000])
    heads = torch.randn(len(positions), 3, 64, generator=torch.Generator().manual_seed(0))
    cos, sin = LlamaRotaryEmbedding(theirs)(heads, positions[None])
    expected, _ = apply_rotary_pos_emb(heads[None].transpose(1, 2), heads[None].transpose(1, 2), cos, sin)
    config = ModelConfig.from_hf(theirs.to_dict())
    rope = Rope(config.head_dim, config.design.layers[0].attention.rope, torch.device("cpu"))
    ours = heads.clone()
    rotate_(ours, rope.angles(positions, torch.float32))
    torch.testing.assert_close(ours, expected[0].transpose(0, 1), atol=1e-4, rtol=1e-4)
