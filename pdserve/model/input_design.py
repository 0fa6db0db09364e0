"""Rows that layers get of each token beside what the layer before them returns. Free of torch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdserve.model.design import Activation


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """A row of each token for each layer, of the token's id and of its embedding (Gemma 3n, 2025; Gemma 4, 2026).

    A layer adds a product of its row, times a gate that is made of what attention and MLP have left.
    """

    size: int  # of a row
    activation: "Activation"  # of the gate
    eps: float  # of the norms of rows and of what they add
    scalar: str  # the name of a learnt number in each layer, which multiplies the sum
