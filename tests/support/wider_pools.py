"""Pools of pages that hold more KV heads than those that attend, or one head behind the other."""

import math

import torch
from torch import Tensor


def among_others(pool: Tensor) -> Tensor:
    """Return the pool's values as some heads of wider pages, beside heads of NaN."""
    num_heads = pool.shape[3]
    nothing = 255 if pool.dtype == torch.uint8 else math.nan  # of such bytes, scales are NaN
    wider = pool.new_full((*pool.shape[:3], num_heads + 3, *pool.shape[4:]), nothing)
    view = wider[:, :, :, 2 : 2 + num_heads]
    view.copy_(pool)
    return view


def by_head(pool: Tensor) -> Tensor:
    """Return the pool's values as ranks with memory of their own keep them: one KV head behind the other."""
    return pool.permute(0, 3, 1, 2, 4, 5).contiguous().permute(0, 2, 3, 1, 4, 5)


LAID_OUT = (among_others, by_head)
