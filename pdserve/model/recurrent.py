"""Layers without attention: what a token sees of those before it is in a state whose size does not grow with them.

A state is a row of float32 values for each sequence: the last inputs of a convolution, then the memory of heads if
there are any. `Attention.recur` brings each piece of a sequence together with the state before it, and keeps the state
after it. `kernels/cpu/states.py` computes it; without a compiled library, torch does. Then a piece of several tokens
leaves the same state as these tokens one by one, but for rounding.
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional

from pdserve.kernels.cpu.states import Gating, Heads, Recurrence, StatePart
from pdserve.model import state_design as design
from pdserve.model.attention import Advance, Attention
from pdserve.model.ops import Linear, Matrix, Ops, joined, rows_of
from pdserve.model.parallel import row_parallel
from pdserve.model.parts import Parts
from pdserve.model.weights import Rank

BLOCK = 64  # tokens of the delta rule that are solved for at once
NORM_EPS = 1e-6  # of the lengths of q and k


@dataclass(frozen=True, slots=True)
class Convolution:
    """Weighs each feature of a token and of those just before it."""

    weight: Tensor  # float32 [kernel, channels]; the last is that of the token itself
    bias: Tensor | None  # float32 [channels]

    def of(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sums, float32, and the last inputs.

        x: [sequences, tokens, channels]; state: [sequences, (kernel - 1) * channels], the inputs before them.
        """
        kernel, channels = self.weight.shape
        inputs = torch.cat((state.view(len(state), kernel - 1, channels), x.float()), 1)
        count = x.shape[1]
        sums = inputs[:, :count] * self.weight[0]
        for place in range(1, kernel):
            sums.addcmul_(inputs[:, place : place + count], self.weight[place])
        return sums if self.bias is None else sums.add_(self.bias), inputs[:, count:].flatten(1)

    @classmethod
    def build(cls, name: str, of: "Convolved", parts: Parts, *, bias: bool) -> Self:
        weight = parts.tensors.take(f"{name}.weight", (of.channels, 1, of.kernel)).float()
        added = parts.tensors.take(f"{name}.bias", (of.channels,)).float() if bias else None
        if parts.rank.size > 1:
            own = indices(*of.runs(parts.rank))
            weight, added = weight[own], None if added is None else added[own]
        return cls(weight.flatten(1).t().contiguous(), added)


