"""Rotary position embeddings.

Feature i is rotated with feature i + head_dim/2. Where a checkpoint's features pair up otherwise, or only some of them
turn, q's and k's are put into this `order` when they are loaded: scores are sums over features in any order. Features
that do not turn have the angle 0. `rotate_` takes tables of the whole width, with the sine negated in
its first half, so that one roll and two products rotate queries and keys together.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pdserve.model.rope_config import LinearRope, Llama3Rope, LongRope, RopeConfig, YarnRope

Angles = tuple[Tensor, Tensor]  # of one step's positions: cosines and signed sines, [num_tokens, 1, head_dim] each


class Rope:
    """A rotation of queries and keys."""

    def __init__(self, head_dim: int, config: RopeConfig, device: torch.device) -> None:
        turning = config.turning(head_dim)
        frequencies, scale = _frequencies(turning, head_dim if config.is_cut else turning, config)
        still = (head_dim - turning) // 2
        self._frequencies = torch.cat((frequencies, torch.zeros(still))).to(device)
        self._growth = config.growth
        self._scale = torch.tensor([scale] * (turning // 2) + [1.0] * still).to(device)

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

    def growth(self, positions: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return what queries at `positions` are multiplied with, [num_tokens, 1, 1]; None: nothing."""
        growth = self._growth
        if growth is None or int(positions.max()) + growth.first < growth.length:
            return None
        steps = torch.div(positions + growth.first, growth.length, rounding_mode="floor").float()
        return (torch.log1p(steps) * growth.strength + 1.0).to(dtype)[:, None, None]

    def _turns(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        turns = positions.float()[:, None] * self._frequencies
        return turns.cos() * self._scale, turns.sin() * self._scale


def distinct(ropes: Sequence[Rope]) -> tuple[list[Rope], list[int]]:
    """Return each of the layers' ropes once, and which of them is each layer's."""
    found = list({id(rope): rope for rope in ropes}.values())
    places = {id(rope): place for place, rope in enumerate(found)}
    return found, [places[id(rope)] for rope in ropes]


def order(head_dim: int, config: RopeConfig) -> Tensor | None:
    """Return which of a checkpoint's features each feature of a head is; None: they are in order already."""
    if config.is_cut:
        return None
    half, turning = head_dim // 2, config.turning(head_dim)
    features, still = torch.arange(turning), torch.arange(turning, head_dim)
    pairs = features.view(-1, 2).t() if config.interleaved else features.view(2, -1)
    first, second = pairs.unbind()
    found = torch.cat((first, still[: half - len(first)], second, still[half - len(first) :]))
    return None if torch.equal(found, torch.arange(head_dim)) else found


def rotate_(heads: Tensor, angles: Angles) -> None:
    """Turn `heads` [num_tokens, num_heads, head_dim] by their positions, in place."""
    cosines, sines = angles
    torch.addcmul(heads * cosines, heads.roll(heads.shape[-1] // 2, -1), sines, out=heads)


def _frequencies(turning: int, width: int, config: RopeConfig) -> tuple[Tensor, float]:
    """Return radians per position, float32 [turning / 2], and the factor on cosine and sine.

    width: over how many features frequencies fall to 1 / theta.
    """
    exponents = torch.arange(0, turning, 2, dtype=torch.int64).float() / max(width, 1)
    plain = 1.0 / (config.theta**exponents)
    match config.scaling:
        case None:
            return plain, 1.0
        case LinearRope(factor):
            return plain / factor, 1.0
        case Llama3Rope() as scaling:
            return _llama3(plain, scaling), 1.0
        case YarnRope() as scaling:
            return _yarn(plain, scaling, config.theta), scaling.attention_factor
        case LongRope(factors, attention_factor):
            return plain / torch.tensor(factors), attention_factor


def _llama3(plain: Tensor, scaling: Llama3Rope) -> Tensor:
    """Keep wavelengths short beside the original context, divide long ones by the factor, and blend between."""
    turns_in_context = scaling.original_max_position_embeddings * plain / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep = ((turns_in_context - scaling.low_freq_factor) / span).clamp(0.0, 1.0)
    return plain * keep + plain / scaling.factor * (1.0 - keep)


def _yarn(plain: Tensor, scaling: YarnRope, theta: float) -> Tensor:
    """Blend along a ramp over the features instead of over wavelengths (Peng et al. 2023, section 3.2)."""
    head_dim = 2 * len(plain)

    def feature_turning(times: float) -> float:
        ratio = scaling.original_max_position_embeddings / (times * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(theta))

    low, high = feature_turning(scaling.beta_fast), feature_turning(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = (high - low) or 0.001
    divided = ((torch.arange(len(plain), dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return plain / scaling.factor * divided + plain * (1.0 - divided)
