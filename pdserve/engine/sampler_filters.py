"""Draw from adjusted logits: temperature, top-k, top-p, min-p, then the largest of logit plus Gumbel noise.

A filter becomes a threshold on a row's logits, so ties stand or fall together and no order of equal values matters.
Thresholds are found among a row's likeliest candidates; a row whose candidates do not settle it is done again with the
whole vocabulary.
"""

import math
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from pdserve.engine.step import SampleSpec
from pdserve.kernels import rng

MIN_CANDIDATES = 256
NOTHING_KEPT = -math.inf


def draw(logits: Tensor, specs: Seq[SampleSpec]) -> Tensor:
    """Return one token id per row: int64 [len(specs)] on the CPU. logits: float32, may be overwritten."""
    token_ids = torch.empty(len(specs), dtype=torch.int64)
    greedy = [row for row, spec in enumerate(specs) if spec.params.is_greedy]
    filtered = [row for row, spec in enumerate(specs) if not spec.params.is_greedy and _is_filtered(spec)]
    free = [row for row, spec in enumerate(specs) if not spec.params.is_greedy and not _is_filtered(spec)]
    if greedy:
        token_ids[greedy] = logits[greedy].argmax(-1).cpu()
    if free:
        token_ids[free] = _draw_free(logits[free], [specs[row] for row in free]).cpu()
    if filtered:
        chosen = [specs[row] for row in filtered]
        candidates = max(MIN_CANDIDATES, *(spec.params.top_k + 1 for spec in chosen), 0)
        token_ids[filtered] = _draw_filtered(logits[filtered], chosen, candidates).cpu()
    return token_ids


def _is_filtered(spec: SampleSpec) -> bool:
    return spec.params.top_k > 0 or spec.params.top_p < 1.0 or spec.params.min_p > 0.0


def _draw_free(logits: Tensor, specs: Seq[SampleSpec]) -> Tensor:
    scaled = logits.div_(_column(logits, [spec.params.temperature for spec in specs]))
    return scaled.add_(rng.gumbel(_keys(logits, specs), logits.shape[1])).argmax(-1)


def _draw_filtered(logits: Tensor, specs: Seq[SampleSpec], num_candidates: int) -> Tensor:
    num_candidates = min(num_candidates, logits.shape[1])
    scaled = logits / _column(logits, [spec.params.temperature for spec in specs])
    values, ids = scaled.topk(num_candidates, dim=-1)
    threshold = _threshold(values, scaled.logsumexp(-1, keepdim=True), specs)
    noisy = values + rng.gumbel_at(_keys(logits, specs), ids.to(torch.int32))
    best = noisy.masked_fill_(values < threshold, NOTHING_KEPT).argmax(-1, keepdim=True)
    token_ids = ids.gather(1, best)[:, 0]
    if num_candidates < logits.shape[1]:
        unsettled = (values[:, -1:] >= threshold)[:, 0].nonzero()[:, 0].tolist()
        if unsettled:
            again = [specs[row] for row in unsettled]
            token_ids[unsettled] = _draw_filtered(logits[unsettled], again, logits.shape[1])
    return token_ids


def _threshold(values: Tensor, total: Tensor, specs: Seq[SampleSpec]) -> Tensor:
    """Return the smallest logit each row keeps: [rows, 1].

    values: the row's largest logits, in falling order. total: logsumexp over all of the row's logits.
    Where the candidates do not reach far enough the threshold is at or below the last of them.
    """
    last = values.shape[1] - 1
    top_k = torch.tensor([[spec.params.top_k or last + 1] for spec in specs], device=values.device)
    kth = values.gather(1, (top_k - 1).clamp_(max=last))
    limited = torch.tensor([[spec.params.top_k > 0] for spec in specs], device=values.device)
    kept = values.masked_fill(values < kth, NOTHING_KEPT)
    total = torch.where(limited, kept.logsumexp(-1, keepdim=True), total)
    probabilities = (kept - total).exp_()
    before = probabilities.cumsum(-1) - probabilities
    top_p = _column(values, [spec.params.top_p if spec.params.top_p < 1.0 else math.inf for spec in specs])
    num_kept = (before < top_p).sum(-1, keepdim=True).clamp_(min=1)
    threshold = torch.maximum(kth, values.gather(1, num_kept - 1))
    min_p = _column(values, [spec.params.min_p for spec in specs])
    return torch.maximum(threshold, values[:, :1] + min_p.log())


def _column(like: Tensor, values: Seq[float]) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


def _keys(like: Tensor, specs: Seq[SampleSpec]) -> Tensor:
    keys = rng.keys([spec.seed for spec in specs], [spec.index for spec in specs])
    return rng.as_tensor(keys, like.device)
