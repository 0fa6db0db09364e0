"""Change logits before anything is drawn: penalties, biases, forbidden ends, in that order."""

from collections.abc import Sequence as Seq
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pdserve.engine.step import SampleSpec

Ints = npt.NDArray[np.int64]
NO_INTS = np.empty(0, dtype=np.int64)


def adjust(logits: Tensor, specs: Seq[SampleSpec], eos_token_ids: Seq[int]) -> None:
    """Apply each row's penalties, logit bias and forbidden stops, in place.

    logits: float32 [len(specs), vocab_size], contiguous.
    """
    _penalize_repetition(logits, specs)
    _penalize_output(logits, specs)
    _bias(logits, specs)
    _forbid_stops(logits, specs, eos_token_ids)


def _penalize_repetition(logits: Tensor, specs: Seq[SampleSpec]) -> None:
    """Divide positive and multiply negative logits of every token of prompt and output by the penalty."""
    seen = [_seen(spec) if spec.params.repetition_penalty != 1.0 else NO_INTS for spec in specs]
    cells = _cells(logits, seen)
    if cells is None:
        return
    penalties = _per_cell(logits, seen, [spec.params.repetition_penalty for spec in specs])
    values = logits.view(-1)[cells]
    logits.view(-1)[cells] = torch.where(values > 0, values / penalties, values * penalties)


def _penalize_output(logits: Tensor, specs: Seq[SampleSpec]) -> None:
    """Subtract the frequency penalty per occurrence in the output, and the presence penalty once."""
    counted = [
        np.unique(_array(spec.output_ids), return_counts=True)
        if spec.params.frequency_penalty or spec.params.presence_penalty
        else (NO_INTS, NO_INTS)
        for spec in specs
    ]
    tokens = [ids for ids, _ in counted]
    cells = _cells(logits, tokens)
    if cells is None:
        return
    counts = torch.from_numpy(np.concatenate([count for _, count in counted])).to(logits)
    frequency = _per_cell(logits, tokens, [spec.params.frequency_penalty for spec in specs])
    presence = _per_cell(logits, tokens, [spec.params.presence_penalty for spec in specs])
    logits.view(-1)[cells] -= counts * frequency + presence


def _bias(logits: Tensor, specs: Seq[SampleSpec]) -> None:
    biases = [dict(spec.params.logit_bias) for spec in specs]
    cells = _cells(logits, [_array(list(bias)) for bias in biases])
    if cells is not None:
        values = list(chain.from_iterable(bias.values() for bias in biases))
        logits.view(-1)[cells] += torch.tensor(values, dtype=logits.dtype, device=logits.device)


def _forbid_stops(logits: Tensor, specs: Seq[SampleSpec], eos_token_ids: Seq[int]) -> None:
    # A model's files may name an end past its vocabulary, which is never drawn; its place is the next row's.
    ends = [token_id for token_id in eos_token_ids if 0 <= token_id < logits.shape[1]]
    stops = [
        np.unique(_array([*ends, *spec.params.stop_token_ids])) if spec.forbid_stops else NO_INTS for spec in specs
    ]
    cells = _cells(logits, stops)
    if cells is not None:
        logits.view(-1)[cells] = float("-inf")


def _array(token_ids: Seq[int]) -> Ints:
    return np.fromiter(token_ids, dtype=np.int64, count=len(token_ids))


def _seen(spec: SampleSpec) -> Ints:
    return np.unique(np.concatenate((_array(spec.prompt_ids), _array(spec.output_ids))))


def _cells(logits: Tensor, tokens: Seq[Ints]) -> Tensor | None:
    """Return where row i's tokens lie in the flattened logits, or None if no row names any."""
    lengths = [len(ids) for ids in tokens]
    if not any(lengths):
        return None
    rows = np.repeat(np.arange(len(tokens)) * logits.shape[1], lengths)
    return torch.from_numpy(rows + np.concatenate(tokens)).to(logits.device)


def _per_cell(logits: Tensor, tokens: Seq[Ints], values: Seq[float]) -> Tensor:
    """Return row i's value once for each of its tokens."""
    return torch.from_numpy(np.repeat(np.array(values), [len(ids) for ids in tokens])).to(logits)
