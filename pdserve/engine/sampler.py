"""Sample a step's tokens, each row by its own parameters.

A token depends on its row's logits, parameters, seed, token index and mask, and on nothing else in the batch.
Penalties, biases and forbidden tokens change the logits first. Then come temperature, top-k, top-p, min-p, and the
largest of logit plus Gumbel noise. A row without a feature is not touched for it: plain greedy rows are an argmax over
the model's own logits. `tests/support/reference_kernels.py` defines one row's token.
"""

import math
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pdserve.engine.masks import NO_MASKS, TokenMasks, allowed, unwanted
from pdserve.engine.step import SampleSpec
from pdserve.kernels import rng
from pdserve.kernels.cpu.build import Missing
from pdserve.kernels.cpu.library import library
from pdserve.kernels.cpu.sample import RowSampler
from pdserve.model.family import Model
from pdserve.protocol.sampling import PromptLogprobs, SampledToken, SamplingParams, TokenLogprobs

SLICE_BYTES = 32 << 20  # of one slice's logits, in float32
SCORING_BYTES = 4 * SLICE_BYTES  # for a slice at most, in the model's dtype and with all that is computed from it


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of one chunk's rows, on the device or on the host."""

    chosen: Tensor  # float32 [num_rows]
    top_ids: Tensor  # int32 [num_rows, num_top], likeliest first
    top: Tensor  # float32 [num_rows, num_top]

    def to_host(self) -> "Scores":
        """Return a copy on the host, which is complete once the device has done all that was launched before."""
        return Scores(*map(_to_host, (self.chosen, self.top_ids, self.top)))

    def packed(self) -> PromptLogprobs:
        """Return the scores as messages carry them. They must be on the host."""
        return PromptLogprobs(*(part.numpy().tobytes() for part in (self.chosen, self.top_ids, self.top)))


def score(model: Model, hidden: Tensor, targets: Tensor, num_top: int) -> Scores:
    """Return the log probability of each row's target, int64 [num_rows >= 1], and the likeliest tokens.

    hidden: [num_rows, hidden_size].
    """
    num_rows = _slice_rows(model.config.vocab_size)
    parts = zip(hidden.split(num_rows), targets.split(num_rows), strict=True)
    return _joined(_score(model.logits(rows), of_rows, num_top) for rows, of_rows in parts)


def reported_rows(specs: Seq[SampleSpec]) -> npt.NDArray[np.int64]:
    """Return the samples whose requests ask for log probabilities, ascending."""
    return np.flatnonzero([spec.params.logprobs is not None for spec in specs])


def score_samples(logits: Tensor, specs: Seq[SampleSpec], rows: Tensor, token_ids: Tensor) -> Scores:
    """Score the tokens that were sampled from some of the rows, under the model's own distribution.

    logits: [len(specs), vocab_size]; rows: those of `reported_rows`, at least one; token_ids: int64 [len(specs)].
    """
    num_top = max(spec.params.logprobs or 0 for spec in specs)
    parts = rows.split(_slice_rows(logits.shape[1]))
    return _joined(_score(logits.index_select(0, part), token_ids.index_select(0, part), num_top) for part in parts)


def sampled_tokens(token_ids: Seq[int], specs: Seq[SampleSpec], scores: Scores | None) -> list[SampledToken]:
    """Return the sampled tokens with the log probabilities that their requests ask for.

    scores: of `reported_rows`, on the host; None if there are none.
    """
    sampled = [SampledToken(token_id) for token_id in token_ids]
    if scores is not None:
        parts = zip(scores.chosen.tolist(), scores.top_ids.tolist(), scores.top.tolist(), strict=True)
        for row, (chosen, ids, values) in zip(reported_rows(specs).tolist(), parts, strict=True):
            count = specs[row].params.logprobs
            top = tuple(zip(ids[:count], values[:count], strict=True))
            sampled[row] = SampledToken(token_ids[row], TokenLogprobs(chosen, top))
    return sampled


def _slice_rows(vocab_size: int) -> int:
    return max(1, SLICE_BYTES // (4 * vocab_size))


def _score(logits: Tensor, targets: Tensor, num_top: int) -> Scores:
    logits = logits.float()
    total = logits.logsumexp(-1, keepdim=True)
    top = logits.topk(min(num_top, logits.shape[1]))
    chosen = logits.gather(1, targets[:, None]) - total
    return Scores(chosen[:, 0], top.indices.to(torch.int32), top.values - total)


def _joined(parts: Iterable[Scores]) -> Scores:
    columns = zip(*[(part.chosen, part.top_ids, part.top) for part in parts], strict=True)
    return Scores(*map(torch.cat, columns))


def _to_host(values: Tensor) -> Tensor:
    copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.device.type == "cuda")
    return copy.copy_(values, non_blocking=True)


Row = npt.NDArray[np.float32]  # [vocab_size]


