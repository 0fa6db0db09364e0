"""What a model asks of attention, whichever backend serves it."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from pdserve.model.layers import Norm


@dataclass(frozen=True, slots=True)
class QkNorm:
    """The norms over each head of q and of k, before they are rotated."""

    q: Norm
    k: Norm


class Attention(Protocol):
    """One step's attention, already planned."""

    def run(self, layer: int, qkv: Tensor, qk_norm: QkNorm | None) -> Tensor:
        """Norm and rotate q and k, put K and V into the step's pages, attend over each sequence's pages.

        qkv: [num_tokens, num_heads + 2 * num_kv_heads, head_dim], the heads of q, then k, then v; may be overwritten.
        Returns [num_tokens, num_heads * head_dim].
        """
        ...
