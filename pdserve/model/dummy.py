"""Random weights with a model's names and shapes, for tests and for trying a model's speed without its weights."""

from collections.abc import Iterator

import torch
from torch import Tensor

from pdserve.model.config import ModelConfig
from pdserve.model.names import hf_shapes

WEIGHT_STD = 0.02


def dummy_weights(config: ModelConfig, seed: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor a checkpoint of `config` holds, float32: norms near one, the rest small and normal."""
    generator = torch.Generator().manual_seed(seed)
    for name, shape in hf_shapes(config).items():
        noise = torch.randn(shape, generator=generator) * WEIGHT_STD
        yield name, noise + 1.0 if name.endswith("norm.weight") else noise
