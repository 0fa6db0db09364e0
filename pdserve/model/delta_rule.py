"""What tokens read of a memory of keys and values that forgets, many at once, in torch."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 64  # tokens that are computed at once


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
