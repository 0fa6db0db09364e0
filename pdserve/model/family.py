"""What `loading` and the engine's runners expect of a model family, and the tensors it is built from."""

from collections.abc import Iterator
from math import prod
from typing import Protocol, Self

import torch
from torch import Tensor

from pdserve.errors import ConfigError
from pdserve.model.config import ModelConfig
from pdserve.model.groups import Groups
from pdserve.model.ops import Attention, Dense, DeviceOps, GateUp, Linear, Matrix, Ops, Quantized
from pdserve.model.rope import Rope

Shapes = dict[str, tuple[int, ...]]
NAMED_AT_MOST = 3  # missing tensors that an error names; it counts the others


class Tensors:
    """A checkpoint's tensors by name, in the wanted dtype on the wanted device.

    A model takes each of them once, so that no two copies pile up.
    """

    def __init__(self, architecture: str, shapes: Shapes, dtype: torch.dtype, device: torch.device) -> None:
        self._architecture = architecture
        self._shapes = shapes
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
        """Take in a tensor; ConfigError if it is unexpected, given twice or misshapen."""
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
        """Raise ConfigError if tensors are missing."""
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
        """Return `name`.weight, with `name`.bias where there is one."""
        bias = self.take(f"{name}.bias") if f"{name}.bias" in self._tensors else None
        weight = self._tensors.pop(f"{name}.weight")
        return Quantized(weight, self._dtype, bias) if isinstance(weight, Groups) else Dense(weight, bias)


class Model(Protocol):
    """A model ready to run; its weights are never written again."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def rope(self) -> Rope: ...

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of hidden states, K and V."""
        ...

    @property
    def device(self) -> torch.device: ...

    def forward(self, token_ids: Tensor, attention: Attention, rows: Tensor | None) -> Tensor:
        """Compute K and V of every token, and logits of some.

        token_ids: int64 [num_tokens]. rows: the tokens whose logits are wanted, or None for all of them.
        Returns [len(rows), vocab_size] in the model's dtype, or in float32: see `Ops.logits`.
        """
        ...

    def hidden(self, token_ids: Tensor, attention: Attention, rows: Tensor | None) -> Tensor:
        """Do as `forward`, but return what logits are computed from: [len(rows), hidden_size]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of at least one row that `hidden` has returned."""
        ...

    def matrices(self) -> Iterator[Linear | GateUp]:
        """Yield all that is multiplied."""
        ...

    def with_ops(self, ops: Ops) -> Self:
        """Return the same model over other operations."""
        ...

    @classmethod
    def build(cls, config: ModelConfig, tensors: Tensors, ops: DeviceOps) -> Self:
        """Put a model together from all tensors that `shapes` names."""
        ...

    @staticmethod
    def shapes(config: ModelConfig) -> Shapes:
        """Return the shape of every tensor the model needs, in the order checkpoints hold them."""
        ...

    @staticmethod
    def ignores(name: str, config: ModelConfig) -> bool:
        """Say whether checkpoints may hold a tensor of this name that the model does not read."""
        ...
