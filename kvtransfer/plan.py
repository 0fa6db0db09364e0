"""Which bytes go where between workers whose page sizes or tensor-parallel ranks differ. Pure.

Invariant: once the copies are made, every token asked for lies in the target's pages as the target's layout has it, for
each KV head that both ranks hold. Nothing else has changed, except slots past the last token.

Movers write only whole pages: `refusal` is the one seam between what can be planned and what is served.
"""

from dataclasses import dataclass

import numpy as np

from pdserve.errors import InvariantError
from pdserve.kvlayout import DTYPE_BYTES, KvLayout
from pdserve.kvtransfer.session import Pages

Offsets = np.ndarray[tuple[int], np.dtype[np.int64]]
Grid = np.ndarray[tuple[int, int, int], np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Part:
    """Pages of one worker that hold a sequence's tokens, in order, from a token that begins a page."""

    layout: KvLayout
    pages: Pages
    first_token: int = 0

    @property
    def tokens(self) -> range:
        return range(self.first_token, self.first_token + len(self.pages) * self.layout.page_size)


@dataclass(frozen=True, slots=True)
class Heads:
    """KV heads that two ranks share: `count` of them, from `source` on in the one and from `target` on in the other."""

    source: int
    target: int
    count: int


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Copies: run i is `length[i]` bytes from `source[i]` to `target[i]`, offsets from where the pages begin."""

    source: Offsets
    target: Offsets
    length: Offsets

    def __len__(self) -> int:
        return len(self.length)


def refusal(source: KvLayout, target: KvLayout) -> str | None:
    """Return why the movers do not serve a pair, or None. Only equal layouts are served."""
    if source == target:
        return None
    difference = source.difference(target)
    if unplannable(source, target) is not None:
        return difference
    return f"{difference}, and movers write whole pages alone"


def unplannable(source: KvLayout, target: KvLayout) -> str | None:
    """Return what makes the KV of one worker useless to another however it is copied, or None."""
    for name in ("weights_hash", "num_layers", "head_dim", "dtype"):
        here, there = getattr(source, name), getattr(target, name)
        if here != there:
            return f"{name}: {here} != {there}"
    here, there = source.num_kv_heads * source.tp_size, target.num_kv_heads * target.tp_size
    return None if here == there else f"num_kv_heads of all ranks: {here} != {there}"


def plan(source: Part, target: Part, tokens: range) -> Runs | str:
    """Return how tokens get from pages to pages, or why they cannot.

    Copies that are neighbours on both sides are one run; runs are in the order of the source's tokens.
    """
    reason = unplannable(source.layout, target.layout)
    if reason is not None:
        return reason
    _require_held(source, tokens)
    _require_held(target, tokens)
    heads = _shared_heads(source.layout, target.layout)
    if heads is None or not tokens:
        nothing = np.empty(0, np.int64)
        return Runs(nothing, nothing, nothing)
    starts, stops = _pieces(source, target, tokens)
    slot_bytes = source.layout.head_dim * DTYPE_BYTES[source.layout.dtype]
    if source.layout.page_size == target.layout.page_size:  # with the unused slots of a page, its heads are one run
        stops = (starts // source.layout.page_size + 1) * source.layout.page_size
    length = np.broadcast_to(
        ((stops - starts) * slot_bytes)[:, None, None], (len(starts), 2 * source.layout.num_layers, heads.count)
    )
    return _merged(
        _offsets(source, starts, heads.source, heads.count).ravel(),
        _offsets(target, starts, heads.target, heads.count).ravel(),
        length.ravel(),
    )


def _shared_heads(source: KvLayout, target: KvLayout) -> Heads | None:
    """Return which KV heads two ranks have in common, or None."""
    begins = source.tp_rank * source.num_kv_heads, target.tp_rank * target.num_kv_heads
    first = max(begins)
    stop = min(begins[0] + source.num_kv_heads, begins[1] + target.num_kv_heads)
    return Heads(first - begins[0], first - begins[1], stop - first) if first < stop else None


def _require_held(part: Part, tokens: range) -> None:
    held = part.tokens
    if part.first_token % part.layout.page_size:
        raise InvariantError(f"token {part.first_token} does not begin a page of {part.layout.page_size}")
    if tokens.step != 1 or tokens.start < held.start or tokens.stop > held.stop:
        raise InvariantError(f"{tokens} is not within the pages of {held}")


def _pieces(source: Part, target: Part, tokens: range) -> tuple[Offsets, Offsets]:
    """Cut the tokens where a page of either side begins."""
    cuts = {tokens.start, tokens.stop}
    for part in (source, target):
        size = part.layout.page_size
        cuts.update(range(-(-tokens.start // size) * size, tokens.stop, size))
    ordered = np.array(sorted(cuts), np.int64)
    return ordered[:-1], ordered[1:]


def _offsets(part: Part, tokens: Offsets, first_head: int, count: int) -> Grid:
    """Return where each of these tokens begins: [tokens, layers * (k|v), heads]."""
    layout = part.layout
    slot_bytes = layout.head_dim * DTYPE_BYTES[layout.dtype]
    head_bytes = layout.page_size * slot_bytes
    index, slot = np.divmod(tokens - part.first_token, layout.page_size)
    pages = np.array(part.pages, np.int64)[index] * layout.page_bytes + slot * slot_bytes
    planes = np.arange(2 * layout.num_layers) * (layout.num_kv_heads * head_bytes)
    heads = np.arange(first_head, first_head + count) * head_bytes
    grid: Grid = pages[:, None, None] + planes[:, None] + heads
    return grid


def _merged(source: Offsets, target: Offsets, length: Offsets) -> Runs:
    """Join each run with the one before where it goes on from there on both sides."""
    goes_on = (source[1:] == source[:-1] + length[:-1]) & (target[1:] == target[:-1] + length[:-1])
    first = np.flatnonzero(np.concatenate(([True], ~goes_on)))
    return Runs(source[first], target[first], np.add.reduceat(length, first))
