"""Digests of pages in the host's memory."""

import numpy as np

from pdserve.base.ids import PageId
from pdserve.kvtransfer.region import Region

PAGES = tuple(map(PageId, (3, 0, 7)))


def some_pages() -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    return np.random.default_rng(1).integers(0, 256, (8, 4096), np.uint8)


def test_words_that_change_places_change_the_digest() -> None:
    view = some_pages()
    region = Region.of(view)
    digests = region.digests(PAGES)
    view[0, :16] = np.roll(view[0, :16], 8)
    assert region.first_mismatch(PAGES, digests) == 1


def test_one_flipped_bit_is_found() -> None:
    view = some_pages()
    region = Region.of(view)
    digests = region.digests(PAGES)
    view[7, 4095] ^= 0x80
    assert region.first_mismatch(PAGES, digests) == 2
