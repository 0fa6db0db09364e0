"""How a model's tokens see those before them: what a runner plans for a step, and layers ask for."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Protocol

from torch import Tensor

from pdserve.kernels.cpu.attention import QkNorm
from pdserve.kernels.cpu.states import Recurrence

Advance = Callable[[Tensor, Seq[Tensor]], tuple[Tensor, Seq[Tensor]]]
"""Computes some tokens of sequences: (rows [sequences, tokens, features], the parts of states before them, each
[sequences, part]) become what is made of the rows, and the parts after them. It may overwrite the parts."""


class Recurs(Protocol):
    """What a layer with a state computes between its two products."""

    @property
    def recurrence(self) -> Recurrence:
        """Return it as the compiled library computes it."""
        ...

    def in_torch(self, taken: Tensor, recur: Callable[[Tensor, Advance], Tensor]) -> Tensor:
        """Compute it. `recur` brings each row together with the state before it, and keeps the state after it."""
        ...


class Attends(Protocol):
    """One step's attention in layers of a kind, already planned."""

    def run(self, layer: int, qkv: Tensor, qk_norm: QkNorm | None, sinks: Tensor | None = None) -> Tensor:
        """Norm and rotate q and k as the layer does, put K and V into the step's pages, attend over each sequence's.

        qkv: [num_tokens, num_heads + 2 * num_kv_heads, head_dim], the heads of q, then k, then v; may be overwritten.
        Or q alone, [num_tokens, num_heads, head_dim], to attend to K and V that the layer has put there in this step.
        sinks: float32 [num_heads], where the layer has them.
        Returns [num_tokens, num_heads * head_dim]; of latent rows, each head's result may be of the latent alone.
        """
        ...


class Attention(Attends, Protocol):
    """What a step's tokens see of those before them, in all layers."""

    def recur(self, layer: int, taken: Tensor, of: Recurs) -> Tensor:
        """Compute a layer that keeps a state of each sequence. taken: [num_tokens, features]; so is the result."""
        ...
