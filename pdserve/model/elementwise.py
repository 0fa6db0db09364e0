"""Operations on the features of rows that need no weights of two dimensions."""

from typing import Protocol

import torch
from torch import Tensor


class Elementwise(Protocol):
    """Factors, gates, and features side by side, of one device. x: [num_tokens, features]."""

    def scaled(self, x: Tensor, factor: float | Tensor) -> Tensor:
        """Return x times a number, or times a factor of each feature; x itself where the number is 1."""
        ...

    def sigmoid_gated(self, x: Tensor, gates: Tensor) -> Tensor:
        """Return x * sigmoid(gates); both may be overwritten."""
        ...

    def multiplied(self, x: Tensor, factors: Tensor) -> Tensor:
        """Return x times as many factors, which may be some columns of a wider matrix; x may be overwritten."""
        ...

    def side_by_side(self, *parts: Tensor) -> Tensor:
        """Return the features of all for each token."""
        ...


class TorchElementwise:
    """The same in plain torch."""

    def scaled(self, x: Tensor, factor: float | Tensor) -> Tensor:
        return x if is_one(factor) else x * factor

    def sigmoid_gated(self, x: Tensor, gates: Tensor) -> Tensor:
        return x.mul_(gates.sigmoid_())

    def multiplied(self, x: Tensor, factors: Tensor) -> Tensor:
        return x.mul_(factors)

    def side_by_side(self, *parts: Tensor) -> Tensor:
        return torch.cat(parts, -1)


def is_one(factor: float | Tensor) -> bool:
    return isinstance(factor, float) and factor == 1.0


def times(x: Tensor, scale: float) -> Tensor:
    """Return x * scale; x itself is overwritten."""
    return x if scale == 1.0 else x.mul_(scale)
