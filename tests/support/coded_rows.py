"""Rows of K and V that are hard to code."""

import math

import torch
from torch import Tensor


def hard_rows(head_dim: int, dtype: torch.dtype) -> Tensor:
    """Return rows of many magnitudes: ties of both codes, subnormal codes and values, zeros, and what is not finite."""
    generator = torch.Generator().manual_seed(head_dim)
    rows = [torch.randn(200, head_dim, generator=generator) * 10.0 ** torch.linspace(-30, 30, 200)[:, None]]
    rows.append(torch.exp2(torch.randint(-140, 120, (100, head_dim), generator=generator).float()))
    ties = torch.arange(head_dim) + 0.5  # of int8 where the greatest is 127, and of e4m3 where it is 448
    rows += [torch.cat((torch.tensor([greatest]), ties[1:] * unit))[None] for greatest in (127.0, 448.0, -448.0)
             for unit in (1.0, 2.0, 2**-9, 2**-10, -0.25)]  # fmt: skip
    rows += [torch.zeros(1, head_dim), -torch.zeros(1, head_dim)]
    rows += [torch.full((1, head_dim), value) for value in (2**-100, 2**-101, 1e-38, 1e-45, 3e38, math.nan)]
    for bad in (math.inf, -math.inf, math.nan):
        rows += [
            torch.randn(1, head_dim, generator=generator).index_fill(1, torch.tensor([place]), bad) for place in (0, 5)
        ]
    whole = torch.cat(rows)
    return whole[: len(whole) // 2 * 2].to(dtype)
