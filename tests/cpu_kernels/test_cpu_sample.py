"""The sampler draws the same tokens with vectors of any width. That they are the right ones is held by the engine's."""

import ctypes
from itertools import product

import pytest
import torch

from pdserve.kernels import rng
from pdserve.kernels.cpu.sample import RowSampler
from pdserve.protocol.sampling import SamplingParams

FILTERS = [
    SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    for temperature, top_k, top_p, min_p in product([0.0, 0.7, 2.0], [0, 5, 300], [1.0, 0.8], [0.0, 0.05])
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [3, 402, 4099])
def test_vectors_of_any_width_draw_the_same(
    loaded: ctypes.CDLL, narrow: ctypes.CDLL, vocab: int, dtype: torch.dtype
) -> None:
    logits = (torch.randn(len(FILTERS), vocab, generator=torch.Generator().manual_seed(vocab)) * 3).to(dtype)
    logits[0, 1], logits[-1, vocab // 2] = torch.nan, torch.inf
    keys = rng.keys(range(len(FILTERS)), range(len(FILTERS)))
    wide, other = (RowSampler(each).sample(logits, {}, FILTERS, keys) for each in (loaded, narrow))
    assert wide == other


def test_rows_that_threads_share_draw_what_they_draw_alone(loaded: ctypes.CDLL) -> None:
    logits, sampler = torch.randn(25, 49152, generator=torch.Generator().manual_seed(1)), RowSampler(loaded)
    keys = rng.keys(range(25), range(25))
    alone = [sampler.sample(logits[i : i + 1], {}, FILTERS[i - 1 : i], keys[i : i + 1]) for i in range(1, 24)]
    together = sampler.sample(logits, {}, [FILTERS[-1], *FILTERS[:24]], keys)
    assert [[token] for token in together[1:24]] == alone