@dataclass(frozen=True, slots=True)
class ShortConv:
    """A gated convolution over few tokens (LFM2)."""

    taken: Linear  # [3 * channels, hidden_size]: a gate of inputs, one of outputs, and inputs
    convolution: Convolution
    o: Linear
    part: StatePart | None = None

    def mixed(self, ops: Ops, attention: Attention, index: int, x: Tensor) -> Tensor:
        """Return the outputs of all tokens, before `o`: [num_tokens, channels]."""
        return attention.recur(index, ops.linear(x, self.taken), self)

    @property
    def recurrence(self) -> Recurrence:
        convolution, channels = self.convolution, self.convolution.weight.shape[1]
        return Recurrence(
            weight=convolution.weight,
            bias=convolution.bias,
            inputs_at=2 * channels,
            gates_at=channels,
            before_at=0,
            part=self.part,
        )

    def in_torch(self, taken: Tensor, recur: Callable[[Tensor, Advance], Tensor]) -> Tensor:
        before, after, inputs = taken.chunk(3, -1)
        return after * recur(before * inputs, self._advance).to(taken.dtype)

    def _advance(self, rows: Tensor, state: Seq[Tensor]) -> tuple[Tensor, Seq[Tensor]]:
        (inputs,) = state
        sums, inputs = self.convolution.of(rows, inputs)
        return sums, (inputs,)

    def matrices(self) -> Iterator[Linear]:
        yield from (self.taken, self.o)

    @classmethod
    def build(cls, of: design.ShortConv, parts: Parts) -> Self:
        prefix, rank, take = f"{parts.prefix}conv.", parts.rank, parts.tensors.take_matrix
        hidden, group = parts.config.hidden_size, parts.tensors.group(f"{prefix}out_proj")
        of = replace(of, group=group)
        taken = take(f"{prefix}in_proj", 3 * of.channels, hidden, bias=of.bias)
        if rank.size > 1:
            (run,) = of.runs(rank)
            taken = rows_of(taken, indices(*(design.moved(run, place * of.channels) for place in range(3))))
        convolution = Convolution.build(f"{prefix}conv", of, parts, bias=of.bias)
        o = take(f"{prefix}out_proj", hidden, of.channels, bias=of.bias, shard=rank.columns(group))
        held = parts.ops.held
        return cls(held(taken), convolution, row_parallel(held(o), rank), part_of_state(of, rank))


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """A gated delta net: a memory of keys and values for each head, which forgets, and corrects what it recalls."""

    of: design.GatedDelta
    taken: Linear  # [channels + value_heads * (value_dim + 2), hidden_size]: q, k, v, the gate z, then b and a
    convolution: Convolution
    rate: Tensor  # float32 [value_heads], below 0: of forgetting
    rate_bias: Tensor  # float32 [value_heads], added to a
    norm: Tensor  # [value_dim]: of each head's result
    o: Linear
    part: StatePart | None = None

    def mixed(self, ops: Ops, attention: Attention, index: int, x: Tensor) -> Tensor:
        """Return the outputs of all tokens, before `o`: [num_tokens, value_heads * value_dim]."""
        return attention.recur(index, ops.linear(x, self.taken), self)

    @property
    def recurrence(self) -> Recurrence:
        of = self.of
        betas = of.channels + of.value_heads * of.value_dim
        heads = Heads(
            count=of.value_heads,
            groups=of.key_heads,
            key_dim=of.key_dim,
            value_dim=of.value_dim,
            order="qkv",
            rates_at=betas + of.value_heads,
            betas_at=betas,
            rate=self.rate,
            rate_bias=self.rate_bias,
            gating=Gating(norm=self.norm, part=of.value_dim, eps=of.eps, rounds=True),
        )
        weight = self.convolution.weight
        return Recurrence(weight=weight, inputs_at=0, gates_at=of.channels, heads=heads, part=self.part)

    def in_torch(self, taken: Tensor, recur: Callable[[Tensor, Advance], Tensor]) -> Tensor:
        of, dtype = self.of, taken.dtype
        width = of.value_heads * of.value_dim
        qkv, z, b, a = taken.split((of.channels, width, of.value_heads, of.value_heads), -1)
        decay = self.rate * functional.softplus(a.float() + self.rate_bias)
        rows = torch.cat((qkv.float(), b.float().sigmoid(), decay), -1)
        made = recur(rows, self._advance).view(len(taken), of.value_heads, of.value_dim)
        normed = made * torch.rsqrt(made.square().mean(-1, keepdim=True) + of.eps)
        gated = normed.to(dtype) * self.norm * functional.silu(z.float()).view_as(made)
        return gated.to(dtype).view(len(taken), width)

    def matrices(self) -> Iterator[Linear]:
        yield from (self.taken, self.o)

    def _advance(self, rows: Tensor, state: Seq[Tensor]) -> tuple[Tensor, Seq[Tensor]]:
        of, shape = self.of, rows.shape[:2]
        qkv, beta, decay = rows.split((of.channels, of.value_heads, of.value_heads), -1)
        inputs, memory = state
        convolved, inputs = self.convolution.of(qkv, inputs)
        keys = of.key_heads * of.key_dim
        q, k, v = functional.silu(convolved).split((keys, keys, of.value_heads * of.value_dim), -1)
        q, k = (_unit(each.reshape(*shape, of.key_heads, of.key_dim)) for each in (q, k))
        q, k = (each.repeat_interleave(of.shared, 2) for each in (q * of.key_dim**-0.5, k))
        parts = (q, k, v.reshape(*shape, of.value_heads, of.value_dim), beta[..., None], decay[..., None])
        tokens = DeltaTokens(*(each.transpose(1, 2) for each in parts))
        made, memory = delta_rule(tokens, memory.view(len(memory), of.value_heads, of.key_dim, -1))
        return made.transpose(1, 2).flatten(2), (inputs, memory.flatten(1))

    @classmethod
    def build(cls, of: design.GatedDelta, parts: Parts) -> Self:
        prefix, tensors, rank = f"{parts.prefix}linear_attn.", parts.tensors, parts.rank
        heads, by_head = (of.value_heads,), rank.rows(of.shared)
        taken = _by_key_head(of, parts, prefix) if of.by_key_head else _apart(of, parts, prefix)
        width = of.shared * of.value_dim
        shape = parts.config.hidden_size, of.key_heads * width
        o = parts.ops.held(tensors.take_matrix(f"{prefix}out_proj", *shape, shard=rank.columns(width)))
        return cls(
            of=of.of_rank(rank),
            taken=parts.ops.held(taken),
            convolution=Convolution.build(f"{prefix}conv1d", of, parts, bias=False),
            rate=-tensors.take(f"{prefix}A_log", heads, by_head, exact=True).exp(),
            rate_bias=tensors.take(f"{prefix}dt_bias", heads, by_head, exact=True),
            norm=tensors.take(f"{prefix}norm.weight", (of.value_dim,)),
            o=row_parallel(o, rank),
            part=part_of_state(of, rank, of.keys_of(rank).start * of.shared),
        )


Recurrent = ShortConv | GatedDelta
Convolved = design.Recurrent | design.StateSpace


def part_of_state(of: Convolved, rank: Rank, heads_before: int = 0) -> StatePart | None:
    """Return what a rank has of a layer's state; None: all of it."""
    return None if rank.size == 1 else StatePart(of.channels, of.runs(rank), heads_before)


