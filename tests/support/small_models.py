"""A model of random weights that is small, and whose tokens depend on all that it attends to."""

import torch
from held_weights import scaled
from joined_cores import VOCAB

from pdserve.checkpoint.checkpoint import ChosenQuantization, in_form
from pdserve.model.config import ModelConfig
from pdserve.model.family import Model
from pdserve.model.loading import dummy_weights, load_model


def small_config(vocab_size: int = VOCAB, **sizes: int) -> ModelConfig:
    """Return the configuration of a Qwen 3. `sizes`: fields of `config.json` that differ."""
    shape = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "eos_token_id": 5,
    }
    return ModelConfig.from_hf({"architectures": ["Qwen3ForCausalLM"], "vocab_size": vocab_size, **shape, **sizes})


def small_model(
    config: ModelConfig | None = None, dtype: torch.dtype = torch.float32, quantization: ChosenQuantization = "none"
) -> Model:
    config = config or small_config()
    return load_model(config, in_form(scaled(dummy_weights(config)), quantization), dtype)
