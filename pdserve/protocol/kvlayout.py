"""How a worker's KV pages are laid out, how two layouts differ, and on which tier pages lie.

A page is one contiguous run `[layer][k|v][kv_head][slot][head_dim]` of the layers of one group. Latent attention keeps
one row for a token, of which keys and values are made: there, pages are `[layer][slot][head_dim]`. A page of states
holds a run of float32 values for each layer, whatever the number of tokens. Ranks with memory of their own keep their
part of a page in another order: see `kvtransfer.routes`.

In a byte a value, each row `[head_dim]` has its scale behind it (`kernels/kv_rows.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from functools import lru_cache
from typing import Literal, get_args

from pdserve.base.errors import ConfigError
from pdserve.base.values import value
from pdserve.protocol.paging import PageShape, Paging

MOST_UNUSED = 0.25  # of a page: groups whose pages fill less of it need pools of their own

# The hash of a page's bytes, 64 bits: see `kvtransfer.region`. It also says in which order they lie: see `RUNS`.
PageDigest = Literal["xxh3", "splitmix64", "xxh3_runs", "splitmix64_runs"]
PAGE_DIGESTS: tuple[str, ...] = get_args(PageDigest)
# Of pages with one KV head behind the other, which ranks hold in parts; by the hash of pages that have layers first.
RUNS: Mapping[PageDigest, PageDigest] = {"xxh3": "xxh3_runs", "splitmix64": "splitmix64_runs"}
KvCode = Literal["fp8_e4m3", "int8"]  # forms of K and V in a byte a value
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8_e4m3": 1, "int8": 1}
SCALED: dict[str, int] = {"fp8_e4m3": 4, "int8": 4}  # bytes of a row's scale


def coded_as(dtype: str) -> KvCode | None:
    """Return the form of rows in a byte a value; None: this type has none."""
    return next((code for code in get_args(KvCode) if code == dtype), None)


class Tier(Enum):
    """Where a worker keeps KV of prefixes."""

    DEVICE = auto()  # where it computes: such pages are of use at once
    HOST = auto()
    DISK = auto()


@value
class KvGroup:
    """Layers whose KV lies in the same pages."""

    name: str  # "full", "window", "state"; for people
    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int  # token slots in a page
    window: int | None = None  # tokens that a query sees, its own included; None: all
    kv_parts: int = 2  # K and V; 1: one latent row for both
    state_elements: int = 0  # of a page that holds the state of a sequence; 0: it has a row for each token

    def page_bytes(self, dtype: str) -> int:
        """Return the bytes that a page of these layers fills."""
        if self.state_elements:
            return self.state_elements * DTYPE_BYTES[dtype]
        rows = self.num_layers * self.kv_parts * self.num_kv_heads * self.page_size
        return rows * row_bytes(dtype, self.head_dim)


def row_bytes(dtype: str, head_dim: int) -> int:
    """Return the bytes of K, or of V, of one token and head in a layer."""
    return head_dim * DTYPE_BYTES[dtype] + SCALED.get(dtype, 0)


@lru_cache(maxsize=64)
def _paging(page_size: int, others: tuple[KvGroup, ...]) -> Paging:
    shapes = (PageShape(of.page_size, of.window, of.state_elements > 0) for of in others)
    return Paging((PageShape(page_size), *shapes))


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Shape and meaning of a page. Two equal layouts hold interchangeable bytes; where `dtype` alone differs, senders
    convert pages (`kvtransfer/conversion.py`).

    The first group of layers, whose pages are the largest and have no window, is described by the fields themselves;
    where all layers are alike there is no other.
    """

    weights_hash: str  # fingerprint of the weights and config that fill the pages, and the type of computing
    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int  # token slots in a page
    dtype: str  # a key of DTYPE_BYTES
    page_digest: PageDigest = "xxh3"
    others: tuple[KvGroup, ...] = ()  # groups of layers after the first
    kv_parts: int = 2  # K and V; 1: one latent row for both

    @property
    def paging(self) -> Paging:
        """Return which pages hold which tokens. ConfigError for sizes of pages that do not go together."""
        return _paging(self.page_size, self.others)

    @property
    def page_bytes(self) -> int:
        """Return the bytes of a page, which are the same in every group: whole runs of the first group.

        Where one KV head is behind the other, each has as many of them.
        """
        own = self.num_layers * self.kv_parts * self.num_kv_heads * self.run_bytes
        largest = max([own, *[group.page_bytes(self.dtype) for group in self.others]])
        unit = self.run_bytes * (self.num_kv_heads if self.is_by_head else 1)
        return -(-largest // unit) * unit

    @property
    def is_by_head(self) -> bool:
        """Say whether pages have one KV head behind the other, so that ranks may hold some of them."""
        return self.page_digest in RUNS.values()

    @property
    def run_bytes(self) -> int:
        """Return the bytes of K, or of V, of a head and layer in a page of the first group."""
        return self.page_size * row_bytes(self.dtype, self.head_dim)

    @property
    def token_bytes(self) -> int:
        """Return the bytes of a token's KV, as if there were no windows; what states take is not of a token."""
        page_bytes = self.page_bytes
        return sum([page_bytes // size for size in self.page_sizes])

    def memory_bytes(self, num_pages: int, max_num_seqs: int) -> int:
        """Return the bytes of so many pages, and of the states that a step keeps beside them until it has ended."""
        states = sum([group.state_elements for group in self.others]) * DTYPE_BYTES[self.dtype]
        return num_pages * self.page_bytes + states * min(max_num_seqs, num_pages // len(self.paging.shapes))

    def sent_bytes(self, num_tokens: float) -> float:
        """Return the bytes that a hand-off sends of the last tokens of a prompt, but for begun pages."""
        return self.paging.sent_pages(num_tokens) * self.page_bytes

    def check(self) -> None:
        """Raise ConfigError unless the pages of every group fill almost as many bytes as the largest."""
        largest = self.page_bytes
        own = KvGroup("full", self.num_layers, self.num_kv_heads, self.head_dim, self.page_size, kv_parts=self.kv_parts)
        for group in (own, *self.others):
            filling = group.page_bytes(self.dtype)
            if not group.state_elements and filling < largest * (1 - MOST_UNUSED):
                filled = f"{filling} of {largest} bytes of a page"
                raise ConfigError(f"page_size: {group.page_size} tokens of the {group.name} layers fill {filled}")

    @property
    def page_sizes(self) -> tuple[int, ...]:
        """Return how many tokens pages of each group hold, but of states."""
        return (self.page_size, *[group.page_size for group in self.others if not group.state_elements])

    @property
    def is_convertible(self) -> bool:
        """Whether senders convert such pages for a receiver of another dtype: rows of K and V, in host memory."""
        shapes = {(group.kv_parts, group.head_dim, group.state_elements) for group in self.others}
        return self.kv_parts == 2 and shapes <= {(2, self.head_dim, 0)} and self.page_digest == "xxh3"

    def difference(self, other: "KvLayout", *, converts: bool = True) -> str | None:
        """Return the first field in which two layouts differ, or None: pages can be handed over between them.

        converts: a sender may convert pages for a receiver that differs in `dtype` alone.
        """
        compared = [name for name in self.__slots__ if name != "dtype"]
        if not (converts and self.is_convertible):
            compared.insert(0, "dtype")  # before weights_hash, which names the type of computing
        for name in compared:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"{name}: {mine} != {theirs}"
        return None
