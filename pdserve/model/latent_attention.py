"""Multi-head latent attention (DeepSeek-V2, 2024), with what expands rows taken into queries and outputs.

So a layer attends as one with a single KV head whose keys are its rows, and whose values are these rows, too. What a
row has beside the latent has no weight in the outputs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from pdserve.model import design
from pdserve.model.attention import Attention
from pdserve.model.heads import HeadLinear
from pdserve.model.ops import Linear, Ops, RmsNorm, decoded, rows_of
from pdserve.model.parallel import row_parallel
from pdserve.model.parts import Parts
from pdserve.model.rope import order


@dataclass(frozen=True, slots=True)
class Queries:
    """The product of a token's input, or of a latent of it, with a norm between."""

    down: Linear | None
    norm: RmsNorm | None
    up: Linear  # [num_heads * (still + turning), hidden_size or q_rank]

    def of(self, ops: Ops, x: Tensor) -> Tensor:
        if self.down is None or self.norm is None:
            return ops.linear(x, self.up)
        return ops.linear(ops.norm(ops.linear(x, self.down), self.norm), self.up)


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """The attention of a layer. A row is a latent and, behind it, the key that turns, in the order of the rope."""

    num_heads: int
    queries: Queries
    row: Linear  # [kv_rank + turning, hidden_size]
    row_norm: RmsNorm  # of the latent
    into_rows: HeadLinear  # [num_heads, kv_rank + turning, still + turning]: what a query's features are over rows
    out_of_rows: HeadLinear  # [num_heads, value_dim, kv_rank]: what a head's output is of its sum of latents
    o: Linear

    def mixed(self, ops: Ops, attention: Attention, index: int, x: Tensor) -> Tensor:
        """Return what each token attends to, before `o`: [num_tokens, num_heads * value_dim]."""
        queries = self.queries.of(ops, x)
        flat = ops.linear_heads(queries.view(len(x), self.num_heads, -1), self.into_rows, num_more=1)
        heads = flat.view(len(x), self.num_heads + 1, -1)
        row = heads[:, -1]
        ops.linear_into(row, x, self.row)
        ops.norm_(row[:, : len(self.row_norm.weight)], self.row_norm)
        sums = attention.run(index, heads, None)
        return ops.linear_heads(sums.view(len(x), self.num_heads, -1), self.out_of_rows)

    def matrices(self) -> Iterator[Linear | HeadLinear]:
        if self.queries.down is not None:
            yield self.queries.down
        yield from (self.queries.up, self.row, self.into_rows, self.out_of_rows, self.o)

    @classmethod
    def build(cls, of: design.LatentAttention, parts: Parts) -> Self:
        config, prefix, tensors, ops = parts.config, f"{parts.prefix}self_attn.", parts.tensors, parts.ops
        num_heads, hidden, rank = config.num_heads, config.hidden_size, parts.rank
        row = tensors.take_matrix(f"{prefix}kv_a_proj_with_mqa", of.row_width, hidden, bias=of.bias)
        norm = RmsNorm(tensors.take(f"{prefix}kv_a_layernorm.weight", (of.kv_rank,)), of.eps)
        each = of.still + of.value_dim
        up = tensors.take_matrix(f"{prefix}kv_b_proj", num_heads * each, of.kv_rank, shard=rank.rows(each))
        found = order(of.turning, of.rope)
        turning = torch.arange(of.turning) if found is None else found
        expanding = decoded(up).data
        expanding = expanding.view(len(expanding) // each, each, -1)
        shard = rank.columns(of.value_dim)
        o = tensors.take_matrix(f"{prefix}o_proj", hidden, num_heads * of.value_dim, bias=of.bias, shard=shard)
        return cls(
            num_heads=len(expanding),
            queries=_queries(of, parts, prefix),
            row=ops.held(rows_of(row, torch.cat((torch.arange(of.kv_rank), of.kv_rank + turning)))),
            row_norm=norm,
            into_rows=ops.held_heads(_into_rows(expanding[:, : of.still], turning)),
            out_of_rows=ops.held_heads(expanding[:, of.still :].contiguous()),
            o=row_parallel(ops.held(o), rank),
        )


def _queries(of: design.LatentAttention, parts: Parts, prefix: str) -> Queries:
    config, tensors, held = parts.config, parts.tensors, parts.ops.held
    outputs, shard = config.num_heads * (of.still + of.turning), parts.rank.rows(of.still + of.turning)
    if of.q_rank is None:
        q = tensors.take_matrix(f"{prefix}q_proj", outputs, config.hidden_size, shard=shard)
        return Queries(None, None, held(q))
    down = tensors.take_matrix(f"{prefix}q_a_proj", of.q_rank, config.hidden_size, bias=of.bias)
    norm = RmsNorm(tensors.take(f"{prefix}q_a_layernorm.weight", (of.q_rank,)), of.eps)
    up = tensors.take_matrix(f"{prefix}q_b_proj", outputs, of.q_rank, shard=shard)
    return Queries(held(down), norm, held(up))


def _into_rows(keys: Tensor, turning: Tensor) -> Tensor:
    """Return what queries are over rows. keys: [num_heads, still, kv_rank]; turning: the order of features that turn.

    A query's features are those that stay still, and then those that turn.
    """
    num_heads, still, rank = keys.shape
    into = keys.new_zeros((num_heads, rank + len(turning), still + len(turning)))
    into[:, :rank, :still] = keys.transpose(1, 2)
    into[:, rank + torch.arange(len(turning)), still + turning] = 1.0
    return into
