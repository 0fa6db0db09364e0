"""Guesses with the model's noise are nearly as often right as rejection sampling would keep them (Leviathan 2023).

With TV the total variation distance of the model's distribution p from the draft model's q, rejection sampling keeps
1 - TV, noise of one's own makes sum(p q) right, and the same exponential noise for both at least (1 - TV) / (1 + TV).
No noise makes more right than 1 - TV.
"""

import numpy as np
import pytest
import torch
from torch import Tensor

from pdserve.engine.sampler import Sampler
from pdserve.engine.step import SampleSpec
from pdserve.protocol.sampling import SamplingParams

NUM_DRAWS, VOCAB = 4000, 300
TOLERANCE = 4 * 0.5 / NUM_DRAWS**0.5  # four standard deviations at most


def drawn(logits: Tensor, temperature: float, seed: int) -> np.ndarray:
    """Return a token for each index, all from one distribution."""
    params = SamplingParams(temperature=temperature)
    specs = [SampleSpec(params, seed, index, (), (), False, (0, index)) for index in range(NUM_DRAWS)]
    tokens = Sampler(()).sample(logits.expand(NUM_DRAWS, -1).contiguous(), specs)
    return np.array([token.token_id for token in tokens])


@pytest.mark.parametrize("temperature", [0.5, 1.0])
@pytest.mark.parametrize("apart", [0.3, 1.0, 3.0])
def test_the_models_noise_keeps_what_its_bounds_say(apart: float, temperature: float) -> None:
    random = torch.Generator().manual_seed(1)
    own = 2 * torch.randn(VOCAB, generator=random)
    draft = own + apart * torch.randn(VOCAB, generator=random)
    p, q = ((logits / temperature).softmax(-1).double().numpy() for logits in (own, draft))
    kept = float(np.minimum(p, q).sum())  # 1 - TV
    sampled, guessed, alone = drawn(own, temperature, 7), drawn(draft, temperature, 7), drawn(draft, temperature, 8)
    by_rejection = np.random.default_rng(0).random(NUM_DRAWS) < p[alone] / q[alone]
    assert abs(by_rejection.mean() - kept) < TOLERANCE
    assert abs((sampled == alone).mean() - p @ q) < TOLERANCE
    shared = (sampled == guessed).mean()
    assert kept / (2 - kept) - TOLERANCE < shared < kept + TOLERANCE
    assert shared > (sampled == alone).mean() + TOLERANCE
