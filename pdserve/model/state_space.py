"""Mamba-2 (Dao, Gu 2024): a memory for each head, which forgets at a rate that each token sets, and adds."""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional

from pdserve.model import state_design as design
from pdserve.model.attention import Attention
from pdserve.model.ops import Linear, Matrix, Ops
from pdserve.model.parts import Parts
from pdserve.model.recurrent import BLOCK, Convolution, recalled


@dataclass(frozen=True, slots=True)
class StateSpace:
    """All of it but the product that makes outputs."""

    of: design.StateSpace
    taken: Linear  # [2 * inner_size + 2 * groups * state_dim + heads, hidden_size]: the gate, x, B, C, and steps
    scales: Tensor | None  # of what it takes
    convolution: Convolution
    rate: Tensor  # float32 [heads], below 0: of forgetting
    step_bias: Tensor  # float32 [heads]
    direct: Tensor  # float32 [heads]: how much of x goes straight into the output
    norm: Tensor | None  # [inner_size]

    def mixed(self, ops: Ops, attention: Attention, index: int, x: Tensor) -> Tensor:
        """Return the outputs of all tokens: [num_tokens, inner_size]."""
        of = self.of
        taken = ops.linear(x if of.input_scale == 1.0 else x * of.input_scale, self.taken)
        taken = taken if self.scales is None else taken * self.scales
        gate, inputs, steps = taken.split((of.inner_size, of.channels, of.heads), -1)
        steps = functional.softplus(steps.float() + self.step_bias)
        made = attention.recur(index, torch.cat((inputs.float(), steps), -1), self._advance)
        return self._gated(made, functional.silu(gate.float())).to(x.dtype)

    def matrices(self) -> Iterator[Linear]:
        yield self.taken

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

    @classmethod
    def build(cls, of: design.StateSpace, parts: Parts) -> tuple[Self, Matrix]:
        """Return it, and the matrix that makes outputs of what it makes."""
        prefix, tensors, hidden = f"{parts.prefix}mamba.", parts.tensors, parts.config.hidden_size
        taken = tensors.take_matrix(f"{prefix}in_proj", of.inner_size + of.channels + of.heads, hidden)
        widths = (of.inner_size, of.inner_size, of.groups * of.state_dim, of.groups * of.state_dim, of.heads)
        scales = None
        if any(scale != 1.0 for scale in of.scales):
            parts_of = [torch.full((width,), scale) for width, scale in zip(widths, of.scales, strict=True)]
            scales = torch.cat(parts_of).to(device=tensors.device, dtype=tensors.dtype)
        heads = (of.heads,)
        found = cls(
            of=of,
            taken=parts.ops.held(taken),
            scales=scales,
            convolution=Convolution.build(f"{prefix}conv1d", of.kernel, of.channels, parts, bias=of.conv_bias),
            rate=-tensors.take(f"{prefix}A_log", heads, exact=True).exp(),
            step_bias=tensors.take(f"{prefix}dt_bias", heads, exact=True),
            direct=tensors.take(f"{prefix}D", heads, exact=True),
            norm=None if of.eps is None else tensors.take(f"{prefix}norm.weight", (of.inner_size,)),
        )
        return found, tensors.take_matrix(f"{prefix}out_proj", hidden, of.inner_size)
