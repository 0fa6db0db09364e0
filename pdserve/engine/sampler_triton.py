"""Sample a step's tokens with the sampling kernels: any mix of parameters together, the CPU sampler's tokens.

Parameters are laid out and sent, in one copy, while the device still computes the logits.
"""

from collections.abc import Sequence as Seq
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pdserve.engine.counted_rows import CountedRows
from pdserve.engine.masks import NO_MASKS, WORD_BITS, TokenMasks, packed
from pdserve.engine.sampler import forbidden
from pdserve.engine.step import SampleSpec
from pdserve.kernels import rng
from pdserve.kernels.sample import EVERYTHING, Bias, Mask, Params, Penalties, sample
from pdserve.kernels.staging import Staging

Words = npt.NDArray[np.int32] | npt.NDArray[np.float32]  # 4 bytes each


class KernelSampler:
    """Samples tokens for one model on one device."""

    def __init__(self, eos_token_ids: Seq[int], vocab_size: int, most_samples: int, device: torch.device) -> None:
        self._eos_token_ids = tuple(eos_token_ids)
        self._vocab_size = vocab_size
        self._staging = Staging(device)
        self._counted = CountedRows(most_samples, vocab_size, device)

    def sample(self, logits: Tensor, specs: Seq[SampleSpec], masks: TokenMasks = NO_MASKS) -> Tensor:
        """Sample one token per row of logits [len(specs) >= 1, vocab_size]: int64 [len(specs)] on the device.

        Does not wait for the device.
        """
        params = [spec.params for spec in specs]
        keys, temperature, top_k, top_p, min_p, repetition, frequency, presence, slots, *rest = self._staging.send(
            rng.keys([spec.seed for spec in specs], [spec.index for spec in specs]).view(np.int32),
            _floats([0.0 if p.is_greedy else p.temperature for p in params]),
            _ints([p.top_k for p in params]),
            _floats([p.top_p for p in params]),
            _floats([p.min_p for p in params]),
            _floats([p.repetition_penalty for p in params]),
            _floats([p.frequency_penalty for p in params]),
            _floats([p.presence_penalty for p in params]),
            self._counted.take(specs),
            *self._bias(specs),
            *self._mask(specs, masks),
        )
        penalties = Penalties(repetition, frequency, presence, slots, self._counted.counts)
        on_device = Params(keys, temperature, top_k, top_p, min_p)
        return sample(logits, on_device, penalties=penalties, bias=Bias(*rest[:3]), mask=Mask(*rest[3:]))

    def _bias(self, specs: Seq[SampleSpec]) -> tuple[Words, Words, Words]:
        """Return what to add to single logits; a forbidden token gets minus infinity."""
        eos, never = self._eos_token_ids, float("-inf")
        rows = [dict(spec.params.logit_bias) | dict.fromkeys(forbidden(spec, eos), never) for spec in specs]
        values = _floats(list(chain.from_iterable(row.values() for row in rows)))
        offsets = np.cumsum([0, *map(len, rows)]).astype(np.int32)
        return np.fromiter(chain.from_iterable(rows), np.int32), values, offsets

    def _mask(self, specs: Seq[SampleSpec], masks: TokenMasks) -> tuple[Words, Words]:
        """Return which tokens may be sampled, for the rows that have a grammar or name them."""
        words = {
            row: packed(spec.params.allowed_token_ids, self._vocab_size)
            for row, spec in enumerate(specs)
            if spec.params.allowed_token_ids
        }
        words |= dict(zip(masks.rows, masks.bits, strict=True))
        rows = np.full(len(specs), EVERYTHING, np.int32)
        rows[list(words)] = np.arange(len(words))
        none = np.empty((0, -(-self._vocab_size // WORD_BITS)), np.int32)
        return (np.stack(list(words.values())) if words else none), rows


def _floats(values: Seq[float]) -> Words:
    return np.array(values, dtype=np.float32)


def _ints(values: Seq[int]) -> Words:
    return np.array(values, dtype=np.int32)
