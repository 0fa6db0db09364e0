"""Matrices of which each rank has a part, where their products need the other ranks. `ranks.RankedOps` has them.

A matrix whose outputs are divided needs nobody: what it makes is divided alike.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from pdserve.kernels.cpu.layers import Tiles
from pdserve.model.weights import ROWS, Rank, Shard

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from pdserve.kernels.cpu.calls import Calls
    from pdserve.model.ops import Held, Linear


class Collective(Protocol):
    """What a rank does together with the others: all of them call the same methods, in the same order."""

    @property
    def rank(self) -> Rank: ...

    @property
    def device(self) -> "torch.device":
        """Return where this rank computes."""
        ...

    def through(self, calls: "Calls") -> "Collective":
        """Return the same, through other calls of the compiled library."""
        ...

    def all_reduce(self, x: "Tensor", residual: "Tensor | None" = None, scale: float = 1.0) -> "Tensor":
        """Return the sum over all ranks times `scale`, plus the residual, which may be overwritten, as x may.

        Both are contiguous and have the same shape on each rank; the residual is the same on all.
        """
        ...

    def gather(self, x: "Tensor", width: int) -> "Tensor":
        """Return every rank's columns side by side, so many, on the first rank; what others get means nothing."""
        ...


@dataclass(frozen=True, slots=True)
class RowParallel:
    """Some inputs of a matrix: the products of all ranks are to be added."""

    weight: "Linear"


@dataclass(frozen=True, slots=True)
class VocabParallel:
    """Some rows of an embedding or of a head, one for each token of a part of the vocabulary."""

    weight: "Linear"
    first: int  # token
    vocab_size: int  # of all ranks


def row_parallel(weight: "Linear", rank: Rank) -> "Linear":
    """Return a matrix as the rank multiplies it that has these inputs of it."""
    return weight if rank.size == 1 else RowParallel(weight)


def vocab_parallel(weight: "Linear", rank: Rank, vocab_size: int) -> "Linear":
    """Return an embedding or a head as the rank has it that has these rows of it."""
    if rank.size == 1:
        return weight
    first = Shard(ROWS, rank.index, rank.size).span("vocab_size", vocab_size).start
    own = replace(weight, first=first) if isinstance(weight, Tiles) else weight
    return VocabParallel(own, first, vocab_size)


def own_part(weight: "Held") -> "Held":
    """Return what a rank itself multiplies of a matrix."""
    return weight.weight if isinstance(weight, RowParallel | VocabParallel) else weight
