"""Counter-based random numbers: a token's noise depends on (seed, token index, token id) and on nothing else.

So a sequence that is preempted, handed off or resumed elsewhere gets the same tokens. This is numpy, because torch
hands each small step to its threads, which costs more than the step. The sampling kernels compute the same bits.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

GOLDEN = 0x9E3779B97F4A7C15
SERIES_BELOW = np.float32(2.0**-10)  # under this, 1 - u loses too many bits for log
LARGEST_U = np.float32(1.0 - 2.0**-24)

Words = npt.NDArray[np.uint32]

_LOW64 = (1 << 64) - 1


def keys(seeds: Sequence[int], indices: Sequence[int]) -> Words:
    """Mix each sequence's 64-bit seed with the index of the token it samples next.

    seeds: [n], of which the low 64 bits count. indices: [n] non-negative. Returns uint32 [n, 2], low word first.
    The mixer is splitmix64's finalizer (Steele, Lea, Flood 2014).
    """
    z = np.array([seed & _LOW64 for seed in seeds], dtype=np.uint64)
    counter = np.asarray(indices).astype(np.uint64)
    if z.shape != counter.shape:
        raise ValueError(f"there must be as many indices as seeds, got {z.shape} and {counter.shape}")
    z = z + np.uint64(GOLDEN) * (counter + np.uint64(1))
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return z.astype("<u8").view(np.uint32).reshape(-1, 2)


def gumbel(key: Words, ids: Words) -> npt.NDArray[np.float32]:
    """Return one standard Gumbel variate for each token id: float32 [k].

    key: uint32 [2], a row of `keys`; ids: uint32 [k].
    The argmax of logit/temperature + gumbel is a sample from softmax(logit/temperature).
    """
    u = uniform(random_bits(key, ids))
    series = ((u * np.float32(1 / 3) + np.float32(0.5)) * u + np.float32(1)) * u
    exponential = np.where(u < SERIES_BELOW, series, -np.log(np.float32(1) - u))
    return -np.log(exponential)


def random_bits(key: Words, ids: Words) -> Words:
    """Hash (key, token id) to 32 uniform bits: uint32 [k]."""
    if key.shape != (2,) or key.dtype != np.uint32 or ids.ndim != 1 or ids.dtype != np.uint32:
        raise ValueError(
            f"key and ids must be uint32 [2] and [k], got {key.dtype} {key.shape}, {ids.dtype} {ids.shape}"
        )
    return _lowbias32(_lowbias32(ids ^ key[0]) + key[1])


def uniform(bits: Words) -> npt.NDArray[np.float32]:
    """Turn bits into float32 in (0, 1 - 2^-24]: (bits + 0.5) / 2^32."""
    u: npt.NDArray[np.float32] = (bits.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    return np.minimum(u, LARGEST_U, out=u)


def _lowbias32(x: Words) -> Words:
    """Scramble with lowbias32 (Chris Wellons, hash-prospector)."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))
