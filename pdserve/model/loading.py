"""Turn tensors into a model: every tensor it needs, each once, in the right shape, and no others."""

from collections.abc import Callable, Iterable, Iterator
from math import prod

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pdserve.errors import ConfigError
from pdserve.model import llama
from pdserve.model.config import ModelConfig
from pdserve.model.family import Model
from pdserve.model.groups import Groups
from pdserve.model.ops import Dense, Matrix, Quantized, ops_for

FAMILIES: dict[str, type[Model]] = {  # by name of architecture; config.ARCHITECTURES has the same names
    "LlamaForCausalLM": llama.Model,
    "MistralForCausalLM": llama.Model,
    "Qwen2ForCausalLM": llama.Model,
    "Qwen3ForCausalLM": llama.Model,
}
NAMED_AT_MOST = 3  # missing tensors an error names before it only counts
DUMMY_STD = 0.02

Weights = Iterable[tuple[str, Tensor | npt.NDArray[np.generic] | Groups]]


def load_model(
    config: ModelConfig,
    weights: Weights,
    dtype: torch.dtype,
    progress: Callable[[float], None] | None = None,
    device: torch.device | str = "cpu",
) -> Model:
    """Build the model from Hugging Face-named tensors, in any order.

    `progress` is called with the share of elements read, up to 1.0. ConfigError names a tensor that is missing,
    unexpected, given twice or misshapen.
    """
    family = FAMILIES[config.architecture]
    device = torch.device(device)
    loaded = _Loaded(config, dtype, device)
    for name, weight in weights:
        if family.ignores(name, config):
            continue
        loaded.add(name, weight if isinstance(weight, Tensor | Groups) else torch.tensor(weight))
        if progress is not None:
            progress(loaded.share)
    loaded.check_complete()
    return family.build(config, loaded, ops_for(device, config.rms_norm_eps))


def dummy_weights(config: ModelConfig, seed: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Yield random tensors in place of a checkpoint's, float32: norms near one, the rest small and normal."""
    generator = torch.Generator().manual_seed(seed)
    for name, shape in FAMILIES[config.architecture].shapes(config).items():
        noise = torch.randn(shape, generator=generator) * DUMMY_STD
        yield name, noise + 1.0 if name.endswith("norm.weight") else noise


class _Loaded:
    """Tensors in the wanted dtype on the wanted device; a model takes them one by one, so that no two copies pile up.

    A rank that holds a part of each matrix would cut it out in `add`.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._architecture = config.architecture
        self._shapes = FAMILIES[config.architecture].shapes(config)
        self._total = sum(map(prod, self._shapes.values()))
        self._num_elements = 0
        self._dtype = dtype
        self._device = device
        self._tensors: dict[str, Tensor | Groups] = {}

    @property
    def share(self) -> float:
        """Return how much of the model has been added, up to 1.0."""
        return self._num_elements / self._total

    def add(self, name: str, tensor: Tensor | Groups) -> None:
        if name not in self._shapes:
            raise ConfigError(f"{name}: not a tensor of {self._architecture}")
        if name in self._tensors:
            raise ConfigError(f"{name}: given twice")
        if tuple(tensor.shape) != self._shapes[name]:
            raise ConfigError(f"{name}: shape {tuple(tensor.shape)}, the config asks for {self._shapes[name]}")
        if isinstance(tensor, Tensor):
            tensor = tensor.to(device=self._device, dtype=self._dtype).contiguous()
        self._tensors[name] = tensor
        self._num_elements += prod(tensor.shape)

    def check_complete(self) -> None:
        missing = [name for name in self._shapes if name not in self._tensors]
        if missing:
            more = f" and {len(missing) - NAMED_AT_MOST} more" if len(missing) > NAMED_AT_MOST else ""
            raise ConfigError(f"{', '.join(missing[:NAMED_AT_MOST])}{more}: missing from the weights")

    def take(self, name: str) -> Tensor:
        taken = self._tensors.pop(name)
        if isinstance(taken, Groups):
            return Quantized(taken, self._dtype).dense().data.to(self._device)
        return taken

    def take_matrix(self, name: str) -> Matrix:
        bias = self.take(f"{name}.bias") if f"{name}.bias" in self._tensors else None
        weight = self._tensors.pop(f"{name}.weight")
        return Quantized(weight, self._dtype, bias) if isinstance(weight, Groups) else Dense(weight, bias)
