"""Sample a step's tokens in one pass over rows that may each want something else.

A token depends on its row's logits, parameters, seed and token index, and on nothing else in the batch. Penalties,
biases and forbidden stops change the logits first. Then come temperature, top-k, top-p, min-p, and the largest of logit
plus Gumbel noise. A row without a feature is not touched for it: plain greedy rows are an argmax over the model's own
logits. `kernels/reference_sampling.py` defines one row's token.
"""

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from pdserve.engine.step import SampleSpec
from pdserve.kernels import rng
from pdserve.sampling import SampledToken, SamplingParams, TokenLogprobs

MIN_CANDIDATES = 256
NOTHING_KEPT = -math.inf


class Sampler:
    """Samples tokens for one model."""

    def __init__(self, eos_token_ids: Seq[int]) -> None:
        self._eos_token_ids = tuple(eos_token_ids)

    def sample(self, logits: Tensor, specs: Seq[SampleSpec]) -> list[SampledToken]:
        """Sample one token per row. logits: [len(specs), vocab_size], any float dtype; left as they are."""
        if not specs:
            return []
        return with_logprobs(logits, specs, self._token_ids(logits, specs))

    def _token_ids(self, logits: Tensor, specs: Seq[SampleSpec]) -> list[int]:
        special = [row for row, spec in enumerate(specs) if not _is_plain_greedy(spec)]
        if not special:
            return _argmax(logits).tolist()
        token_ids = np.empty(len(specs), dtype=np.int64)
        plain = np.setdiff1d(np.arange(len(specs)), special)
        if len(plain):
            token_ids[plain] = _argmax(_rows(logits, plain.tolist())).numpy()
        chosen = [specs[row] for row in special]
        adjusted = _rows(logits, special).float()
        if adjusted.data_ptr() == logits.data_ptr():
            adjusted = adjusted.clone()
        adjust(adjusted, chosen, self._eos_token_ids)
        token_ids[special] = _sample_adjusted(adjusted, chosen).numpy()
        return token_ids.tolist()


def with_logprobs(logits: Tensor, specs: Seq[SampleSpec], token_ids: Seq[int]) -> list[SampledToken]:
    """Return the tokens sampled, each with the log probabilities its request asks for."""
    reported = [row for row, spec in enumerate(specs) if spec.params.logprobs is not None]
    logprobs = dict(zip(reported, _logprobs(logits, specs, token_ids, reported), strict=True))
    return [SampledToken(token_id, logprobs.get(row)) for row, token_id in enumerate(token_ids)]


def _is_plain_greedy(spec: SampleSpec) -> bool:
    params = spec.params
    return params.is_greedy and not (params.has_penalties or params.logit_bias or spec.forbid_stops)


def _rows(logits: Tensor, rows: list[int]) -> Tensor:
    """Return the rows, without a copy when they are all there are."""
    return logits if len(rows) == len(logits) else logits.index_select(0, torch.tensor(rows, device=logits.device))


def _argmax(logits: Tensor) -> Tensor:
    return torch.from_numpy(logits.float().numpy().argmax(-1))  # numpy's is vectorized, torch's on a CPU is not


def _logprobs(logits: Tensor, specs: Seq[SampleSpec], token_ids: Seq[int], reported: list[int]) -> list[TokenLogprobs]:
    """Return, for each row of `reported`, the log probabilities under the model's own distribution."""
    if not reported:
        return []
    logprobs = _rows(logits, reported).float().log_softmax(-1)
    chosen = torch.tensor([token_ids[row] for row in reported], device=logits.device)
    chosen_logprobs = logprobs.gather(1, chosen[:, None])[:, 0].tolist()
    counts = [min(specs[row].params.logprobs or 0, logits.shape[-1]) for row in reported]
    top = logprobs.topk(max(counts), dim=-1)
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    tops = [
        tuple(zip(ids[:count], values[:count], strict=True)) for (ids, values), count in zip(pairs, counts, strict=True)
    ]
    return [TokenLogprobs(value, best) for value, best in zip(chosen_logprobs, tops, strict=True)]


# ---- what changes logits


def adjust(logits: Tensor, specs: Seq[SampleSpec], eos_token_ids: Seq[int]) -> None:
    """Apply each row's penalties, logit bias and forbidden stops, in that order and in place.

    logits: float32 [len(specs), vocab_size].
    """
    # A model's files may name an end past its vocabulary, which is never sampled.
    ends = [token_id for token_id in eos_token_ids if 0 <= token_id < logits.shape[1]]
    for row, spec in zip(logits, specs, strict=True):
        params = spec.params
        if params.repetition_penalty != 1.0:
            seen = _array((*spec.prompt_ids, *spec.output_ids)).unique()
            values = row[seen]
            row[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
        if params.frequency_penalty or params.presence_penalty:
            written, counts = _array(spec.output_ids).unique(return_counts=True)
            row[written] -= counts * params.frequency_penalty + params.presence_penalty
        if params.logit_bias:
            bias = dict(params.logit_bias)
            row[_array(list(bias))] += torch.tensor(list(bias.values()))
        if spec.forbid_stops:
            row[_array((*ends, *params.stop_token_ids))] = -math.inf


def _array(token_ids: Seq[int]) -> Tensor:
    return torch.from_numpy(np.fromiter(token_ids, dtype=np.int64, count=len(token_ids)))


# ---- temperature, filters and noise
#
# A filter becomes a threshold on a row's logits, so ties stand or fall together and no order of equal values matters.
# Thresholds are found among a row's likeliest candidates; a row that they do not settle is done again with the whole
# vocabulary.


def _sample_adjusted(logits: Tensor, specs: Seq[SampleSpec]) -> Tensor:
    """Return one token id per row: int64 [len(specs)] on the CPU. logits: float32, may be overwritten."""
    token_ids = torch.empty(len(specs), dtype=torch.int64)
    kinds: dict[Callable[[Tensor, list[SampleSpec]], Tensor], list[int]] = {}
    for row, spec in enumerate(specs):
        kinds.setdefault(_kind(spec.params), []).append(row)
    for sample, rows in kinds.items():
        token_ids[rows] = sample(logits[rows], [specs[row] for row in rows]).cpu()
    return token_ids


def _kind(params: SamplingParams) -> Callable[[Tensor, list[SampleSpec]], Tensor]:
    """Return what samples rows of such parameters."""
    if params.is_greedy:
        return _sample_greedy
    return _sample_filtered if params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0 else _sample_free


def _sample_greedy(logits: Tensor, specs: Seq[SampleSpec]) -> Tensor:
    return logits.argmax(-1)


def _sample_free(logits: Tensor, specs: Seq[SampleSpec]) -> Tensor:
    scaled = logits.div_(_column(logits, [spec.params.temperature for spec in specs]))
    return scaled.add_(rng.gumbel(_keys(logits, specs), logits.shape[1])).argmax(-1)


def _sample_filtered(logits: Tensor, specs: Seq[SampleSpec], num_candidates: int = MIN_CANDIDATES) -> Tensor:
    num_candidates = min(max(num_candidates, *(spec.params.top_k + 1 for spec in specs), 0), logits.shape[1])
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
            token_ids[unsettled] = _sample_filtered(logits[unsettled], again, logits.shape[1])
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
