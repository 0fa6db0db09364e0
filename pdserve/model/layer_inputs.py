"""Rows of each token for each layer, loaded: see `input_design.LayerInputs`. All ranks compute them whole."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from pdserve.model.design import Activation
from pdserve.model.input_design import LayerInputs as Inputs
from pdserve.model.ops import Linear, Ops, RmsNorm, weight_bytes
from pdserve.model.parallel import vocab_parallel
from pdserve.model.parts import Parts

# Norms come behind these factors, so that they change nothing but what `eps` is beside them: sums of two rows are
# divided by √2, and products by the square root of the hidden size.
SUMMED = 2.0
TABLE = "model.embed_tokens_per_layer"


@dataclass(frozen=True, slots=True)
class InputGate:
    """What one layer adds of its row."""

    gate: Linear  # [size, hidden_size]
    activation: Activation
    projection: Linear  # [hidden_size, size]
    norm: RmsNorm
    scalar: float

    def forward(self, ops: Ops, hidden: Tensor, own: Tensor) -> Tensor:
        """Return the layer's output. hidden is overwritten; own: [num_tokens, size], the layer's rows."""
        let_through = ops.multiplied(ops.activated(hidden, self.gate, self.activation), own)
        hidden = ops.norm_add(ops.linear(let_through, self.projection), self.norm, hidden)
        return ops.scaled(hidden, self.scalar)

    @classmethod
    def build(cls, of: Inputs, parts: Parts) -> Self:
        """parts: of the layer."""
        tensors, held, hidden = parts.tensors, parts.ops.held, parts.config.hidden_size
        return cls(
            gate=held(tensors.take_matrix(f"{parts.prefix}per_layer_input_gate", of.size, hidden)),
            activation=of.activation,
            projection=held(tensors.take_matrix(f"{parts.prefix}per_layer_projection", hidden, of.size)),
            norm=RmsNorm(tensors.take(f"{parts.prefix}post_per_layer_input_norm.weight", (hidden,)), of.eps * SUMMED),
            scalar=float(tensors.take(f"{parts.prefix}{of.scalar}", (1,))),
        )


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """What makes a step's rows, and the gate of each layer."""

    table: Linear  # [vocab_size, num_layers * size]
    table_scale: float
    vocab_size: int
    projection: Linear  # [num_layers * size, hidden_size]
    norm: RmsNorm  # over a layer's part of what the projection makes
    gates: tuple[InputGate, ...]

    def rows(self, ops: Ops, token_ids: Tensor, embedded: Tensor) -> tuple[Tensor, ...]:
        """Return each layer's rows, [num_tokens, size], once for a step. embedded: the first layer's input."""
        size = len(self.norm.weight)
        made, projected = ops.embed(token_ids, self.table, self.table_scale), ops.linear(embedded, self.projection)
        for of_layer, own in zip(projected.split(size, 1), made.split(size, 1), strict=True):
            ops.norm_add(of_layer, self.norm, own)
        rows: tuple[Tensor, ...] = made.split(size, 1)
        return rows

    def matrices(self) -> Iterator[Linear]:
        yield from (self.table, self.projection)
        for each in self.gates:
            yield from (each.gate, each.projection)

    def bytes_read(self, num_rows: int) -> int:
        table, *others = map(weight_bytes, self.matrices())
        return table * num_rows // self.vocab_size + sum(others)

    @classmethod
    def build(cls, of: Inputs, parts: Parts) -> Self:
        config, tensors, rank = parts.config, parts.tensors, parts.rank
        width, hidden = config.num_layers * of.size, config.hidden_size
        table = tensors.take_matrix(TABLE, config.vocab_size, width, shard=rank.rows())
        held, _ = parts.ops.held_embedding(table, tied=False)
        weight = tensors.take("model.per_layer_projection_norm.weight", (of.size,))
        return cls(
            table=vocab_parallel(held, rank, config.vocab_size),
            table_scale=float(torch.tensor(of.size**0.5, dtype=tensors.dtype)),
            vocab_size=config.vocab_size,
            projection=parts.ops.held(tensors.take_matrix("model.per_layer_model_projection", width, hidden)),
            norm=RmsNorm(weight, of.eps * hidden),
            gates=tuple(
                InputGate.build(of, replace(parts, prefix=f"model.layers.{index}."))
                for index in rank.layers(config.num_layers)
            ),
        )


def token_bytes(of: Inputs, num_layers: int, item: int) -> int:
    """Return the bytes of a token's rows of all layers while they are made: from the table, and projected."""
    return 2 * num_layers * of.size * item
