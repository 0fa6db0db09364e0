"""Scores prompt tokens: log probabilities of each, given those before it.

In slices of rows, for the logits of a whole prompt are large.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.sampling import PromptLogprobs

SLICE_BYTES = 32 << 20  # of one slice's logits, in float32
SCORING_BYTES = 4 * SLICE_BYTES  # that a slice takes at most, in the model's dtype and with what is computed of it


@dataclass(frozen=True, slots=True)
class Scores:
    """Of one chunk's rows, on the device or on the host."""

    chosen: Tensor  # float32 [num_rows]
    top_ids: Tensor  # int32 [num_rows, num_top], likeliest first
    top: Tensor  # float32 [num_rows, num_top]

    def to_host(self) -> "Scores":
        """Return a copy on the host, which is there once the device has done what was launched before."""
        return Scores(*map(_to_host, (self.chosen, self.top_ids, self.top)))

    def packed(self) -> PromptLogprobs:
        """Return them as they travel. They must be on the host."""
        return PromptLogprobs(*(part.numpy().tobytes() for part in (self.chosen, self.top_ids, self.top)))


class Scorer:
    """Scores prompt tokens for one model."""

    def __init__(self, logits_of: Callable[[Tensor], Tensor], vocab_size: int) -> None:
        """logits_of: hidden states [num_rows, hidden_size] to logits."""
        self._logits_of = logits_of
        self._vocab_size = vocab_size

    def score(self, hidden: Tensor, targets: Tensor, num_top: int) -> Scores:
        """Return the log probability of each row's target, int64 [num_rows >= 1], and the likeliest tokens."""
        num_rows, num_top = max(1, SLICE_BYTES // (4 * self._vocab_size)), min(num_top, self._vocab_size)
        parts = zip(hidden.split(num_rows), targets.split(num_rows), strict=True)
        scores = [self._score(rows, of_rows, num_top) for rows, of_rows in parts]
        return Scores(*(torch.cat([getattr(part, name) for part in scores]) for name in Scores.__slots__))

    def _score(self, hidden: Tensor, targets: Tensor, num_top: int) -> Scores:
        logits = self._logits_of(hidden).float()
        total = logits.logsumexp(-1, keepdim=True)
        top = logits.topk(num_top)
        chosen = logits.gather(1, targets[:, None]) - total
        return Scores(chosen[:, 0], top.indices.to(torch.int32), top.values - total)


def _to_host(values: Tensor) -> Tensor:
    copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.device.type == "cuda")
    return copy.copy_(values, non_blocking=True)
