"""Layers without attention: what a token sees of those before it is in a state whose size does not grow with them.

A state is a row of float32 values for each sequence: the last inputs of a convolution, then the memory of heads if
there are any. `Attention.recur` brings each piece of a sequence together with the state before it, and keeps the state
after it. `kernels/cpu/states.py` computes it; without a compiled library, torch does. Then a piece of several tokens
leaves the same state as these tokens one by one, but for rounding.
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from pdserve.base.errors import ConfigError
from pdserve.kernels.cpu.states import Gating, Heads, Recurrence, StatePart
from pdserve.model import state_design as design
from pdserve.model.attention import Advance, Attention, Recurs
from pdserve.model.delta_rule import DeltaTokens, delta_rule
from pdserve.model.ops import Linear, Matrix, Ops, joined, rows_of
from pdserve.model.parallel import row_parallel
from pdserve.model.parts import Parts
from pdserve.model.weights import Rank

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

    def narrowed(self, runs: Seq[slice]) -> Self:
        """Return what becomes of some features."""
        own = indices(*runs)
        bias = None if self.bias is None else self.bias[own]
        return replace(self, weight=self.weight[:, own].contiguous(), bias=bias)

    def slab(self, number: int) -> StatePart:
        """Return where the state of these features lies that are all of a slab."""
        channels = self.weight.shape[1]
        return StatePart(channels, (slice(0, channels),), slab=number)


@dataclass(frozen=True, slots=True)
class Recurring:
    """A layer with states in the place of attention."""

    taken: Linear  # what each part takes, one behind the other
    parts: tuple[Recurs, ...]  # that are alike
    o: Linear

    def mixed(self, ops: Ops, attention: Attention, index: int, x: Tensor) -> Tensor:
        """Return the outputs of all tokens, before `o`."""
        return recurred(ops, attention, index, ops.linear(x, self.taken), self.parts)

    def matrices(self) -> Iterator[Linear]:
        yield from (self.taken, self.o)


def recurred(ops: Ops, attention: Attention, index: int, taken: Tensor, parts: Seq[Recurs]) -> Tensor:
    """Return the outputs of all parts of a layer side by side. taken: what they take, side by side as well."""
    of_parts = taken.chunk(len(parts), -1)
    made = [attention.recur(index, each, part) for each, part in zip(of_parts, parts, strict=True)]
    return made[0] if len(made) == 1 else ops.side_by_side(*made)


@dataclass(frozen=True, slots=True)
class ShortConv:
    """A gated convolution over few tokens (LFM2). It takes a gate of inputs, one of outputs, and inputs."""

    convolution: Convolution
    part: StatePart | None = None

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

    def rows(self, rank: Rank) -> Tensor:
        """Return which features a part takes of those that all of it takes."""
        (run,) = self._of.runs(rank)
        return _three(run, self._of.channels)

    def narrowed(self, rank: Rank) -> Self:
        convolution = self.convolution.narrowed(self._of.runs(rank))
        return replace(self, convolution=convolution, part=convolution.slab(rank.index))

    @property
    def _of(self) -> design.ShortConv:
        kernel, channels = self.convolution.weight.shape
        return design.ShortConv(channels, kernel)

    @classmethod
    def build(cls, of: design.ShortConv, parts: Parts) -> Recurring:
        prefix, rank, take = f"{parts.prefix}conv.", parts.rank, parts.tensors.take_matrix
        hidden, group = parts.config.hidden_size, parts.tensors.group(f"{prefix}out_proj")
        of = replace(of, group=group)
        if parts.config.num_state_parts > 1 and not of.has_equal_parts(rank.size):
            raise ConfigError(
                f"{prefix}out_proj: {of.channels} in units of {group} are not divided evenly by {rank.size}"
            )
        taken = take(f"{prefix}in_proj", 3 * of.channels, hidden, bias=of.bias)
        if rank.size > 1:
            (run,) = of.runs(rank)
            taken = rows_of(taken, _three(run, of.channels))
        convolution = Convolution.build(f"{prefix}conv", of, parts, bias=of.bias)
        o = take(f"{prefix}out_proj", hidden, of.channels, bias=of.bias, shard=rank.columns(group))
        return _recurring(parts, taken, cls(convolution, part_of_state(of, parts)), o)


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """A gated delta net: a memory of keys and values for each head, which forgets, and corrects what it recalls.

    It takes q, k, v, the gate z, then b and a: channels + value_heads * (value_dim + 2) features.
    """

    of: design.GatedDelta
    convolution: Convolution
    rate: Tensor  # float32 [value_heads], below 0: of forgetting
    rate_bias: Tensor  # float32 [value_heads], added to a
    norm: Tensor  # [value_dim]: of each head's result
    part: StatePart | None = None

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

    def rows(self, rank: Rank) -> Tensor:
        """Return which features a part takes of those that all of it takes."""
        of, width = self.of, self.of.value_heads * self.of.value_dim
        heads = self._heads(rank)
        z = slice(heads.start * of.value_dim, heads.stop * of.value_dim)
        places = of.channels, of.channels + width, of.channels + width + of.value_heads
        return indices(*of.runs(rank), *map(design.moved, (z, heads, heads), places))

    def narrowed(self, rank: Rank) -> Self:
        of, heads = self.of, self._heads(rank)
        convolution = self.convolution.narrowed(of.runs(rank))
        return replace(
            self,
            of=of.of_rank(rank),
            convolution=convolution,
            rate=self.rate[heads],
            rate_bias=self.rate_bias[heads],
            part=convolution.slab(rank.index),
        )

    def _heads(self, rank: Rank) -> slice:
        keys, shared = self.of.keys_of(rank), self.of.shared
        return slice(keys.start * shared, keys.stop * shared)

    @classmethod
    def build(cls, of: design.GatedDelta, parts: Parts) -> Recurring:
        prefix, tensors, rank = f"{parts.prefix}linear_attn.", parts.tensors, parts.rank
        heads, by_head = (of.value_heads,), rank.rows(of.shared)
        taken = _by_key_head(of, parts, prefix) if of.by_key_head else _apart(of, parts, prefix)
        width = of.shared * of.value_dim
        shape = parts.config.hidden_size, of.key_heads * width
        o = tensors.take_matrix(f"{prefix}out_proj", *shape, shard=rank.columns(width))
        whole = cls(
            of=of.of_rank(rank),
            convolution=Convolution.build(f"{prefix}conv1d", of, parts, bias=False),
            rate=-tensors.take(f"{prefix}A_log", heads, by_head, exact=True).exp(),
            rate_bias=tensors.take(f"{prefix}dt_bias", heads, by_head, exact=True),
            norm=tensors.take(f"{prefix}norm.weight", (of.value_dim,)),
            part=part_of_state(of, parts),
        )
        return _recurring(parts, taken, whole, o)


Convolved = design.Recurrent | design.StateSpace


class Divides(Recurs, Protocol):
    """What can be divided into parts that are alike, each with a part of the state."""

    def rows(self, rank: Rank) -> Tensor:
        """Return which features a part takes of those that all of it takes."""
        ...

    def narrowed(self, rank: Rank) -> Self:
        """Return one of so many parts, whose state is in the slab of its number."""
        ...


D = TypeVar("D", bound=Divides)


def part_of_state(of: Convolved, parts: Parts) -> StatePart | None:
    """Return what a rank has of a layer's state in pages that have it as one rank does; None: all of it."""
    rank = parts.rank
    if rank.size == 1 or parts.config.num_state_parts > 1:
        return None
    return StatePart(of.channels, of.runs(rank), of.heads_before(rank))


