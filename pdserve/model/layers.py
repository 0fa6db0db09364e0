"""A model's layers, loaded: each computes what its `design` says, over the operations of a device."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol, Self

import torch
from torch import Tensor

from pdserve.kernels.cpu.attention import QkNorm
from pdserve.model import design, state_design
from pdserve.model.attention import Attention
from pdserve.model.beside_experts import BesideExperts
from pdserve.model.latent_attention import LatentAttention
from pdserve.model.latent_experts import LatentExperts
from pdserve.model.mlp import Mlp, build_mlp
from pdserve.model.ops import Dense, Held, Linear, Matrix, Norm, Ops, Quantized, RmsNorm, decoded, joined, rows_of
from pdserve.model.parallel import row_parallel
from pdserve.model.parts import Parts
from pdserve.model.ranks import PartNorm
from pdserve.model.recurrent import build_recurrent
from pdserve.model.rope import order
from pdserve.model.state_space import LoneSpace, StateSpace


@dataclass(frozen=True, slots=True)
class WideNorm:
    """RMS norms over all heads of q together and over all of k."""

    q: RmsNorm
    k: RmsNorm


@dataclass(frozen=True, slots=True)
class SelfAttention:
    """q, k and v, and what is made of them."""

    qkv: Linear  # q alone, where the layer reads keys and values of another one
    qk_norm: QkNorm | WideNorm | None
    o: Linear
    head_dim: int
    sinks: Tensor | None = None  # float32 [num_heads]
    gate: Linear | None = None  # [num_heads * head_dim, hidden_size]

    def mixed(self, ops: Ops, attention: Attention, index: int, x: Tensor) -> Tensor:
        """Return what each token attends to, before `o`: [num_tokens, num_heads * head_dim]."""
        qkv, norm = ops.linear(x, self.qkv), self.qk_norm
        if isinstance(norm, WideNorm):
            q_width, k_width = len(norm.q.weight), len(norm.k.weight)
            ops.norm_(qkv[:, :q_width], norm.q)
            ops.norm_(qkv[:, q_width : q_width + k_width], norm.k)
            norm = None
        attended = attention.run(index, qkv.view(len(qkv), -1, self.head_dim), norm, self.sinks)
        return attended if self.gate is None else ops.sigmoid_gated(attended, ops.linear(x, self.gate))

    def matrices(self) -> Iterator[Linear]:
        yield from (self.qkv, self.o)
        if self.gate is not None:
            yield self.gate

    @classmethod
    def build(cls, of: design.SelfAttention, parts: Parts, other: Matrix | None = None) -> Self:
        """other: a matrix whose inputs come behind those of `o`."""
        parts = replace(parts, config=parts.config.with_heads(of.heads))
        config, rank, prefix = parts.config, parts.rank, f"{parts.prefix}{of.block}."
        head_dim, features = config.head_dim, order(config.head_dim, of.rope)
        unit = rank.query_unit(config.num_heads, config.num_kv_heads)
        matrices, gate = _qkv(of, parts, prefix, unit * head_dim), None
        if of.gated:
            own = rank.query_heads(config.num_heads, config.num_kv_heads)
            heads = torch.arange((own.stop - own.start) * 2 * head_dim).view(-1, 2, head_dim)
            queries, gate = (rows_of(matrices[0], heads[:, place].flatten()) for place in (0, 1))
            matrices[0] = queries
        if features is not None:
            matrices[:2] = [rows_of(matrix, _in_each_head(features, matrix)) for matrix in matrices[:2]]
        norm = _qk_norm(of.qk_norm, parts, prefix, features)
        o = parts.tensors.take_matrix(
            f"{prefix}{of.o}",
            config.hidden_size,
            config.num_heads * head_dim,
            bias=of.o_bias,
            shard=rank.columns(unit * head_dim),
        )
        o = o if other is None else _side_by_side(o, other)
        sinks = None
        if of.scores.has_sinks:
            sinks = parts.tensors.take(f"{prefix}sinks", (config.num_heads,), rank.rows(unit), exact=True)
        held = parts.ops.held
        gate_held = None if gate is None else held(gate)
        return cls(held(joined(*matrices)), norm, row_parallel(held(o), rank), head_dim, sinks, gate_held)


@dataclass(frozen=True, slots=True)
class Beside:
    """Attention and a state space over the same input."""

    attention: SelfAttention  # whose `o` takes what both make
    space: StateSpace
    attention_scales: tuple[float, float]

    @property
    def o(self) -> Linear:
        return self.attention.o

    def mixed(self, ops: Ops, attention: Attention, index: int, x: Tensor) -> Tensor:
        """Return what each token attends to, and beside it what its state makes."""
        first, last = self.attention_scales
        made = self.space.mixed(ops, attention, index, x)
        attended = self.attention.mixed(ops, attention, index, ops.scaled(x, first))
        return ops.side_by_side(ops.scaled(attended, last), made)

    def matrices(self) -> Iterator[Linear]:
        yield from (*self.attention.matrices(), *self.space.matrices())

    @classmethod
    def build(cls, of: design.Beside, parts: Parts) -> Self:
        space, o = StateSpace.build(of.space, parts, of.space_scale)
        return cls(SelfAttention.build(of.attention, parts, o), space, of.attention_scales)


class MixesTokens(Protocol):
    """The attention of a layer."""

    @property
    def o(self) -> Linear: ...

    def mixed(self, ops: Ops, attention: Attention, index: int, x: Tensor) -> Tensor:
        """Return what each token attends to, before `o`."""
        ...

    def matrices(self) -> Iterator[Held]:
        """Yield all that is multiplied."""
        ...


@dataclass(frozen=True, slots=True)
class Sequential:
    """Attention, then the MLP over what attention has added; norms before or after each of them, or both.

    A layer may have attention alone, or an MLP alone.
    """

    before_attention: Norm | None
    attention: MixesTokens | None
    after_attention: RmsNorm | None
    before_mlp: Norm | None
    mlp: Mlp | None
    after_mlp: RmsNorm | None
    residual_scale: float
    scalar: float  # of what the layer returns

    def forward(self, ops: Ops, attention: Attention, index: int, hidden: Tensor, rows: Tensor | None) -> Tensor:
        """Return the layer's output of `rows`, or of all tokens. index: the layer's place. hidden is overwritten."""
        return ops.scaled(self._forward(ops, attention, index, hidden, rows), self.scalar)

    def _forward(self, ops: Ops, attention: Attention, index: int, hidden: Tensor, rows: Tensor | None) -> Tensor:
        hidden = self._attended(ops, attention, index, hidden, rows)
        if self.mlp is None or len(hidden) == 0:
            return hidden
        x = _normed(ops, hidden, self.before_mlp)
        if self.after_mlp is None:
            return self.mlp.forward(ops, x, hidden, self.residual_scale)
        return ops.norm_add(self.mlp.forward(ops, x, None), self.after_mlp, hidden)

    def _attended(self, ops: Ops, attention: Attention, index: int, hidden: Tensor, rows: Tensor | None) -> Tensor:
        """Return `rows` with what attention adds."""
        if self.attention is None:
            return _chosen(hidden, rows)
        mixed = self.attention.mixed(ops, attention, index, _normed(ops, hidden, self.before_attention))
        hidden, mixed = _chosen(hidden, rows), _chosen(mixed, rows)
        if len(hidden) == 0:
            return hidden
        if self.after_attention is None:
            return ops.linear_add(mixed, self.attention.o, hidden, self.residual_scale)
        return ops.norm_add(ops.linear(mixed, self.attention.o), self.after_attention, hidden)

    def matrices(self) -> Iterator[Held]:
        for part in (self.attention, self.mlp):
            if part is not None:
                yield from part.matrices()

    @classmethod
    def build(cls, of: design.Sequential, parts: Parts) -> Self:
        nothing = design.Around(None)
        first = nothing if of.attention is None else of.around_attention
        second = nothing if of.mlp is None else of.around_mlp
        return cls(
            before_attention=parts.norm_or_none(first.before, of.norm),
            attention=None if of.attention is None else _attention(of.attention, parts),
            after_attention=parts.after(first.after, of.norm),
            before_mlp=parts.norm_or_none(second.before, of.norm),
            mlp=None if of.mlp is None else _mlp(of.mlp, parts, of.mlp_name),
            after_mlp=parts.after(second.after, of.norm),
            residual_scale=of.residual_scale,
            scalar=1.0 if of.scalar is None else float(parts.tensors.take(f"{parts.prefix}{of.scalar}", (1,))),
        )


@dataclass(frozen=True, slots=True)
class Parallel:
    """Attention and MLP side by side, over one norm of the layer's input."""

    norm: Norm
    attention: MixesTokens
    mlp: Mlp

    def forward(self, ops: Ops, attention: Attention, index: int, hidden: Tensor, rows: Tensor | None) -> Tensor:
        """Return the layer's output of `rows`, or of all tokens. index: the layer's place. hidden is overwritten."""
        x = ops.norm(hidden, self.norm)
        mixed = self.attention.mixed(ops, attention, index, x)
        hidden, mixed, x = _chosen(hidden, rows), _chosen(mixed, rows), _chosen(x, rows)
        if len(hidden) == 0:
            return hidden
        return self.mlp.forward(ops, x, ops.linear_add(mixed, self.attention.o, hidden))

    def matrices(self) -> Iterator[Held]:
        yield from (*self.attention.matrices(), *self.mlp.matrices())

    @classmethod
    def build(cls, of: design.Parallel, parts: Parts) -> Self:
        return cls(parts.norm(of.before, of.norm), SelfAttention.build(of.attention, parts), _mlp(of.mlp, parts))


