"""Pages that are divided between ranks with memory of their own: by heads, by layers, or not at all."""

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from pdserve.kvtransfer.region import ByteRows, Region
from pdserve.kvtransfer.routes import Share

LAYERS, HEADS, RUN_BYTES = 4, 6, 64
WHOLE = Share((0, LAYERS), (0, HEADS))


def by_heads(num_ranks: int) -> tuple[Share, ...]:
    """Divide heads as ranks do, also unevenly."""
    ends = [rank * HEADS // num_ranks for rank in range(num_ranks + 1)]
    return tuple([Share(WHOLE.layers, span) for span in pairwise(ends)])


def by_layers(num_stages: int) -> tuple[Share, ...]:
    """Divide layers as stages do; the first rank is the last stage."""
    ends = [stage * LAYERS // num_stages for stage in range(num_stages + 1)]
    stages = [Share(span, WHOLE.heads) for span in pairwise(ends)]
    return (stages[-1], *stages[:-1])


def copies(num_copies: int, of: tuple[Share, ...] = (WHOLE,)) -> tuple[Share, ...]:
    """Give each part to several ranks, as where there are more ranks than heads."""
    return tuple([replace(share, copy=copy, num_copies=num_copies) for share in of for copy in range(num_copies)])


BOTH = tuple([Share(layers, heads) for layers in ((0, 1), (1, 4)) for heads in ((0, 4), (4, 6))])
WAYS_TO_DIVIDE = {
    "one rank": by_heads(1),
    "two ranks": by_heads(2),
    "three ranks": by_heads(3),
    "four ranks": by_heads(4),
    "two stages": by_layers(2),
    "three stages": by_layers(3),
    "stages of ranks": BOTH,
    "two copies": copies(2),
    "three copies": copies(3),  # of four layers
    "copies of heads": copies(2, by_heads(3)),
}


@dataclass(frozen=True)
class Divided:
    """The same pages in the memory of each rank."""

    shares: tuple[Share, ...]
    parts: tuple[ByteRows, ...]  # of each rank: [num_pages, its bytes of a page]

    @classmethod
    def of(cls, pages: ByteRows, shares: tuple[Share, ...]) -> "Divided":
        """Divide whole pages, element by element."""
        whole = pages.reshape(len(pages), HEADS, LAYERS, RUN_BYTES)
        cut = [whole[:, slice(*share.heads), slice(*share.layers)].reshape(len(pages), -1) for share in shares]
        return cls(shares, tuple([np.ascontiguousarray(part) for part in cut]))

    @property
    def regions(self) -> tuple[Region, ...]:
        return tuple([Region.of_rank(part, share, WHOLE) for share, part in zip(self.shares, self.parts, strict=True)])

    def whole(self) -> ByteRows:
        """Put the parts together again; all copies have to be alike."""
        pages = [np.zeros((len(self.parts[0]), HEADS, LAYERS, RUN_BYTES), np.uint8) for _ in range(self.num_copies)]
        for share, part in zip(self.shares, self.parts, strict=True):
            shape = (len(part), share.num_heads, share.num_layers, RUN_BYTES)
            pages[share.copy][:, slice(*share.heads), slice(*share.layers)] = part.reshape(shape)
        assert all(np.array_equal(copy, pages[0]) for copy in pages)
        return pages[0].reshape(len(pages[0]), -1)

    @property
    def num_copies(self) -> int:
        return self.shares[0].num_copies


def random_pages(num_pages: int, seed: int = 1) -> ByteRows:
    size = (num_pages, WHOLE.num_runs * RUN_BYTES)
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)
