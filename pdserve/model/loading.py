"""Builds a model from tensors: each that it needs, once, in the right shape, and no others."""

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pdserve.kernels.cpu.layers import INPUT_BITS
from pdserve.model import llama
from pdserve.model.config import ModelConfig
from pdserve.model.family import Model, Tensors
from pdserve.model.groups import Groups
from pdserve.model.ops import ops_for

FAMILIES: dict[str, type[Model]] = {  # by name of architecture; config.ARCHITECTURES has the same names
    "LlamaForCausalLM": llama.Model,
    "MistralForCausalLM": llama.Model,
    "Qwen2ForCausalLM": llama.Model,
    "Qwen3ForCausalLM": llama.Model,
}
DUMMY_STD = 0.02

Weights = Iterable[tuple[str, Tensor | npt.NDArray[np.generic] | Groups]]


def load_model(
    config: ModelConfig,
    weights: Weights,
    dtype: torch.dtype,
    progress: Callable[[float], None] | None = None,
    device: torch.device | str = "cpu",
    input_bits: int = INPUT_BITS,
) -> Model:
    """Build the model from Hugging Face-named tensors, in any order.

    `progress` is called with the share of elements read, up to 1.0. input_bits: of the inputs of quantized products, 8
    or 16. ConfigError names a tensor that is missing, unexpected, given twice or misshapen.
    """
    family = FAMILIES[config.architecture]
    device = torch.device(device)
    tensors = Tensors(config.architecture, family.shapes(config), dtype, device)
    for name, weight in weights:
        if family.ignores(name, config):
            continue
        tensors.add(name, weight if isinstance(weight, Tensor | Groups) else torch.tensor(weight))
        if progress is not None:
            progress(tensors.share)
    tensors.check_complete()
    return family.build(config, tensors, ops_for(device, config.rms_norm_eps, input_bits))


def dummy_weights(config: ModelConfig, seed: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Yield random tensors in place of a checkpoint's, float32: norms near one, the rest small and normal."""
    generator = torch.Generator().manual_seed(seed)
    for name, shape in FAMILIES[config.architecture].shapes(config).items():
        noise = torch.randn(shape, generator=generator) * DUMMY_STD
        yield name, noise + 1.0 if name.endswith("norm.weight") else noise