Layer = Sequential | Parallel


def build_layer(of: design.Layer, parts: Parts) -> Layer:
    return Sequential.build(of, parts) if isinstance(of, design.Sequential) else Parallel.build(of, parts)


def _attention(of: design.Mixer, parts: Parts) -> MixesTokens:
    match of:
        case design.SelfAttention():
            return SelfAttention.build(of, parts)
        case design.LatentAttention():
            return LatentAttention.build(of, parts)
        case design.Beside():
            return Beside.build(of, parts)
        case state_design.StateSpace():
            return LoneSpace.build(of, parts)
        case _:
            return build_recurrent(of, parts)


def _normed(ops: Ops, x: Tensor, norm: Norm | None) -> Tensor:
    return x if norm is None else ops.norm(x, norm)


def _chosen(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x.index_select(0, rows)


def _mlp(of: design.Mlp, parts: Parts, name: str = "mlp") -> Mlp:
    if isinstance(of, design.BesideExperts):
        return BesideExperts.build(of, parts, name)
    prefix = of.within(parts.prefix) if isinstance(of, design.Experts) else f"{parts.prefix}{name}."
    if isinstance(of, design.Experts) and of.latent is not None:
        return LatentExperts.build(prefix, of, of.latent, parts)
    return build_mlp(prefix, of, parts.config.hidden_size, parts.tensors, parts.ops, parts.rank)


def _qkv(of: design.SelfAttention, parts: Parts, prefix: str, unit: int) -> list[Matrix]:
    """Return the rank's matrices of q, k and v. unit: features of queries that stay together."""
    config, tensors, hidden = parts.config, parts.tensors, of.num_inputs * parts.config.hidden_size
    kv, each_query = config.num_kv_heads * config.head_dim, 2 if of.gated else 1
    widths = {"q": config.num_heads * config.head_dim * each_query, "k": kv, "v": kv}
    kv_rows = parts.rank.kv_rows(config.num_kv_heads, config.head_dim)
    shards = {"q": parts.rank.rows(unit * each_query), "k": kv_rows, "v": kv_rows}
    if not of.fused:
        names = "q" if of.reads is not None else "qkv" if of.has_values else "qk"
        matrices = [
            tensors.take_matrix(f"{prefix}{each}_proj", widths[each], hidden, bias=of.qkv_bias, shard=shards[each])
            for each in names
        ]
        return [*matrices, matrices[-1]] if names == "qk" else matrices
    fused = tensors.take_matrix(f"{prefix}qkv_proj", sum(widths.values()), hidden, bias=of.qkv_bias)
    matrices = list[Matrix]()
    first = 0
    for each, width in widths.items():
        shard = shards[each]
        span = slice(0, width) if shard is None else shard.span(f"{prefix}qkv_proj", width)
        matrices.append(rows_of(fused, slice(first + span.start, first + span.stop)))
        first += width
    return matrices


def _side_by_side(first: Matrix, second: Matrix) -> Matrix:
    """Return one matrix that adds the products of two, without biases, whose inputs lie side by side."""
    return Dense(torch.cat((decoded(first).data, decoded(second).data), 1))


def _in_each_head(features: Tensor, matrix: Matrix) -> Tensor:
    """Return the rows of a matrix of whole heads with the features of each in another order."""
    num_rows = matrix.coded.shape[0] if isinstance(matrix, Quantized) else len(matrix.data)
    return (torch.arange(0, num_rows, len(features))[:, None] + features).flatten()


def _qk_norm(
    of: design.HeadNorms | design.WideNorms | None, parts: Parts, prefix: str, features: Tensor | None
) -> QkNorm | WideNorm | None:
    if of is None:
        return None
    config, tensors = parts.config, parts.tensors
    if isinstance(of, design.HeadNorms):
        ones = torch.ones(config.head_dim, dtype=tensors.dtype, device=tensors.device)
        if not of.has_weights:
            return QkNorm(ones, ones, of.eps, of.after_rope)
        q, k = (
            ones if name is None else tensors.take(f"{prefix}{name}.weight", (config.head_dim,), plus=of.plus)
            for name in (of.q, of.k)
        )
        if features is not None:
            q, k = q[features], k[features]
        return QkNorm(q, k, of.eps, of.after_rope, ones if of.of_values else None)
    return WideNorm(*_wide_norms(of, parts, prefix, features))


def _wide_norms(of: design.WideNorms, parts: Parts, prefix: str, features: Tensor | None) -> Iterator[RmsNorm]:
    """Yield the norms of q and k, over the heads of all ranks; with fewer KV heads than ranks, several have each."""
    config, rank = parts.config, parts.rank
    num_heads, num_kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
    of_q = rank.rows(rank.query_unit(num_heads, num_kv_heads) * head_dim)
    of_k = rank.kv_rows(num_kv_heads, head_dim)
    for name, heads, shard in ((of.q, num_heads, of_q), (of.k, num_kv_heads, of_k)):
        weight = parts.tensors.take(f"{prefix}{name}.weight", (heads * head_dim,), shard)
        if features is not None:
            weight = weight.view(-1, head_dim)[:, features].flatten()
        whole = max(heads, rank.size) if name == of.k else heads
        yield RmsNorm(weight, of.eps) if rank.size == 1 else PartNorm(weight, of.eps, whole * head_dim)