def indices(*runs: slice) -> Tensor:
    return torch.cat([torch.arange(run.start, run.stop) for run in runs])


def build_recurrent(of: design.Recurrent, parts: Parts) -> Recurrent:
    return ShortConv.build(of, parts) if isinstance(of, design.ShortConv) else GatedDelta.build(of, parts)


@dataclass(frozen=True, slots=True)
class DeltaTokens:
    """What each token brings to the delta rule; all float32."""

    q: Tensor  # [..., tokens, key_dim]
    k: Tensor
    v: Tensor  # [..., tokens, value_dim]
    beta: Tensor  # [..., tokens, 1]
    decay: Tensor  # [..., tokens, 1], at most 0

    def blocks(self) -> "Iterator[DeltaTokens]":
        parts = (self.q, self.k, self.v, self.beta, self.decay)
        return (DeltaTokens(*each) for each in zip(*(part.split(BLOCK, -2) for part in parts), strict=True))


def delta_rule(tokens: DeltaTokens, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Return what each token reads of a memory [..., key_dim, value_dim], and the memory after the last.

    For each token, memory = exp(decay) * memory; memory += k (beta * (v - k memory)); and it reads q memory. Here many
    tokens come at once, by the products of Yang, Wang, Zhang, Shen, Kim 2024. The given memory may be overwritten.
    """
    made = []
    for block in tokens.blocks():
        out, memory = _block(block, memory)
        made.append(out)
    return torch.cat(made, -2), memory


def _block(of: DeltaTokens, memory: Tensor) -> tuple[Tensor, Tensor]:
    total = of.decay.cumsum(-2)
    weighted, grown = of.k * of.beta, total.exp()
    if total.shape[-2] == 1:
        new = of.v * of.beta - (weighted * grown) @ memory
        return recalled(of.q, of.k, new, total, memory)
    lower = (weighted @ of.k.transpose(-1, -2) * _between(total)).tril(-1)
    known = torch.cat((of.v * of.beta, weighted * grown), -1)
    solved = torch.linalg.solve_triangular(lower, known, upper=False, unitriangular=True)
    values, keys = solved.split((of.v.shape[-1], of.k.shape[-1]), -1)
    return recalled(of.q, of.k, values - keys @ memory, total, memory)


def recalled(q: Tensor, k: Tensor, v: Tensor, total: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Return what a block's tokens read of a memory that only forgets and adds, and the memory after them.

    For each token, memory = exp(decay) * memory + k v, and it reads q memory. total: [..., tokens, 1], sums of decays.
    The given memory may be overwritten.
    """
    if total.shape[-2] == 1:
        memory = memory.mul_(total.exp()).addcmul_(k.transpose(-1, -2), v)
        return q @ memory, memory
    out = (q * total.exp()) @ memory + (q @ k.transpose(-1, -2) * _between(total)) @ v
    last = total[..., -1:, :]
    return out, memory * last.exp() + (k * (last - total).exp()).transpose(-1, -2) @ v


def _between(total: Tensor) -> Tensor:
    """Return how much of each earlier token is left at each token."""
    return (total - total.transpose(-1, -2)).tril().exp().tril()


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)


def _apart(of: design.GatedDelta, parts: Parts, prefix: str) -> Matrix:
    """Return the rank's rows of four matrices of a file side by side."""
    take, hidden, rank = parts.tensors.take_matrix, parts.config.hidden_size, parts.rank
    qkv = take(f"{prefix}in_proj_qkv", of.channels, hidden)
    others = [
        take(f"{prefix}in_proj_{name}", of.value_heads * dim, hidden, shard=rank.rows(of.shared * dim))
        for name, dim in (("z", of.value_dim), ("b", 1), ("a", 1))
    ]
    return joined(qkv if rank.size == 1 else rows_of(qkv, indices(*of.runs(rank))), *others)


def _by_key_head(of: design.GatedDelta, parts: Parts, prefix: str) -> Matrix:
    """Return two matrices of a file side by side, whose rows come by key head there: q, k, v and z; b and a."""
    values, own = of.shared * of.value_dim, of.of_rank(parts.rank)
    take, hidden = parts.tensors.take_matrix, parts.config.hidden_size
    matrices = []
    for name, widths in (("qkvz", (of.key_dim, of.key_dim, values, values)), ("ba", (of.shared, of.shared))):
        unit = sum(widths)
        matrix = take(f"{prefix}in_proj_{name}", of.key_heads * unit, hidden, shard=parts.rank.rows(unit))
        rows = torch.arange(own.key_heads * unit).view(own.key_heads, -1).split(widths, 1)
        matrices.append(rows_of(matrix, torch.cat([each.flatten() for each in rows])))
    return joined(*matrices)
