"""A model of random weights that is small, and whose tokens depend on all that it attends to."""

import torch
from held_weights import scaled
from joined_cores import VOCAB
from small_shapes import QWEN_3, SMALL

from pdserve.checkpoint.checkpoint import ChosenQuantization, in_form
from pdserve.model.config import ModelConfig
from pdserve.model.family import Model
from pdserve.model.loading import dummy_weights, load_model


def small_config(vocab_size: int = VOCAB, **sizes: int) -> ModelConfig:
    """Return the configuration of a Qwen 3. `sizes`: fields of `config.json` that differ."""
    return ModelConfig.from_hf({**QWEN_3, **SMALL, "vocab_size": vocab_size, **sizes})


def small_model(
    config: ModelConfig | None = None, dtype: torch.dtype = torch.float32, quantization: ChosenQuantization = "none"
) -> Model:
    config = config or small_config()
    return load_model(config, in_form(scaled(dummy_weights(config)), quantization), dtype)
