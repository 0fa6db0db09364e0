"""Draw a step's tokens in one pass over rows that may each want something else.

A draw depends on the row's logits, its parameters, its seed and its token index, and on nothing else in the batch.
A row without a feature is not touched for it: plain greedy rows are an argmax over the model's own logits.
"""

from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from pdserve.engine.sampler_filters import draw
from pdserve.engine.sampler_logits import adjust
from pdserve.engine.step import SampledToken, SampleSpec, TokenLogprobs


class Sampler:
    """Draws tokens for one model."""

    def __init__(self, eos_token_ids: Seq[int]) -> None:
        self._eos_token_ids = tuple(eos_token_ids)

    def sample(self, logits: Tensor, specs: Seq[SampleSpec]) -> list[SampledToken]:
        """Draw one token per row. logits: [len(specs), vocab_size], any float dtype; left as they are."""
        if not specs:
            return []
        return with_logprobs(logits, specs, self._token_ids(logits, specs))

    def _token_ids(self, logits: Tensor, specs: Seq[SampleSpec]) -> list[int]:
        special = [row for row, spec in enumerate(specs) if not _plain_greedy(spec)]
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
        token_ids[special] = draw(adjusted, chosen).numpy()
        return token_ids.tolist()


def with_logprobs(logits: Tensor, specs: Seq[SampleSpec], token_ids: Seq[int]) -> list[SampledToken]:
    """Return the tokens drawn, each with the log probabilities its request asks for."""
    reported = [row for row, spec in enumerate(specs) if spec.params.logprobs is not None]
    logprobs = dict(zip(reported, _logprobs(logits, specs, token_ids, reported), strict=True))
    return [SampledToken(token_id, logprobs.get(row)) for row, token_id in enumerate(token_ids)]


def _plain_greedy(spec: SampleSpec) -> bool:
    params = spec.params
    return params.is_greedy and not (params.has_penalties or params.logit_bias or spec.forbid_stops)


def _rows(logits: Tensor, rows: list[int]) -> Tensor:
    """Return the rows, without a copy when they are all there are."""
    return logits if len(rows) == len(logits) else logits.index_select(0, torch.tensor(rows, device=logits.device))


def _argmax(logits: Tensor) -> Tensor:
    if logits.is_cuda:
        return logits.argmax(-1).cpu()
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
