"""How a worker's KV pages are laid out, and how two layouts differ.

A page is one contiguous run `[layer][k|v][kv_head][slot][head_dim]`.
"""

from dataclasses import dataclass
from typing import Literal, get_args

PageDigest = Literal["xxh3", "splitmix64"]  # the hash of a page's bytes, 64 bits: see `kvtransfer.region`
PAGE_DIGESTS: tuple[str, ...] = get_args(PageDigest)
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Shape and meaning of a page. Two equal layouts hold interchangeable bytes."""

    weights_hash: str  # fingerprint of the weights and config that fill the pages
    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int  # token slots in a page
    dtype: str  # a key of DTYPE_BYTES
    tp_size: int = 1
    tp_rank: int = 0
    page_digest: PageDigest = "xxh3"

    @property
    def page_bytes(self) -> int:
        elements = self.num_layers * 2 * self.num_kv_heads * self.page_size * self.head_dim
        return elements * DTYPE_BYTES[self.dtype]

    @property
    def token_bytes(self) -> int:
        return self.page_bytes // self.page_size

    def num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def difference(self, other: "KvLayout") -> str | None:
        """Return the first field in which two layouts differ, or None: pages can be copied between them."""
        for name in self.__slots__:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"{name}: {mine} != {theirs}"
        return None
