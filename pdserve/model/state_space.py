"""Mamba-2 (Dao, Gu 2024): a memory for each head, which forgets at a rate that each token sets, and adds."""

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
from pdserve.model.delta_rule import BLOCK, recalled
from pdserve.model.elementwise import times
from pdserve.model.family import TensorSource
from pdserve.model.ops import Linear, Matrix, Ops, RmsNorm, rows_of
from pdserve.model.parallel import row_parallel
from pdserve.model.parts import Parts
from pdserve.model.ranks import PartNorm
from pdserve.model.recurrent import Convolution, in_slabs, indices, part_of_state, recurred
from pdserve.model.weights import Rank


@dataclass(frozen=True, slots=True)
class StateSpace:
    """All of it but the product that makes outputs."""

    taken: Linear  # what each part takes, one behind the other
    scales: Tensor | None  # of what it takes
    input_scale: float
    parts: tuple["SpacePart", ...]  # that are alike
    wide_norm: RmsNorm | None = None  # over the heads of all parts and ranks, in the place of theirs

    def mixed(self, ops: Ops, attention: Attention, index: int, x: Tensor) -> Tensor:
        """Return the outputs of all tokens: [num_tokens, inner_size]."""
        taken = ops.linear(ops.scaled(x, self.input_scale), self.taken)
        scaled = taken if self.scales is None else ops.scaled(taken, self.scales)
        made = recurred(ops, attention, index, scaled, self.parts)
        if self.wide_norm is not None:
            ops.norm_(made, self.wide_norm)
        return made

    def matrices(self) -> Iterator[Linear]:
        yield self.taken

    @classmethod
    def build(cls, of: design.StateSpace, parts: Parts, output_scale: float) -> tuple[Self, Matrix]:
        """Return it, and the matrix that makes outputs of what it makes."""
        prefix, tensors, rank = f"{parts.prefix}{of.block}.", parts.tensors, parts.rank
        hidden = parts.config.hidden_size
        taken = tensors.take_matrix(f"{prefix}in_proj", of.inner_size + of.channels + of.heads, hidden)
        taken = taken if rank.size == 1 else rows_of(taken, _taken_by(of, rank))
        whole, wide_norm = SpacePart.build(of, parts, output_scale), None
        taken, found = in_slabs(parts, taken, whole)
        if whole.norm is not None and of.eps is not None and of.has_wide_norm and (rank.size > 1 or len(found) > 1):
            norm = whole.norm * output_scale
            wide_norm = RmsNorm(norm, of.eps) if rank.size == 1 else PartNorm(norm, of.eps, of.inner_size)
            found = tuple([replace(each, norm=None, output_scale=1.0) for each in found])
        scales = _scales(found[0].of, tensors)
        scales = None if scales is None else scales.repeat(len(found))
        space = cls(parts.ops.held(taken), scales, of.input_scale, found, wide_norm)
        columns = rank.columns(rank.query_unit(of.heads, of.groups) * of.head_dim)
        return space, tensors.take_matrix(f"{prefix}out_proj", hidden, of.inner_size, shard=columns)


