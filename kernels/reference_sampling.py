"""What the sampling kernel computes, for one row of logits, in plain torch.

Tokens of equal logit stand or fall together in top-k and top-p, so that no order among them matters.
"""

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from pdserve.kernels import rng
from pdserve.sampling import GREEDY_BELOW


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


def sample(logits: Tensor, params: RowParams, key: rng.Words) -> int:
    """Sample a token from logits [vocab]; key: a row of `rng.keys`."""
    x = penalized(logits, params)
    if params.temperature < GREEDY_BELOW:
        return int(x.argmax())
    scores = x / params.temperature
    noisy = scores + torch.from_numpy(rng.gumbel(key, np.arange(len(x), dtype=np.uint32))).to(scores.dtype)
    return int(noisy.masked_fill(~kept(scores, params), -math.inf).argmax())
