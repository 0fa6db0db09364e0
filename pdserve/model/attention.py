"""How a model's tokens see those before them: what a runner plans for a step, and layers ask for."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Protocol

from torch import Tensor

from pdserve.model.ops import QkNorm

Advance = Callable[[Tensor, Seq[Tensor]], tuple[Tensor, Seq[Tensor]]]
"""Computes some tokens of sequences: (rows [sequences, tokens, features], the parts of states before them, each
[sequences, part]) become what is made of the rows, and the parts after them. It may overwrite the parts."""


class Attends(Protocol):
    """One step's attention in layers of a kind, already planned."""

    def run(self, layer: int, qkv: Tensor, qk_norm: QkNorm | None, sinks: Tensor | None = None) -> Tensor:
        """Norm and rotate q and k as the layer does, put K and V into the step's pages, attend over each sequence's.

        qkv: [num_tokens, num_heads + 2 * num_kv_heads, head_dim], the heads of q, then k, then v; may be overwritten.
        sinks: float32 [num_heads], where the layer has them.
        Returns [num_tokens, num_heads * head_dim].
        """
        ...


class Attention(Attends, Protocol):
    """What a step's tokens see of those before them, in all layers."""

    def recur(self, layer: int, rows: Tensor, advance: Advance) -> Tensor:
        """Compute a layer that keeps a state of each sequence. rows: [num_tokens, features]; so is the result."""
        ...
