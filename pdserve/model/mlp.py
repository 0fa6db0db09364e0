"""The MLPs of a model's layers, as values. A layer knows no more of its MLP than this protocol."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, Self

from torch import Tensor

from pdserve.model import design
from pdserve.model.design import Activation
from pdserve.model.family import TensorSource
from pdserve.model.ops import (
    DeviceOps,
    GateUp,
    Linear,
    Matrix,
    MlpActivation,
    Ops,
    XIelu,
    rows_of,
    weight_bytes,
)
from pdserve.model.weights import Rank


class Mlp(Protocol):
    """What a layer does with each token alone."""

    def forward(self, ops: Ops, x: Tensor, residual: Tensor | None, scale: float = 1.0) -> Tensor:
        """Return residual + mlp(x) * scale, all [num_tokens, hidden_size]; the residual may be overwritten.

        Returns mlp(x) if there is no residual.
        """
        ...

    def matrices(self) -> Iterator[Linear | GateUp]:
        """Yield all that is multiplied."""
        ...

    def bytes_read(self, num_rows: int) -> int:
        """Return the bytes of weights that `num_rows` tokens need, as expected before they are known."""
        ...


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """down(activation(gate(x)) * up(x))."""

    gate_up: Linear | GateUp
    activation: Activation
    down: Linear

    def forward(self, ops: Ops, x: Tensor, residual: Tensor | None, scale: float = 1.0) -> Tensor:
        return _down(ops, ops.gated(x, self.gate_up, self.activation), self.down, residual, scale)

    def matrices(self) -> Iterator[Linear | GateUp]:
        yield from (self.gate_up, self.down)

    def bytes_read(self, num_rows: int) -> int:
        return sum(map(weight_bytes, self.matrices()))

    @classmethod
    def build(
        cls, prefix: str, of: design.GatedMlp, hidden_size: int, tensors: TensorSource, ops: DeviceOps, rank: Rank
    ) -> Self:
        inner, rows = of.inner_size, rank.rows()

        def taken(name: str) -> Matrix:
            return tensors.take_matrix(f"{prefix}{name}_proj", inner, hidden_size, bias=of.bias, shard=rows)

        if of.fused:
            both = tensors.take_matrix(f"{prefix}gate_up_proj", 2 * inner, hidden_size, bias=of.bias)
            span = slice(0, inner) if rows is None else rows.span(f"{prefix}gate_up_proj", inner)
            gate, up = rows_of(both, span), rows_of(both, slice(inner + span.start, inner + span.stop))
        else:
            gate, up = taken("gate"), taken("up")
        down = tensors.take_matrix(f"{prefix}down_proj", hidden_size, inner, bias=of.bias, shard=rank.columns())
        return cls(ops.held_gate_up(gate, up), of.activation, ops.held(down))


@dataclass(frozen=True, slots=True)
class PlainMlp:
    """down(activation(up(x)))."""

    up: Linear
    activation: MlpActivation
    down: Linear

    def forward(self, ops: Ops, x: Tensor, residual: Tensor | None, scale: float = 1.0) -> Tensor:
        return _down(ops, ops.activated(x, self.up, self.activation), self.down, residual, scale)

    def matrices(self) -> Iterator[Linear | GateUp]:
        yield from (self.up, self.down)

    def bytes_read(self, num_rows: int) -> int:
        return sum(map(weight_bytes, self.matrices()))

    @classmethod
    def build(
        cls, prefix: str, of: design.PlainMlp, hidden_size: int, tensors: TensorSource, ops: DeviceOps, rank: Rank
    ) -> Self:
        inner = of.inner_size
        up = tensors.take_matrix(f"{prefix}{of.up}", inner, hidden_size, bias=of.bias, shard=rank.rows())
        down = tensors.take_matrix(f"{prefix}{of.down}", hidden_size, inner, bias=of.bias, shard=rank.columns())
        activation: MlpActivation = of.activation
        if of.activation is Activation.XIELU:
            scalars = (tensors.take(f"{prefix}act_fn.{name}", (1,)) for name in ("alpha_p", "alpha_n"))
            activation = XIelu(*scalars)
        return cls(ops.held(up), activation, ops.held(down))


def build_mlp(
    prefix: str, of: design.Mlp, hidden_size: int, tensors: TensorSource, ops: DeviceOps, rank: Rank
) -> GatedMlp | PlainMlp:
    """Put a layer's MLP together from the tensors below `prefix`."""
    if isinstance(of, design.GatedMlp):
        return GatedMlp.build(prefix, of, hidden_size, tensors, ops, rank)
    return PlainMlp.build(prefix, of, hidden_size, tensors, ops, rank)


def _down(ops: Ops, inner: Tensor, weight: Linear, residual: Tensor | None, scale: float) -> Tensor:
    return ops.linear(inner, weight) if residual is None else ops.linear_add(inner, weight, residual, scale)
