"""The operations of one rank of several: those of its device, and sums over all ranks where a matrix is divided."""

from dataclasses import dataclass

from torch import Tensor

from pdserve.kernels.cpu.experts import SharedRows
from pdserve.kernels.cpu.layers import Tiles
from pdserve.model.activations import MlpActivation
from pdserve.model.design import Activation
from pdserve.model.heads import HeadLinear
from pdserve.model.ops import GateUp, Linear, Mixture, Norm, Ops, RmsNorm, dense
from pdserve.model.parallel import Collective, RowParallel, VocabParallel


@dataclass(frozen=True, slots=True)
class PartNorm(RmsNorm):
    """A norm over more features than the rank has: over those of all ranks."""

    width: int


class RankedOps:
    """Hidden states are the same on all ranks, to the bit: sums are made once and sent to all."""

    def __init__(self, ops: Ops, ranks: Collective) -> None:
        """ops: those of this rank's device."""
        self._ops = ops
        self._ranks = ranks

    def embed(self, token_ids: Tensor, weight: Linear, scale: float = 1.0) -> Tensor:
        """Sum the rows that this rank has, and zeros for other tokens."""
        assert isinstance(weight, VocabParallel)
        if isinstance(weight.weight, Tiles):
            return self.all_reduce(self._ops.embed(token_ids, weight.weight, scale))
        own = token_ids - weight.first
        others = (own < 0) | (own >= len(dense(weight.weight).data))
        rows = self._ops.embed(own.masked_fill_(others, 0), weight.weight, scale)
        return self.all_reduce(rows.masked_fill_(others[:, None], 0.0))

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        return self._ops.norm(x, norm)

    def norm_(self, x: Tensor, norm: RmsNorm) -> None:
        if not isinstance(norm, PartNorm):
            self._ops.norm_(x, norm)
            return
        wide = x.float()
        squares = self.all_reduce(wide.square().sum(-1, keepdim=True))
        x.copy_((wide * (squares / norm.width + norm.eps).rsqrt()).to(x.dtype) * norm.weight)

    def norm_add(self, x: Tensor, norm: RmsNorm, residual: Tensor) -> Tensor:
        return self._ops.norm_add(x, norm, residual)

    def linear(self, x: Tensor, weight: Linear) -> Tensor:
        if not isinstance(weight, RowParallel):
            return self._ops.linear(x, weight)
        return self.all_reduce(self._ops.linear(x, weight.weight))

    def linear_into(self, out: Tensor, x: Tensor, weight: Linear) -> None:
        self._ops.linear_into(out, x, weight)

    def linear_heads(self, x: Tensor, weight: HeadLinear, num_more: int = 0) -> Tensor:
        return self._ops.linear_heads(x, weight, num_more)

    def linear_add(self, x: Tensor, weight: Linear, residual: Tensor, scale: float = 1.0) -> Tensor:
        if not isinstance(weight, RowParallel):
            return self._ops.linear_add(x, weight, residual, scale)
        return self._ranks.all_reduce(self._ops.linear(x, weight.weight), residual, scale)

    def logits(self, x: Tensor, weight: Linear, scale: float = 1.0, cap: float | None = None) -> Tensor:
        """Return the logits of the whole vocabulary on the first rank; what others return means nothing."""
        assert isinstance(weight, VocabParallel)
        return self._ranks.gather(self._ops.logits(x, weight.weight, scale, cap), weight.vocab_size)

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._ranks.all_reduce(x)

    def mix(
        self, x: Tensor, experts: Mixture, shared: SharedRows | None, residual: Tensor | None, scale: float
    ) -> Tensor:
        return self._ranks.all_reduce(self._ops.mix(x, experts, shared, None, scale), residual)

    def gated(self, x: Tensor, weight: Linear | GateUp, activation: Activation) -> Tensor:
        return self._ops.gated(x, weight, activation)

    def activated(self, x: Tensor, weight: Linear, activation: MlpActivation) -> Tensor:
        return self._ops.activated(x, weight, activation)

    def scaled(self, x: Tensor, factor: float | Tensor) -> Tensor:
        return self._ops.scaled(x, factor)

    def sigmoid_gated(self, x: Tensor, gates: Tensor) -> Tensor:
        return self._ops.sigmoid_gated(x, gates)

    def multiplied(self, x: Tensor, factors: Tensor) -> Tensor:
        return self._ops.multiplied(x, factors)

    def side_by_side(self, *parts: Tensor) -> Tensor:
        return self._ops.side_by_side(*parts)
