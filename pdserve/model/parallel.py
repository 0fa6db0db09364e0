"""Matrices of which each rank has a part, where their products need the other ranks. `ranks.RankedOps` has them.

A matrix whose outputs are divided needs nobody: what it makes is divided alike.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pdserve.model.weights import ROWS, Rank, Shard

if TYPE_CHECKING:
    from torch import Tensor

    from pdserve.model.ops import Linear


class Collective(Protocol):
    """What a rank does together with the others: all of them call the same methods, in the same order."""

    @property
    def rank(self) -> Rank: ...

    def all_reduce(self, x: "Tensor") -> None:
        """Put the sum over all ranks in the place of x, which is contiguous and has the same shape on each."""
        ...

    def gather(self, x: "Tensor") -> "list[Tensor]":
        """Return every rank's x, on the first rank; on others nothing. All have the same shape."""
        ...


@dataclass(frozen=True, slots=True)
class RowParallel:
    """Some inputs of a matrix: the products of all ranks are to be added."""

    weight: "Linear"


@dataclass(frozen=True, slots=True)
class VocabParallel:
    """Some rows of an embedding or of a head, one for each token of a part of the vocabulary."""

    weight: "Linear"
    spans: tuple[range, ...]  # of each rank


def row_parallel(weight: "Linear", rank: Rank) -> "Linear":
    """Return a matrix as the rank multiplies it that has these inputs of it."""
    return weight if rank.size == 1 else RowParallel(weight)


def vocab_parallel(weight: "Linear", rank: Rank, vocab_size: int) -> "Linear":
    """Return an embedding or a head as the rank has it that has these rows of it."""
    if rank.size == 1:
        return weight
    spans = (Shard(ROWS, index, rank.size).span("vocab_size", vocab_size) for index in range(rank.size))
    return VocabParallel(weight, tuple([range(span.start, span.stop) for span in spans]))
