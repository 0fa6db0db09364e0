"""What a forward pass leaves for a drafting head: products of the hidden states before some layers."""

from dataclasses import dataclass

from torch import Tensor

from pdserve.model.ops import Linear, Ops

Taps = tuple[tuple[int, Linear | None], ...]
"""Of each hidden state that is read: the place of the layer that takes it, or the number of layers for what the model's
head takes; and the matrix [hidden_size, hidden_size] that multiplies it. Where there is one alone it may have none."""


def behind_all(num_layers: int) -> Taps:
    """Return what leaves what the model's head takes, of all tokens."""
    return ((num_layers, None),)


@dataclass(slots=True)
class Tap:
    """Collects one step's features: the sum over some layers of a matrix times the hidden states before the layer.

    That is the product of one wide matrix with these states side by side, without a copy of them.
    """

    parts: Taps
    features: Tensor | None = None  # [num_tokens, hidden_size]

    def reads(self, layer: int) -> bool:
        return any(place == layer for place, _ in self.parts)

    def see(self, ops: Ops, layer: int, hidden: Tensor) -> None:
        """Take in what a layer takes, or the model's head, which nobody overwrites."""
        for place, matrix in self.parts:
            if place == layer:
                made = self.features
                if matrix is None:
                    self.features = hidden
                    continue
                self.features = ops.linear(hidden, matrix) if made is None else ops.linear_add(hidden, matrix, made)
