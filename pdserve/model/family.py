"""What a model family is to the rest: `loading` builds its model, the engine's runners run it. llama.py is one."""

from collections.abc import Iterator
from typing import Protocol, Self

import torch
from torch import Tensor

from pdserve.model.config import ModelConfig
from pdserve.model.ops import Attention, DeviceOps, GateUp, Linear, Matrix, Ops
from pdserve.model.rope import Rope

Shapes = dict[str, tuple[int, ...]]


class Tensors(Protocol):
    """A checkpoint's tensors by name, each to be taken once."""

    def take(self, name: str) -> Tensor: ...

    def take_matrix(self, name: str) -> Matrix:
        """Return `name`.weight, with `name`.bias where there is one."""
        ...


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
        Returns [len(rows), vocab_size] in the model's dtype.
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
