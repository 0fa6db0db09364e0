"""Digests of pages: XXH3, 64 bits. They find torn and foreign pages, not forgeries."""

import xxhash

from pdserve.kvtransfer.mover import ByteRows
from pdserve.kvtransfer.session import Pages


def page_digests(view: ByteRows, pages: Pages) -> tuple[int, ...]:
    """Return the digest of each page. Other threads run meanwhile."""
    return tuple(xxhash.xxh3_64_intdigest(view[page]) for page in pages)


def first_mismatch(view: ByteRows, pages: Pages, digests: tuple[int, ...]) -> int | None:
    """Return the position of the first page whose digest differs, or None."""
    for position, (page, digest) in enumerate(zip(pages, digests, strict=True)):
        if xxhash.xxh3_64_intdigest(view[page]) != digest:
            return position
    return None
