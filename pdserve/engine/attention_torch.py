"""Attention over pages in plain torch, for CPUs.

Chunks of one query length with similar contexts make a group, and a group is one call of torch's fused attention. It
takes the K and V just computed if the pages hold no earlier ones, else K and V gathered from the pages. Gathering
copies whole runs of a head's slots, which the pool's layout keeps together.

Slots past a context are read as zero, whatever the page holds there. A mask alone would not do: a weight of 0 times
another sequence's overflow is NaN.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pdserve.engine.batch import Batch, Ints
from pdserve.model.config import ModelConfig
from pdserve.model.ops import QkNorm, RmsNorm, TorchOps
from pdserve.model.rope import Angles, Rope, distinct, rotate_

ALIKE_BELOW = 128  # contexts up to this many tokens share a group whatever their ratio
ALIKE_RATIO = 2  # longer ones may be this many times as long as the group's shortest


@dataclass(frozen=True, slots=True)
class _Gather:
    """How a group's contexts are copied out of the pages, and to where; each layer overwrites the one before."""

    runs: Tensor  # [2 * chunks * kv heads * pages] into layer 0 of the pool's runs
    copy: Tensor  # [len(runs), page_size * head_dim]
    unwritten: tuple[npt.NDArray[np.uint8], ...]  # views of the copy's slots that hold none of their chunk's tokens


@dataclass(frozen=True, slots=True)
class _Group:
    """Chunks [first, last) of a batch, all of `query_len` tokens."""

    tokens: slice
    num_chunks: int
    query_len: int
    kv_len: int  # the longest context
    gather: _Gather | None  # None: nothing in pages yet
    mask: Tensor | None  # [chunks, 1, query_len, kv_len], added to the scores


@dataclass(frozen=True, slots=True)
class _Step:
    angles: Seq[Angles]  # of each distinct rope
    targets: Tensor  # [num_tokens, 2 * kv heads] into layer 0 of the pool's slots


class TorchAttention:
    """Plans a step once, then serves each layer of it."""

    def __init__(self, config: ModelConfig, kv: Tensor, ropes: Seq[Rope]) -> None:
        """Attend within `kv`: [num_pages, num_layers, 2, num_kv_heads, page_size, head_dim]. ropes: of each layer."""
        self._config = config
        self._ops = TorchOps()
        self._ropes, self._rope_of_layer = distinct(ropes)
        self._grouped = GroupedAttention(config, kv)
        self._page_size = kv.shape[4]
        self._dtype = kv.dtype
        self._slots = kv.view(-1, config.head_dim)
        self._step: _Step | None = None

    def plan(self, batch: Batch) -> None:
        """Prepare what all layers share of the step."""
        runs = self._grouped.run_ids(batch.pages)
        positions = torch.from_numpy(batch.positions)
        self._step = _Step(
            angles=[rope.angles(positions, self._dtype) for rope in self._ropes],
            targets=torch.from_numpy(runs * self._page_size + batch.slots[:, None]),
        )
        self._grouped.plan(batch, 0)

    def run(self, layer: int, qkv: Tensor, qk_norm: QkNorm | None) -> Tensor:
        """Attend in one layer; see `pdserve.model.ops.Attention`."""
        step = self._step
        if step is None:
            raise RuntimeError("run before plan")
        num_heads, num_kv_heads = self._config.num_heads, self._config.num_kv_heads
        if qk_norm is not None and not qk_norm.after_rope:
            self._norm_(qkv, qk_norm)
        rotate_(qkv[:, :-num_kv_heads], step.angles[self._rope_of_layer[layer]])
        if qk_norm is not None and qk_norm.after_rope:
            self._norm_(qkv, qk_norm)
        slots_before = layer * 2 * num_kv_heads * self._page_size
        self._slots[slots_before:].index_put_((step.targets,), qkv[:, num_heads:])
        attended = self._grouped.run(layer, qkv)
        return attended[0] if len(attended) == 1 else torch.cat(attended)

    def _norm_(self, qkv: Tensor, qk_norm: QkNorm) -> None:
        num_heads, num_kv_heads = self._config.num_heads, self._config.num_kv_heads
        self._ops.norm_(qkv[:, :num_heads], RmsNorm(qk_norm.q, qk_norm.eps))
        self._ops.norm_(qkv[:, num_heads:-num_kv_heads], RmsNorm(qk_norm.k, qk_norm.eps))


