"""What a forward pass leaves for a drafting head: products of the hidden states before some layers."""

from dataclasses import dataclass

from torch import Tensor

from pdserve.model.ops import Linear, Ops


@dataclass(slots=True)
class Tap:
    """Collects one step's features: the sum over some layers of a matrix times the hidden states before the layer.

    That is the product of one wide matrix with these states side by side, without a copy of them.
    """

    parts: tuple[tuple[int, Linear], ...]  # a layer's place, and the matrix [hidden_size, hidden_size]
    features: Tensor | None = None  # [num_tokens, hidden_size]

    def see(self, ops: Ops, layer: int, hidden: Tensor) -> None:
        """Take in the hidden states before a layer."""
        for place, matrix in self.parts:
            if place == layer:
                made = self.features
                self.features = ops.linear(hidden, matrix) if made is None else ops.linear_add(hidden, matrix, made)
