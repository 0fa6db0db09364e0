"""A CPU and a GPU give a page the same digest, if both take splitmix64."""

import numpy as np
import reference_kernels as reference
import torch

from pdserve.ids import PageId
from pdserve.kvtransfer.region import Region

PAGES = tuple(map(PageId, (3, 0, 7)))


def some_pages() -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    return np.random.default_rng(1).integers(0, 256, (8, 4096), np.uint8)


def test_splitmix64_on_the_host_is_what_the_kernels_reference_says() -> None:
    view = some_pages()
    wanted = reference.page_digests(torch.from_numpy(view[list(PAGES)])).tolist()
    assert Region.of(view, "splitmix64").digests(PAGES) == tuple(digest % 2**64 for digest in wanted)


def test_words_that_change_places_change_the_digest() -> None:
    view = some_pages()
    region = Region.of(view, "splitmix64")
    digests = region.digests(PAGES)
    view[0, :16] = np.roll(view[0, :16], 8)
    assert region.first_mismatch(PAGES, digests) == 1


def test_both_kinds_find_one_flipped_bit() -> None:
    view = some_pages()
    for kind in ("xxh3", "splitmix64"):
        region = Region.of(view, kind)
        digests = region.digests(PAGES)
        view[7, 4095] ^= 0x80
        assert region.first_mismatch(PAGES, digests) == 2
