"""Digests of pages, 64 bits each. They find torn and foreign pages, not forgeries.

Both ends of a hand-off take the same one: it is part of what their layouts must agree on. `xxh3` is the fastest on a
CPU; `splitmix64` is what a GPU computes in place (`kernels.pageio.page_digests`), here for a CPU that exchanges pages
with one.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import xxhash

from pdserve.kvlayout import PageDigest
from pdserve.kvtransfer.session import Pages

ByteRows = np.ndarray[tuple[int, int], np.dtype[np.uint8]]
Digests = Callable[[Pages], tuple[int, ...]]  # of pages of one region, in their order; for any thread

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def host_digests(kind: PageDigest, view: ByteRows) -> Digests:
    """Return what computes digests of pages in the host's memory, row i of `view` being page i."""
    return partial(_xxh3 if kind == "xxh3" else _splitmix64, view)


def _xxh3(view: ByteRows, pages: Pages) -> tuple[int, ...]:
    """XXH3, seed 0. Other threads run meanwhile."""
    return tuple(xxhash.xxh3_64_intdigest(view[page]) for page in pages)


def _splitmix64(view: ByteRows, pages: Pages) -> tuple[int, ...]:
    """Add up splitmix64's finalizer (Steele, Lea, Flood, OOPSLA 2014) of each word + golden ratio * (its index + 1)."""
    words = view.view(np.uint64)
    offsets = _GOLDEN * np.arange(1, words.shape[1] + 1, dtype=np.uint64)
    return tuple(int(_mixed(words[page] + offsets).sum()) for page in pages)


def _mixed(z: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    z = (z ^ (z >> np.uint64(30))) * _MIX[0]
    z = (z ^ (z >> np.uint64(27))) * _MIX[1]
    return z ^ (z >> np.uint64(31))
