"""Sample a step's tokens with the sampling kernel: any mix of parameters in one launch, the CPU sampler's tokens.

Parameters are laid out and sent while the device still computes the logits.
"""

from collections.abc import Collection, Iterator
from collections.abc import Sequence as Seq
from itertools import chain, product

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pdserve.engine.masks import NO_MASKS, TokenMasks, packed
from pdserve.engine.sampler import forbidden
from pdserve.engine.step import SampleSpec
from pdserve.kernels import rng
from pdserve.kernels.sample import EVERYTHING, Bias, Mask, Params, Penalties, Ragged, sample
from pdserve.kernels.staging import Staging
from pdserve.sampling import SamplingParams

Words = npt.NDArray[np.int32] | npt.NDArray[np.float32]  # 4 bytes each


def each_variant() -> Iterator[SampleSpec]:
    """Yield a sample for each variant of the kernel: with and without penalties, biases and masks."""
    for has_penalties, has_bias, has_mask in product((False, True), repeat=3):
        params = SamplingParams(
            repetition_penalty=2.0 if has_penalties else 1.0,
            logit_bias=((0, 1.0),) if has_bias else (),
            allowed_token_ids=(0,) if has_mask else (),
        )
        yield SampleSpec(params, 0, 0, (0,), (), forbid_stops=False)


class KernelSampler:
    """Samples tokens for one model on one device."""

    def __init__(self, eos_token_ids: Seq[int], vocab_size: int, device: torch.device) -> None:
        self._eos_token_ids = tuple(eos_token_ids)
        self._vocab_size = vocab_size
        self._staging = Staging(device)

    def sample(self, logits: Tensor, specs: Seq[SampleSpec], masks: TokenMasks = NO_MASKS) -> Tensor:
        """Sample one token per row of logits [len(specs) >= 1, vocab_size]: int64 [len(specs)] on the device.

        Does not wait for the device.
        """
        params = [spec.params for spec in specs]
        keys, temperature, top_k, top_p, min_p = self._staging.send(
            rng.keys([spec.seed for spec in specs], [spec.index for spec in specs]).view(np.int32).reshape(-1),
            _floats([0.0 if p.is_greedy else p.temperature for p in params]),
            _ints([p.top_k for p in params]),
            _floats([p.top_p for p in params]),
            _floats([p.min_p for p in params]),
        )
        on_device = Params(keys.view(-1, 2), temperature, top_k, top_p, min_p)
        penalties, bias, mask = self._penalties(specs), self._bias(specs), self._mask(specs, masks)
        return sample(logits, on_device, penalties=penalties, bias=bias, mask=mask)

    def _penalties(self, specs: Seq[SampleSpec]) -> Penalties | None:
        if not any(spec.params.has_penalties for spec in specs):
            return None
        params = [spec.params for spec in specs]
        prompts, outputs = [spec.prompt_ids for spec in specs], [spec.output_ids for spec in specs]
        repetition, frequency, presence, *ragged = self._staging.send(
            _floats([p.repetition_penalty for p in params]),
            _floats([p.frequency_penalty for p in params]),
            _floats([p.presence_penalty for p in params]),
            _flat(prompts),
            _offsets(prompts),
            _flat(outputs),
            _offsets(outputs),
        )
        return Penalties(repetition, frequency, presence, Ragged(*ragged[:2]), Ragged(*ragged[2:]))

    def _bias(self, specs: Seq[SampleSpec]) -> Bias | None:
        """Return what to add to single logits; a forbidden token gets minus infinity."""
        eos, never = self._eos_token_ids, float("-inf")
        rows = [dict(spec.params.logit_bias) | dict.fromkeys(forbidden(spec, eos), never) for spec in specs]
        if not any(rows):
            return None
        values = _floats(list(chain.from_iterable(row.values() for row in rows)))
        return Bias(*self._staging.send(_flat([list(row) for row in rows]), values, _offsets(rows)))

    def _mask(self, specs: Seq[SampleSpec], masks: TokenMasks) -> Mask | None:
        """Return which tokens may be sampled, for the rows that have a grammar or name them."""
        words = {
            row: packed(spec.params.allowed_token_ids, self._vocab_size)
            for row, spec in enumerate(specs)
            if spec.params.allowed_token_ids
        }
        words |= dict(zip(masks.rows, masks.bits, strict=True))
        if not words:
            return None
        rows = np.full(len(specs), EVERYTHING, np.int32)
        rows[list(words)] = np.arange(len(words))
        return Mask(*self._staging.send(np.stack(list(words.values())), rows))


def _floats(values: Seq[float]) -> Words:
    return np.array(values, dtype=np.float32)


def _ints(values: Seq[int]) -> Words:
    return np.array(values, dtype=np.int32)


def _flat(rows: Seq[Seq[int]]) -> Words:
    return np.fromiter(chain.from_iterable(rows), dtype=np.int32)


def _offsets(rows: Seq[Collection[int]]) -> Words:
    return np.cumsum([0, *(len(row) for row in rows)]).astype(np.int32)
