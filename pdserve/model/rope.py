"""Rotary position embeddings, with the scalings of the Llama family.

Feature i is rotated with feature i + head_dim/2. `rotate_` takes tables of the whole width, with the sine negated in
its first half, so that one roll and two products rotate queries and keys together.
"""

import math

import torch
from torch import Tensor

from pdserve.model.config import LinearRope, Llama3Rope, ModelConfig, YarnRope

Angles = tuple[Tensor, Tensor]  # of one step's positions: cosines and signed sines, [num_tokens, 1, head_dim] each


class Rope:
    """A model's rotation of queries and keys."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        frequencies, self._cos_scale = _frequencies(config)
        self._frequencies = frequencies.to(device)

    def table(self, num_positions: int) -> Tensor:
        """Return each position's cosines, then its sines: float32 [num_positions, head_dim]."""
        return self.cos_sin(torch.arange(num_positions, device=self._frequencies.device))

    def cos_sin(self, positions: Tensor) -> Tensor:
        """Return the cosines, then the sines, of `positions` int64 [num_tokens]: float32 [num_tokens, head_dim]."""
        return torch.cat(self._turns(positions), -1)

    def angles(self, positions: Tensor, dtype: torch.dtype) -> Angles:
        """Return the angles of `positions`: int64 [num_tokens]."""
        cos, sin = self._turns(positions)
        cosines, sines = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        return cosines.to(dtype)[:, None, :], sines.to(dtype)[:, None, :]

    def _turns(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        turns = positions.float()[:, None] * self._frequencies
        return turns.cos() * self._cos_scale, turns.sin() * self._cos_scale


def rotate_(heads: Tensor, angles: Angles) -> None:
    """Turn `heads` [num_tokens, num_heads, head_dim] by their positions, in place."""
    cosines, sines = angles
    torch.addcmul(heads * cosines, heads.roll(heads.shape[-1] // 2, -1), sines, out=heads)


def _frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """Return radians per position, float32 [head_dim / 2], and the factor on cosine and sine."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    plain = 1.0 / (config.rope_theta**exponents)
    match config.rope_scaling:
        case None:
            return plain, 1.0
        case LinearRope(factor):
            return plain / factor, 1.0
        case Llama3Rope() as scaling:
            return _llama3(plain, scaling), 1.0
        case YarnRope() as scaling:
            return _yarn(plain, scaling, config)


def _llama3(plain: Tensor, scaling: Llama3Rope) -> Tensor:
    """Keep wavelengths short beside the original context, divide long ones by the factor, and blend between."""
    turns_in_context = scaling.original_max_position_embeddings * plain / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep = ((turns_in_context - scaling.low_freq_factor) / span).clamp(0.0, 1.0)
    return plain * keep + plain / scaling.factor * (1.0 - keep)


def _yarn(plain: Tensor, scaling: YarnRope, config: ModelConfig) -> tuple[Tensor, float]:
    """Blend along a ramp over the features instead of over wavelengths (Peng et al. 2023, section 3.2)."""

    def feature_turning(times: float) -> float:
        ratio = scaling.original_max_position_embeddings / (times * 2 * math.pi)
        return config.head_dim * math.log(ratio) / (2 * math.log(config.rope_theta))

    low, high = feature_turning(scaling.beta_fast), feature_turning(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.head_dim - 1)
    width = (high - low) or 0.001
    divided = ((torch.arange(len(plain), dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    attention_factor = scaling.attention_factor
    if attention_factor is None:
        attention_factor = 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1.0 else 1.0
    return plain / scaling.factor * divided + plain * (1.0 - divided), attention_factor
