"""Counter-based random numbers: a token's noise depends on (seed, token index, token id) and on nothing else.

So a sequence that is preempted, handed off or resumed elsewhere gets the same tokens. The CPU sampler uses this
file; `sample.py` computes the same bits inside its kernel.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
LOWBIAS_1 = 0x7FEB352D
LOWBIAS_2 = 0x846CA68B - (1 << 32)  # as int32
SERIES_BELOW = 2.0**-10  # under this, 1 - u loses too many bits for log
LARGEST_U = 1.0 - 2.0**-24
CACHED_ELEMENTS = 1 << 17  # as much noise as stays in a core's cache between the steps of the hash

_LOW32 = (1 << 32) - 1
_LOW64 = (1 << 64) - 1


def keys(seeds: npt.NDArray[np.integer] | Sequence[int], indices: npt.ArrayLike) -> npt.NDArray[np.uint32]:
    """Mix each sequence's 64-bit seed with the index of the token it samples next.

    seeds: [n] 64-bit integers, signed or not. indices: [n] non-negative token indices.
    Returns uint32 [n, 2], low word first. The mixer is splitmix64's finalizer (Steele, Lea, Flood 2014).
    """
    if isinstance(seeds, np.ndarray):
        z = seeds.astype(np.uint64)  # two's complement: negative seeds wrap
    else:
        z = np.array([seed & _LOW64 for seed in seeds], dtype=np.uint64)
    counter = np.asarray(indices).astype(np.uint64)
    if z.ndim != 1 or z.shape != counter.shape:
        raise ValueError(f"seeds and indices must be vectors of one length, got {z.shape} and {counter.shape}")
    z = z + np.uint64(GOLDEN) * (counter + np.uint64(1))
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    out = np.empty((len(z), 2), dtype=np.uint32)
    out[:, 0] = z & np.uint64(_LOW32)
    out[:, 1] = z >> np.uint64(32)
    return out


def as_tensor(key_words: npt.NDArray[np.uint32], device: torch.device | str = "cpu") -> Tensor:
    """Reinterpret `keys`' result as the int32 [n, 2] tensor the samplers take."""
    return torch.from_numpy(np.ascontiguousarray(key_words).view(np.int32)).to(device)


def gumbel(key_words: Tensor, vocab_size: int) -> Tensor:
    """Return one standard Gumbel variate for each (row, token id).

    key_words: int32 [n, 2] (bit patterns of `keys`). Returns float32 [n, vocab_size].
    The argmax of logit/temperature + gumbel is a sample from softmax(logit/temperature).
    """
    ids = torch.arange(vocab_size, dtype=torch.int32, device=key_words.device)
    out = torch.empty((len(key_words), vocab_size), dtype=torch.float32, device=key_words.device)
    rows = max(1, CACHED_ELEMENTS // max(1, vocab_size))
    for first in range(0, len(key_words), rows):
        part = key_words[first : first + rows]
        out[first : first + rows] = gumbel_at(part, ids.expand(len(part), -1))
    return out


def gumbel_at(key_words: Tensor, ids: Tensor) -> Tensor:
    """Return the same variates as `gumbel`, for chosen ids only: int32 [n, k] -> float32 [n, k]."""
    if key_words.dtype != torch.int32 or key_words.ndim != 2 or key_words.shape[1] != 2:
        raise ValueError(f"key_words must be int32 [n, 2], got {key_words.dtype} {tuple(key_words.shape)}")
    if ids.dtype != torch.int32 or ids.ndim != 2 or len(ids) != len(key_words):
        raise ValueError(f"ids must be int32 [{len(key_words)}, k], got {ids.dtype} {tuple(ids.shape)}")
    u = uniform(random_bits(key_words, ids))
    series = u.mul(1.0 / 3.0).add_(0.5).mul_(u).add_(1.0).mul_(u)
    exponential = torch.where(u < SERIES_BELOW, series, u.neg().add_(1.0).log_().neg_())
    return exponential.log_().neg_()


def random_bits(key_words: Tensor, ids: Tensor) -> Tensor:
    """Hash (key, token id) to 32 uniform bits: int32 [n, k], as bit patterns."""
    x = ids ^ key_words[:, :1]
    return lowbias32_(lowbias32_(x).add_(key_words[:, 1:]))


def lowbias32_(x: Tensor) -> Tensor:
    """Scramble int32 `x` in place with lowbias32 (Chris Wellons, hash-prospector)."""
    scratch = torch.empty_like(x)
    _xor_shifted_(x, 16, scratch).mul_(LOWBIAS_1)
    _xor_shifted_(x, 15, scratch).mul_(LOWBIAS_2)
    return _xor_shifted_(x, 16, scratch)


def uniform(bits: Tensor) -> Tensor:
    """Turn int32 bit patterns into float32 in (0, 1 - 2^-24]: (bits + 0.5) / 2^32."""
    high = bits.bitwise_right_shift(16).bitwise_and_(0xFFFF).to(torch.float32)
    low = bits.bitwise_and(0xFFFF).to(torch.float32)
    whole = high.mul_(65536.0).add_(low)  # one rounding, like a uint32 to float32 conversion
    return whole.add_(0.5).mul_(2.0**-32).clamp_(max=LARGEST_U)


def _xor_shifted_(x: Tensor, count: int, scratch: Tensor) -> Tensor:
    """x ^= x >> count with zeros shifted in; torch shifts int32 arithmetically, hence the mask."""
    torch.bitwise_right_shift(x, count, out=scratch)
    return x.bitwise_xor_(scratch.bitwise_and_((1 << (32 - count)) - 1))
