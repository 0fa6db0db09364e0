"""What each attention, page and row-wise kernel computes, in a few lines of plain torch.

Written to be read and compared against, in float64 where it matters; nothing here is fast.
Sampling's meaning is in `reference_sampling.py`.
"""

import math

import torch
from torch import Tensor

from pdserve.kernels.rng import GOLDEN


def attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None = None) -> Tensor:
    """Attend causally with one sequence's last queries.

    q: [num_queries, num_heads, head_dim], the last positions of the sequence; k, v: [num_kv_heads, kv_len, head_dim].
    A query sees itself and what is before it, `window` positions in all where one is given.
    Returns [num_queries, num_heads, head_dim].
    """
    group = q.shape[1] // k.shape[0]
    k, v = (x.repeat_interleave(group, dim=0).to(q.dtype) for x in (k, v))
    scores = torch.einsum("qhd,hkd->hqk", q, k) * scale
    kv_positions = torch.arange(k.shape[1], device=k.device)
    q_positions = kv_positions[-q.shape[0] :, None]
    hidden = kv_positions > q_positions
    if window is not None:
        hidden |= kv_positions <= q_positions - window
    return torch.einsum("hqk,hkd->qhd", scores.masked_fill(hidden, -math.inf).softmax(-1), v)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale the last axis to unit root mean square, then by `weight` (Zhang, Sennrich 2019)."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def silu_mul(x: Tensor) -> Tensor:
    """Gate: [.., 2n] -> [.., n], silu of the first half times the second."""
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def rope(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotate channel pairs (i, i + head_dim/2) by position (Su et al. 2021).

    x: [num_tokens, num_heads, head_dim]. cos_sin: [num_tokens, head_dim], cosines of head_dim/2 angles, then sines.
    """
    cos, sin = (part[:, None] for part in cos_sin.chunk(2, dim=-1))
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def page_digests(pages: Tensor) -> Tensor:
    """Fold each page's bytes to 64 bits: int64 [num_pages].

    pages: [num_pages, ..], whole pages contiguous, bytes a multiple of 8. The digest is the sum of splitmix64's
    finalizer over (word + GOLDEN * (index + 1)): moved, lost or changed words all show, and any order of adding does.
    """
    words = pages.flatten(1).view(torch.int64)
    z = words + _signed64(GOLDEN) * torch.arange(1, words.shape[1] + 1)
    z = (z ^ _logical_right(z, 30)) * _signed64(0xBF58476D1CE4E5B9)
    z = (z ^ _logical_right(z, 27)) * _signed64(0x94D049BB133111EB)
    return (z ^ _logical_right(z, 31)).sum(1)


def _logical_right(x: Tensor, count: int) -> Tensor:
    return (x >> count) & ((1 << (64 - count)) - 1)


def _signed64(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