class GroupedAttention:
    """Attends in groups, after q and k have been rotated and K and V written into the pages."""

    def __init__(self, config: ModelConfig, kv: Tensor) -> None:
        """Attend within `kv`: [num_pages, num_layers, 2, num_kv_heads, page_size, head_dim]."""
        self._config = config
        self._page_size = kv.shape[4]
        self._dtype = kv.dtype
        self._runs = kv.view(-1, self._page_size * config.head_dim)
        self._slot_bytes = config.head_dim * kv.dtype.itemsize
        self._runs_per_layer = 2 * config.num_kv_heads
        self._runs_per_page = config.num_layers * self._runs_per_layer
        self._groups: tuple[_Group, ...] = ()

    def plan(self, batch: Batch, first: int) -> None:
        """Prepare what all layers share of the batch's chunks from `first` on."""
        self._groups = tuple(self._group(batch, begin, end) for begin, end in _alike(batch, first))

    def run(self, layer: int, qkv: Tensor) -> list[Tensor]:
        """Attend with the planned chunks' tokens in one layer: [tokens, num_heads * head_dim] of each group."""
        return [self._attend(layer, qkv[group.tokens], group) for group in self._groups]

    def run_ids(self, pages: Ints) -> Ints:
        """Return the runs of layer 0's K heads, then V heads, of each page: [len(pages), 2 * kv heads]."""
        return pages[:, None] * self._runs_per_page + np.arange(self._runs_per_layer)

    def _attend(self, layer: int, qkv: Tensor, group: _Group) -> Tensor:
        num_heads, num_kv_heads, scale = self._config.num_heads, self._config.num_kv_heads, self._config.attention_scale
        heads = qkv.view(group.num_chunks, group.query_len, -1, self._config.head_dim).transpose(1, 2)
        if group.gather is None:
            k, v = heads[:, num_heads:-num_kv_heads], heads[:, -num_kv_heads:]
        else:
            gathered = self._gathered(layer, group.gather)
            k, v = gathered.view(2, group.num_chunks, num_kv_heads, -1, self._config.head_dim)[:, :, :, : group.kv_len]
        q = heads[:, :num_heads]
        if group.query_len == 1:
            # All heads that share K and V as one block of queries: each K is then read once, not once for each head.
            q = q.reshape(group.num_chunks, num_kv_heads, -1, self._config.head_dim)
            return scaled_dot_product_attention(q, k, v, attn_mask=group.mask, scale=scale).reshape(len(qkv), -1)
        causal, grouped = group.gather is None, num_heads != num_kv_heads
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=group.mask, is_causal=causal, enable_gqa=grouped, scale=scale
        )
        return out.transpose(1, 2).reshape(len(qkv), -1)

    def _gathered(self, layer: int, gather: _Gather) -> Tensor:
        torch.index_select(self._runs[layer * self._runs_per_layer :], 0, gather.runs, out=gather.copy)
        for slots in gather.unwritten:
            slots.fill(0)  # of bytes, and by numpy: torch fills chosen rows at a sixth of the speed
        return gather.copy

    def _group(self, batch: Batch, first: int, last: int) -> _Group:
        query_len = int(batch.query_lens[first])
        kv_lens = batch.kv_lens[first:last]
        longest = int(kv_lens[-1])
        window = self._config.sliding_window
        fresh = longest == query_len and (window is None or longest <= window)
        gather, mask = None, None
        if not fresh:
            runs = self._gathered_runs(batch.page_table[first:last, : -(-longest // self._page_size)])
            copy = torch.empty((len(runs), self._runs.shape[1]), dtype=self._dtype)
            gather = _Gather(runs, copy, self._unwritten(copy, kv_lens))
            mask = _mask(kv_lens, query_len, window, self._dtype)
        tokens = slice(int(batch.query_starts[first]), int(batch.query_starts[last]))
        return _Group(tokens, last - first, query_len, longest, gather, mask)

    def _gathered_runs(self, page_table: Ints) -> Tensor:
        """Return the runs of [num_chunks, pages] in the order k|v, chunk, kv head, page."""
        by_page = self.run_ids(page_table.reshape(-1)).reshape(*page_table.shape, 2, self._config.num_kv_heads)
        return torch.from_numpy(by_page.transpose(2, 0, 3, 1).reshape(-1))

    def _unwritten(self, copy: Tensor, kv_lens: Ints) -> tuple[npt.NDArray[np.uint8], ...]:
        """Return views of a copy's slots that are below the longest context and hold none of their chunk's tokens."""
        longest, num_kv_heads = int(kv_lens.max()), self._config.num_kv_heads
        slots = copy.view(torch.uint8).view(2, len(kv_lens), num_kv_heads, -1, self._slot_bytes).numpy()
        found = []
        for chunk, kv_len in enumerate(kv_lens.tolist()):
            # Past its last page comes its first one again (see Batch), which is full unless it is the last.
            end = -(-kv_len // self._page_size) * self._page_size if kv_len >= self._page_size else longest
            if kv_len < min(end, longest):
                found.append(slots[:, chunk, :, kv_len : min(end, longest)])
        return tuple(found)


def _alike(batch: Batch, first: int) -> Iterator[tuple[int, int]]:
    """Yield [first, last) of each group; a batch orders chunks by query length, then by context."""
    for index in range(first + 1, len(batch.query_lens)):
        limit = max(ALIKE_BELOW, ALIKE_RATIO * batch.kv_lens[first])
        if batch.query_lens[index] != batch.query_lens[first] or batch.kv_lens[index] > limit:
            yield first, index
            first = index
    if first < len(batch.query_lens):
        yield first, len(batch.query_lens)


def _mask(kv_lens: Ints, query_len: int, window: int | None, dtype: torch.dtype) -> Tensor | None:
    """Return 0 where a query sees a key and -inf elsewhere; None where every query sees every key."""
    longest = int(kv_lens.max())
    within_window = window is None or longest <= window
    if query_len == 1 and within_window and bool((kv_lens == longest).all()):
        return None
    keys = np.arange(longest)
    positions = (kv_lens[:, None] - query_len + np.arange(query_len))[:, :, None]
    hidden = keys > positions
    if window is not None:
        hidden |= keys <= positions - window
    mask = torch.zeros(hidden.shape, dtype=dtype)
    return mask.masked_fill_(torch.from_numpy(hidden), float("-inf"))[:, None]