@dataclass(frozen=True, slots=True)
class SpacePart:
    """Some heads, and their part of the state. It takes the gate, x, B, C, and steps.

    These are 2 * inner_size + 2 * groups * state_dim + heads features.
    """

    of: design.StateSpace
    convolution: Convolution
    rate: Tensor  # float32 [heads], below 0: of forgetting
    step_bias: Tensor  # float32 [heads]
    direct: Tensor  # float32 [heads]: how much of x goes straight into the output
    norm: Tensor | None  # [inner_size]
    output_scale: float
    part: StatePart | None = None

    @property
    def recurrence(self) -> Recurrence:
        of, norm = self.of, self.norm
        gating = Gating(scale=self.output_scale)
        if norm is not None and of.eps is not None:
            part = of.inner_size // of.groups
            gating = Gating(norm=norm, part=part, eps=of.eps, gates_first=not of.norm_first, scale=self.output_scale)
        heads = Heads(
            count=of.heads,
            groups=of.groups,
            key_dim=of.state_dim,
            value_dim=of.head_dim,
            order="vkq",
            rates_at=of.inner_size + of.channels,
            rate=self.rate,
            rate_bias=self.step_bias,
            direct=self.direct,
            gating=gating,
        )
        convolution = self.convolution
        return Recurrence(
            weight=convolution.weight,
            bias=convolution.bias,
            inputs_at=of.inner_size,
            gates_at=0,
            heads=heads,
            part=self.part,
        )

    def in_torch(self, taken: Tensor, recur: Callable[[Tensor, Advance], Tensor]) -> Tensor:
        of = self.of
        gate, inputs, steps = taken.split((of.inner_size, of.channels, of.heads), -1)
        steps = functional.softplus(steps.float() + self.step_bias)
        made = recur(torch.cat((inputs.float(), steps), -1), self._advance)
        return times(self._gated(made, functional.silu(gate.float())).to(taken.dtype), self.output_scale)

    def _gated(self, made: Tensor, gate: Tensor) -> Tensor:
        of, norm = self.of, self.norm
        if norm is None or of.eps is None:
            return made * gate
        made = made if of.norm_first else made * gate
        parts = made.view(len(made), of.groups, -1)
        normed = (parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + of.eps)).flatten(1) * norm
        return normed * gate if of.norm_first else normed

    def _advance(self, rows: Tensor, state: Seq[Tensor]) -> tuple[Tensor, Seq[Tensor]]:
        of, shape = self.of, rows.shape[:2]
        inputs, steps = rows.split((of.channels, of.heads), -1)
        before, memory = state
        convolved, before = self.convolution.of(inputs, before)
        width = of.groups * of.state_dim
        x, b, c = functional.silu(convolved).split((of.inner_size, width, width), -1)
        x = x.reshape(*shape, of.heads, of.head_dim)
        b, c = (
            each.reshape(*shape, of.groups, of.state_dim).repeat_interleave(of.heads // of.groups, 2) for each in (b, c)
        )
        decay = (steps * self.rate)[..., None]
        parts = [each.transpose(1, 2) for each in (c, b, x * steps[..., None], decay)]
        memory, made = memory.view(len(memory), of.heads, of.state_dim, of.head_dim), []
        for q, k, v, decays in zip(*(part.split(BLOCK, 2) for part in parts), strict=True):
            out, memory = recalled(q, k, v, decays.cumsum(-2), memory)
            made.append(out)
        outputs = torch.cat(made, 2).transpose(1, 2) + self.direct[:, None] * x
        return outputs.flatten(2), (before, memory.flatten(1))

    def rows(self, rank: Rank) -> Tensor:
        """Return which features a part takes of those that all of it takes."""
        return _taken_by(self.of, rank)

    def narrowed(self, rank: Rank) -> Self:
        of, heads = self.of, self.of.heads_of(rank)
        features = slice(heads.start * of.head_dim, heads.stop * of.head_dim)
        convolution = self.convolution.narrowed(of.runs(rank))
        return replace(
            self,
            of=of.of_rank(rank),
            convolution=convolution,
            rate=self.rate[heads],
            step_bias=self.step_bias[heads],
            direct=self.direct[heads],
            norm=None if self.norm is None else self.norm[features],
            part=convolution.slab(rank.index),
        )

    @classmethod
    def build(cls, of: design.StateSpace, parts: Parts, output_scale: float) -> Self:
        prefix, tensors, rank = f"{parts.prefix}{of.block}.", parts.tensors, parts.rank
        unit, heads = rank.query_unit(of.heads, of.groups), (of.heads,)
        by_head, by_feature = rank.rows(unit), rank.rows(unit * of.head_dim)
        return cls(
            of=of.of_rank(rank),
            convolution=Convolution.build(f"{prefix}conv1d", of, parts, bias=of.conv_bias),
            rate=-tensors.take(f"{prefix}A_log", heads, by_head, exact=True).exp(),
            step_bias=tensors.take(f"{prefix}dt_bias", heads, by_head, exact=True),
            direct=tensors.take(f"{prefix}D", heads, by_head, exact=True),
            norm=None if of.eps is None else tensors.take(f"{prefix}norm.weight", (of.inner_size,), by_feature),
            output_scale=output_scale,
            part=part_of_state(of, parts),
        )


def _scales(own: design.StateSpace, tensors: TensorSource) -> Tensor | None:
    """Return what each feature is multiplied with that a part takes; None: nothing."""
    if all(scale == 1.0 for scale in own.scales):
        return None
    widths = (own.inner_size, own.inner_size, *(own.groups * own.state_dim,) * 2, own.heads)
    found = [torch.full((width,), scale) for width, scale in zip(widths, own.scales, strict=True)]
    return torch.cat(found).to(device=tensors.device, dtype=tensors.dtype)


@dataclass(frozen=True, slots=True)
class LoneSpace:
    """A state space in the place of attention."""

    space: StateSpace
    o: Linear

    def mixed(self, ops: Ops, attention: Attention, index: int, x: Tensor) -> Tensor:
        """Return what its state makes, before `o`."""
        return self.space.mixed(ops, attention, index, x)

    def matrices(self) -> Iterator[Linear]:
        yield from (*self.space.matrices(), self.o)

    @classmethod
    def build(cls, of: design.StateSpace, parts: Parts) -> Self:
        space, o = StateSpace.build(of, parts, 1.0)
        return cls(space, row_parallel(parts.ops.held(o), parts.rank))


def _taken_by(of: design.StateSpace, rank: Rank) -> Tensor:
    """Return which outputs of the first product a rank takes: its part of the gate, of x, B and C, and of the steps."""
    x, b, c = of.runs(rank)
    convolved = (design.moved(run, of.inner_size) for run in (x, b, c))
    return indices(x, *convolved, design.moved(of.heads_of(rank), of.inner_size + of.channels))
