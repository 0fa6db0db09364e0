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
from pdserve.model.ops import Linear, Ops, RmsNorm, decoded
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
    """The attention of a layer. Features of rows and of queries are in the order in which the rope turns them."""

    queries: Queries
    row: Linear  # [kv_rank + turning, hidden_size]: the latent, then the key that turns
    row_norm: RmsNorm  # of the latent
    order: Tensor  # int64 [row_width]: of a row that begins with the key that turns
    into_rows: Tensor  # [num_heads, still + turning, row_width]: what each query's features are over rows
    out_of_rows: Tensor  # [num_heads, row_width, value_dim]: what each head's output is of its sum of rows
    o: Linear

    def mixed(self, ops: Ops, attention: Attention, index: int, x: Tensor) -> Tensor:
        """Return what each token attends to, before `o`: [num_tokens, num_heads * value_dim]."""
        num_heads, width, row_width = self.into_rows.shape
        q = self.queries.of(ops, x).view(len(x), num_heads, width)
        rank = len(self.row_norm.weight)
        latent, turning = ops.linear(x, self.row).split((rank, row_width - rank), -1)
        latent = ops.norm(latent.contiguous(), self.row_norm)
        heads = x.new_empty((len(x), num_heads + 1, row_width))
        heads[:, :num_heads] = torch.bmm(q.transpose(0, 1), self.into_rows).transpose(0, 1)
        heads[:, num_heads] = torch.cat((turning, latent), -1).index_select(1, self.order)
        sums = attention.run(index, heads, None).view(len(x), num_heads, row_width)
        return torch.bmm(sums.transpose(0, 1), self.out_of_rows).transpose(0, 1).reshape(len(x), -1)

    def matrices(self) -> Iterator[Linear]:
        """Yield what operations multiply; the products with rows are apart."""
        if self.queries.down is not None:
            yield self.queries.down
        yield from (self.queries.up, self.row, self.o)

    @classmethod
    def build(cls, of: design.LatentAttention, parts: Parts) -> Self:
        config, prefix, tensors, held = parts.config, f"{parts.prefix}self_attn.", parts.tensors, parts.ops.held
        num_heads, hidden, rank = config.num_heads, config.hidden_size, parts.rank
        row = tensors.take_matrix(f"{prefix}kv_a_proj_with_mqa", of.row_width, hidden, bias=of.bias)
        norm = RmsNorm(tensors.take(f"{prefix}kv_a_layernorm.weight", (of.kv_rank,)), of.eps)
        each = of.still + of.value_dim
        up = tensors.take_matrix(f"{prefix}kv_b_proj", num_heads * each, of.kv_rank, shard=rank.rows(each))
        expanding = decoded(up).data
        found = order(of.row_width, of.rope)
        features = torch.arange(of.row_width) if found is None else found
        into, out_of = _absorbed(expanding.view(len(expanding) // each, each, -1), of, features.to(expanding.device))
        shard = rank.columns(of.value_dim)
        o = tensors.take_matrix(f"{prefix}o_proj", hidden, num_heads * of.value_dim, bias=of.bias, shard=shard)
        queries = _queries(of, parts, prefix)
        o_held = row_parallel(held(o), rank)
        return cls(queries, held(row), norm, features.to(expanding.device), into, out_of, o_held)


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


def _absorbed(expanding: Tensor, of: design.LatentAttention, features: Tensor) -> tuple[Tensor, Tensor]:
    """Return products over rows. expanding: [num_heads, still + value_dim, kv_rank], keys and then values.

    features: which of [the key that turns, latent] each feature of a row is. A query's features are those that stay
    still, and then those that turn.
    """
    num_heads, _, rank = expanding.shape
    if rank == 0:  # from a source that only notes what is taken
        return expanding, expanding
    into = expanding.new_zeros((num_heads, of.still + of.turning, of.turning + rank))
    into[:, : of.still, of.turning :] = expanding[:, : of.still]
    turning = torch.arange(of.turning)
    into[:, of.still + turning, turning] = 1.0
    out_of = expanding.new_zeros((num_heads, of.turning + rank, of.value_dim))
    out_of[:, of.turning :] = expanding[:, of.still :].transpose(1, 2)
    return into[:, :, features].contiguous(), out_of[:, features].contiguous()