def in_slabs(parts: Parts, taken: Matrix, whole: D) -> tuple[Matrix, tuple[D, ...]]:
    """Return what a rank computes in as many parts as it has slabs of pages, and what they take, one behind the other.

    taken, whole: of all that the rank has.
    """
    own = parts.rank.kv_heads(parts.config.num_state_parts)
    count = own.stop - own.start
    if count == 1:
        return taken, (whole,)
    ranks = [Rank(number, count) for number in range(count)]
    rows = torch.cat([whole.rows(each) for each in ranks])
    return rows_of(taken, rows), tuple([whole.narrowed(each) for each in ranks])


def _recurring(parts: Parts, taken: Matrix, whole: Divides, o: Matrix) -> Recurring:
    held = parts.ops.held
    taken, found = in_slabs(parts, taken, whole)
    return Recurring(held(taken), found, row_parallel(held(o), parts.rank))


def indices(*runs: slice) -> Tensor:
    return torch.cat([torch.arange(run.start, run.stop) for run in runs])


def build_recurrent(of: design.Recurrent, parts: Parts) -> Recurring:
    return ShortConv.build(of, parts) if isinstance(of, design.ShortConv) else GatedDelta.build(of, parts)


def _three(run: slice, channels: int) -> Tensor:
    """Return a run's features of the three parts that a convolution between gates takes."""
    return indices(*(design.moved(run, third * channels) for third in range(3)))


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


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)