class Sampler:
    """Samples tokens for one model."""

    def __init__(self, eos_token_ids: Seq[int]) -> None:
        self._eos_token_ids = tuple(eos_token_ids)
        loaded = library()
        self._compiled = None if isinstance(loaded, Missing) else RowSampler(loaded)

    def sample(self, logits: Tensor, specs: Seq[SampleSpec], masks: TokenMasks = NO_MASKS) -> list[SampledToken]:
        """Sample one token per row. logits: [len(specs), vocab_size], any float dtype; left as they are."""
        if not specs:
            return []
        token_ids, rows = self._token_ids(logits.cpu(), specs, masks), torch.from_numpy(reported_rows(specs))
        scores = score_samples(logits, specs, rows, torch.tensor(token_ids)) if len(rows) else None
        return sampled_tokens(token_ids, specs, scores)

    def _token_ids(self, logits: Tensor, specs: Seq[SampleSpec], masks: TokenMasks) -> list[int]:
        logits = logits.float() if logits.dtype == torch.float16 else logits
        changed = self._changed(logits, specs, masks)
        keys = rng.keys([spec.seed for spec in specs], [spec.index for spec in specs])
        if self._compiled is not None:
            return self._compiled.sample(logits, changed, [spec.params for spec in specs], keys)
        rows = [changed.get(row, logits[row]).float().numpy() for row in range(len(specs))]
        ids = np.arange(logits.shape[1], dtype=np.uint32)
        return [_token_id(row, spec.params, key, ids) for row, spec, key in zip(rows, specs, keys, strict=True)]

    def _changed(self, logits: Tensor, specs: Seq[SampleSpec], masks: TokenMasks) -> dict[int, Tensor]:
        """Return changed copies of the rows that requests or grammars change."""
        bits = dict(zip(masks.rows, masks.bits, strict=True))
        changed = [row for row, spec in enumerate(specs) if row in bits or _changes_logits(spec)]
        if not changed:
            return {}
        copies = logits[changed].float()
        for row, copied in zip(changed, copies.numpy(), strict=True):
            adjust(copied, specs[row], self._eos_token_ids)
            if row in bits:
                copied[~allowed(bits[row], len(copied))] = -math.inf
        return dict(zip(changed, copies, strict=True))


def _changes_logits(spec: SampleSpec) -> bool:
    params = spec.params
    is_limited = params.allowed_token_ids or spec.forbidden or spec.forbid_stops
    return bool(params.has_penalties or params.logit_bias or is_limited)


# ---- what changes logits


def adjust(row: Row, spec: SampleSpec, eos_token_ids: Seq[int]) -> None:
    """Apply penalties, logit biases, allowed and forbidden tokens, in that order and in place."""
    params = spec.params
    if params.repetition_penalty != 1.0:
        seen = np.concatenate((_array(spec.prompt_ids), _array(spec.output_ids)))  # some more than once
        penalty = np.float32(params.repetition_penalty)
        values = row[seen]
        row[seen] = np.where(values > 0, values / penalty, values * penalty)
    if params.frequency_penalty or params.presence_penalty:
        written, counts = np.unique(_array(spec.output_ids), return_counts=True)
        row[written] -= (counts * params.frequency_penalty + params.presence_penalty).astype(np.float32)
    for token_id, bias in dict(params.logit_bias).items():
        row[token_id] += np.float32(bias)
    if params.allowed_token_ids:
        places = _array(params.allowed_token_ids)
        kept = row[places]
        row.fill(-math.inf)
        row[places] = kept
    # A model's files may name an end-of-sequence token past its vocabulary, which is never sampled.
    row[_array([token_id for token_id in forbidden(spec, eos_token_ids) if 0 <= token_id < len(row)])] = -math.inf


def forbidden(spec: SampleSpec, eos_token_ids: Seq[int]) -> tuple[int, ...]:
    """Return the tokens that may not be sampled; none if that would leave no allowed token.

    None for a sample with a grammar, too: its mask leaves them out already.
    """
    allowed_ids = spec.params.allowed_token_ids
    if spec.matcher is not None or not (spec.forbid_stops or spec.params.bad_word_ids):
        return ()
    token_ids = unwanted(spec, eos_token_ids)
    return () if allowed_ids and set(token_ids).issuperset(allowed_ids) else token_ids


def _array(token_ids: Seq[int]) -> npt.NDArray[np.int64]:
    """Return the ids as an array. A packed array is not converted id by id."""
    return np.asarray(token_ids, dtype=np.int64)


# ---- temperature, filters and noise, where there is no compiled library


def _token_id(row: Row, params: SamplingParams, key: rng.Words, ids: rng.Words) -> int:
    """Return the token id of the largest sum of score and noise, of those that the filters keep."""
    if params.is_greedy:
        return int(row.argmax())
    scores = row / np.float32(params.temperature)
    best = int(scores.argmax())
    peak = float(scores[best])
    if not math.isfinite(peak):
        return best  # broken logits
    kept = np.flatnonzero(scores >= _floor(scores, peak, params))
    return int(kept[(scores[kept] + rng.gumbel(key, ids[kept])).argmax()])


def _floor(scores: Row, peak: float, params: SamplingParams) -> float:
    """Return the smallest score that top-k, top-p and min-p keep. Equal scores stand or fall together."""
    floor = peak + math.log(params.min_p) if params.min_p > 0.0 else -math.inf
    is_limited = 0 < params.top_k < len(scores)
    if not is_limited and params.top_p >= 1.0:
        return floor
    kept = np.sort(scores)[::-1]
    if is_limited:
        kept = kept[: np.searchsorted(-kept, -kept[params.top_k - 1], side="right")]
    if params.top_p < 1.0:
        weights = np.exp((kept - peak).astype(np.float64))
        num_kept = int((weights.cumsum() - weights < params.top_p * weights.sum()).sum())
        kept = kept[: max(1, num_kept)]
    return max(floor, float(kept[-1]))
