"""What each kernel for attention, pages, rows and sampling computes, in a few lines of plain torch.

Written to be read and compared against, in float64 where it matters; nothing here is fast. What sampling means is
defined here for all kernels.
"""

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from pdserve.kernels import rng
from pdserve.kernels.rng import GOLDEN
from pdserve.protocol.sampling import GREEDY_BELOW


@dataclass(frozen=True, slots=True)
class RowParams:
    """How one row's token is sampled."""

    temperature: float = 1.0  # below GREEDY_BELOW: the largest logit
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    prompt_ids: tuple[int, ...] = ()
    output_ids: tuple[int, ...] = ()
    bias: dict[int, float] = field(default_factory=dict)
    allowed: tuple[int, ...] | None = None  # None: all


def penalized(logits: Tensor, params: RowParams) -> Tensor:
    """Apply repetition, frequency and presence penalties, then mask and bias, to logits [vocab]."""
    counts = torch.bincount(torch.tensor(params.output_ids, dtype=torch.long), minlength=len(logits))
    seen = counts > 0
    seen[list(params.prompt_ids)] = True
    x = torch.where(seen, torch.where(logits > 0, logits / params.repetition, logits * params.repetition), logits)
    x = x - params.frequency * counts - params.presence * (counts > 0)
    if params.allowed is not None:
        others = torch.ones_like(seen)
        others[list(params.allowed)] = False
        x = x.masked_fill(others, -math.inf)
    for token, bias in params.bias.items():
        if 0 <= token < len(x):
            x[token] += bias
    return x


def kept(scores: Tensor, params: RowParams) -> Tensor:
    """Return which of the tempered scores [vocab] survive top-k, then top-p, then min-p: bool [vocab]."""
    keep = torch.ones_like(scores, dtype=torch.bool)
    if 0 < params.top_k < len(scores):
        keep = scores >= scores.topk(params.top_k).values[-1]
    if params.top_p < 1.0:
        probs = scores.masked_fill(~keep, -math.inf).softmax(0)
        values, order = probs.sort(descending=True)
        above = values.cumsum(0) - values  # mass before each, in order
        first_of_equals = torch.searchsorted(-values, -values, right=False)
        above_all = torch.empty_like(above)
        above_all[order] = above[first_of_equals]
        keep &= above_all < params.top_p
    if params.min_p > 0.0:
        keep &= (scores - scores.max()).exp() >= params.min_p
    return keep


def as_tensor(keys: rng.Words, device: torch.device | str = "cpu") -> Tensor:
    """Return the keys of `rng.keys` as the sampling kernel takes them: int32 [n, 2]."""
    return torch.from_numpy(keys.view(np.int32)).to(device)


def sample(logits: Tensor, params: RowParams, key: rng.Words) -> int:
    """Sample a token from logits [vocab]; key: a row of `rng.keys`."""
    x = penalized(logits, params)
    if params.temperature < GREEDY_BELOW:
        return int(x.argmax())
    scores = x / params.temperature
    noisy = scores + torch.from_numpy(rng.gumbel(key, np.arange(len(x), dtype=np.uint32))).to(scores.dtype)
    return int(noisy.masked_fill(~kept(scores, params), -math.inf).argmax())


@dataclass(frozen=True, slots=True)
class Scoring:
    """What becomes of the products of queries and keys."""

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    sinks: Tensor | None = None


def attention(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
    """Attend causally with one sequence's last queries.

    q: [num_queries, num_heads, head_dim], the last positions of the sequence; k, v: [num_kv_heads, kv_len, head_dim].
    A query sees itself and what is before it, `window` positions in all where one is given. Sinks [num_heads]
    are scores of one more key each, whose value is zero.
    Returns [num_queries, num_heads, head_dim].
    """
    group = q.shape[1] // k.shape[0]
    k, v = (x.repeat_interleave(group, dim=0).to(q.dtype) for x in (k, v))
    scores = torch.einsum("qhd,hkd->hqk", q, k) * scoring.scale
    if scoring.soft_cap is not None:
        scores = scoring.soft_cap * torch.tanh(scores / scoring.soft_cap)
    kv_positions = torch.arange(k.shape[1], device=k.device)
    q_positions = kv_positions[-q.shape[0] :, None]
    hidden = kv_positions > q_positions
    if scoring.window is not None:
        hidden |= kv_positions <= q_positions - scoring.window
    scores = scores.masked_fill(hidden, -math.inf)
    if scoring.sinks is not None:
        scores = torch.cat((scores, scoring.sinks.to(q.dtype)[:, None, None].expand(-1, len(q), 1)), -1)
    return torch.einsum("hqk,hkd->qhd", scores.softmax(-1)[..., : k.shape[1]], v)


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
