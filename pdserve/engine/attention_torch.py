"""Attention over pages in plain torch, for CPUs.

Chunks of one query length with similar contexts make a group, and a group is one call of torch's fused attention. It
takes the K and V just computed if the pages hold no earlier ones, else K and V gathered from the pages. Gathering
copies whole runs of a head's slots, which the pool's layout keeps together. Where rows are coded, all K and V are
gathered: what a query sees of a token must not depend on whether the token is of the same chunk.

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
from pdserve.engine.layer_kinds import LayerKind, flat_rows
from pdserve.kernels.cpu.attention import QkNorm
from pdserve.model.config import ModelConfig
from pdserve.model.ops import RmsNorm, TorchOps
from pdserve.model.rope import Angles, distinct, rotate_

ALIKE_BELOW = 128  # contexts up to this many tokens share a group whatever their ratio
ALIKE_RATIO = 2  # longer ones may be this many times as long as the group's shortest


@dataclass(frozen=True, slots=True)
class _Gather:
    """How a group's contexts are copied out of the pages, and to where; each layer overwrites the one before."""

    runs: Tensor  # [kv_parts * chunks * kv heads * pages] into layer 0 of the pool's runs
    copy: Tensor  # [len(runs), page_size * width of a row]
    unwritten: tuple[npt.NDArray[np.uint8], ...]  # views of the copy's slots that hold none of their chunk's tokens


@dataclass(frozen=True, slots=True)
class _Group:
    """Chunks [first, last) of a batch, all of `query_len` tokens."""

    tokens: slice
    num_chunks: int
    query_len: int
    kv_len: int  # the longest context
    gather: _Gather | None  # None: nothing in pages yet, and no layer reads what another one writes there
    mask: Tensor | None  # [chunks, 1, query_len, kv_len], added to the scores of what is gathered
    is_fresh: bool  # whether all that its tokens see is computed with them


@dataclass(frozen=True, slots=True)
class _Step:
    angles: Seq[Angles]  # of each distinct rope
    growths: Seq[Tensor | None]  # of queries, by rope: [num_tokens, 1, 1]
    targets: Tensor  # [num_tokens, kv_parts * kv heads] into layer 0 of the pool's slots


class TorchAttention:
    """Plans a step once, then serves each layer of one kind of it."""

    def __init__(self, config: ModelConfig, kind: LayerKind) -> None:
        self._config = config = config.with_heads(kind.heads)
        self._ops = TorchOps()
        self._ropes, self._rope_of_layer = distinct(kind.ropes)
        self._grouped = GroupedAttention(config, kind)
        self._kv_parts, self._page_size = kind.kv.shape[2], kind.kv.shape[4]
        self._rows = kind.rows
        self._slots = flat_rows(kind.kv, kind.rows.width)
        self._step: _Step | None = None

    def plan(self, batch: Batch) -> None:
        """Prepare what all layers share of the step."""
        runs = self._grouped.run_ids(batch.pages)
        positions = torch.from_numpy(batch.positions)
        self._step = _Step(
            angles=[rope.angles(positions, self._rows.dtype) for rope in self._ropes],
            growths=[rope.growth(positions, self._rows.dtype) for rope in self._ropes],
            targets=torch.from_numpy(runs * self._page_size + batch.slots[:, None]),
        )
        self._grouped.plan(batch, 0)

    def run(self, layer: int, qkv: Tensor, qk_norm: QkNorm | None, sinks: Tensor | None = None) -> Tensor:
        """Attend in one layer; see `pdserve.model.attention.Attends`."""
        step = self._step
        if step is None:
            raise RuntimeError("run before plan")
        num_heads, num_kv_heads = self._config.num_heads, self._config.num_kv_heads
        if qk_norm is not None and qk_norm.v is not None:
            self._ops.norm_(qkv[:, -num_kv_heads:], RmsNorm(qk_norm.v, qk_norm.eps))
        if qk_norm is not None and not qk_norm.after_rope:
            self._norm_(qkv, qk_norm)
        rope = self._rope_of_layer[layer]
        rotate_(qkv[:, : num_heads + num_kv_heads, -self._config.rope_dim :], step.angles[rope])
        if (growth := step.growths[rope]) is not None:
            qkv[:, :num_heads] *= growth
        if qk_norm is not None and qk_norm.after_rope:
            self._norm_(qkv, qk_norm)
        if qkv.shape[1] > num_heads:
            slots_before = layer * self._grouped.runs_per_layer * self._page_size
            self._slots[slots_before:].index_put_((step.targets,), self._rows.packed(qkv[:, num_heads:]))
        attended = self._grouped.run(layer, qkv, sinks)
        return attended[0] if len(attended) == 1 else torch.cat(attended)

    def _norm_(self, qkv: Tensor, qk_norm: QkNorm) -> None:
        num_heads, num_kv_heads = self._config.num_heads, self._config.num_kv_heads
        self._ops.norm_(qkv[:, :num_heads], RmsNorm(qk_norm.q, qk_norm.eps))
        self._ops.norm_(qkv[:, num_heads : num_heads + num_kv_heads], RmsNorm(qk_norm.k, qk_norm.eps))


class GroupedAttention:
    """Attends in groups, after q and k have been rotated and K and V written into the pages."""

    def __init__(self, config: ModelConfig, kind: LayerKind) -> None:
        kv, self._scores = kind.kv, kind.scores
        self._config = config = config.with_heads(kind.heads)
        self._kv_parts, self._page_size = kv.shape[2], kv.shape[4]
        self._rows, self._is_read = kind.rows, kind.is_read
        self._scale, self._soft_cap = config.scale(kind.scores), kind.scores.soft_cap
        run_size = self._page_size * kind.rows.width
        self._runs = flat_rows(kv, run_size)
        self._slot_bytes = kind.rows.width * kv.itemsize
        self._runs_per_page, self.runs_per_layer, of_part, of_head = (stride // run_size for stride in kv.stride()[:4])
        heads = np.arange(config.num_kv_heads) * of_head
        self._runs_of_layer = (np.arange(self._kv_parts)[:, None] * of_part + heads).ravel()
        self._groups: tuple[_Group, ...] = ()

    def plan(self, batch: Batch, first: int) -> None:
        """Prepare what all layers share of the batch's chunks from `first` on."""
        self._groups = tuple(self._group(batch, begin, end) for begin, end in _alike(batch, first))

    def run(self, layer: int, qkv: Tensor, sinks: Tensor | None) -> list[Tensor]:
        """Attend with the planned chunks' tokens in one layer: [tokens, num_heads * head_dim] of each group."""
        return [self._attend(layer, qkv[group.tokens], group, sinks) for group in self._groups]

    def run_ids(self, pages: Ints) -> Ints:
        """Return the runs of layer 0's K heads, then V heads, of each page: [len(pages), 2 * kv heads]."""
        return pages[:, None] * self._runs_per_page + self._runs_of_layer

    def _attend(self, layer: int, qkv: Tensor, group: _Group, sinks: Tensor | None) -> Tensor:
        num_heads, num_kv_heads = self._config.num_heads, self._config.num_kv_heads
        heads = qkv.view(group.num_chunks, group.query_len, -1, self._config.head_dim).transpose(1, 2)
        is_direct = group.is_fresh and heads.shape[1] > num_heads
        if group.gather is None or is_direct:
            k, v = heads[:, num_heads : num_heads + num_kv_heads], heads[:, -num_kv_heads:]
        else:
            gathered = self._gathered(layer, group.gather)
            slots = gathered.view(self._kv_parts, group.num_chunks, num_kv_heads, -1, self._rows.width)
            parts = self._rows.expanded(slots)
            k, v = parts[0, :, :, : group.kv_len], parts[-1, :, :, : group.kv_len]
        q = heads[:, :num_heads]
        if group.query_len == 1:
            # All heads that share K and V as one block of queries: each K is then read once, not once for each head.
            q = q.reshape(group.num_chunks, num_kv_heads, -1, self._config.head_dim)
            return self._weighted((q, k, v), group, sinks).reshape(len(qkv), -1)
        out = self._weighted((q, k, v), group, sinks, is_causal=is_direct)
        return out.transpose(1, 2).reshape(len(qkv), -1)

    def _weighted(
        self, heads: tuple[Tensor, Tensor, Tensor], group: _Group, sinks: Tensor | None, *, is_causal: bool = False
    ) -> Tensor:
        """Return the values, summed by their weights; heads of q share those of k where it has fewer."""
        q, k, v = heads
        is_shared = q.shape[1] != k.shape[1]
        if self._soft_cap is None and sinks is None:
            return scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=None if is_causal else group.mask,
                is_causal=is_causal,
                enable_gqa=is_shared,
                scale=self._scale,
            )
        mask = torch.full((q.shape[2], k.shape[2]), float("-inf")).triu_(1) if is_causal else group.mask
        return _scored(heads, _Scoring(self._scale, self._soft_cap, sinks), mask)

    def _gathered(self, layer: int, gather: _Gather) -> Tensor:
        torch.index_select(self._runs[layer * self.runs_per_layer :], 0, gather.runs, out=gather.copy)
        for slots in gather.unwritten:
            slots.fill(0)  # of bytes, and by numpy: torch fills chosen rows at a sixth of the speed
        return gather.copy

    def _group(self, batch: Batch, first: int, last: int) -> _Group:
        query_len = int(batch.query_lens[first])
        longest, window = int(batch.kv_lens[first:last].max()), self._scores.window
        fresh = longest == query_len and (window is None or longest <= window) and self._rows.code is None
        gather, mask = None, None
        if not fresh or self._is_read:
            positions = (batch.kv_lens[first:last] - query_len)[:, None] + np.arange(query_len)
            begins = self._begins(positions)
            left = begins[:, 0] // self._page_size * self._page_size  # tokens on pages that no query sees
            kv_lens = batch.kv_lens[first:last] - left
            longest = int(kv_lens.max())
            runs = self._gathered_runs(self._seen(batch.page_table[first:last], left, kv_lens))
            copy = torch.empty((len(runs), self._runs.shape[1]), dtype=self._runs.dtype)
            gather = _Gather(runs, copy, self._unwritten(copy, kv_lens))
            mask = _mask(positions - left[:, None], begins - left[:, None], kv_lens, self._rows.dtype)
        tokens = slice(int(batch.query_starts[first]), int(batch.query_starts[last]))
        return _Group(tokens, last - first, query_len, longest, gather, mask, fresh)

    def _begins(self, positions: Ints) -> Ints:
        """Return the first token that a query at each position sees."""
        window = self._scores.window
        if window is None:
            return np.zeros_like(positions)
        return positions // window * window if self._scores.aligned else np.maximum(positions - window + 1, 0)

    def _seen(self, page_table: Ints, left: Ints, kv_lens: Ints) -> Ints:
        """Return the pages of chunks behind so many tokens that are left out, which hold `kv_lens` tokens."""
        counts = -(-kv_lens // self._page_size)
        columns = np.arange(int(counts.max()))
        places = (left // self._page_size)[:, None] + np.where(columns < counts[:, None], columns, 0)
        return np.take_along_axis(page_table, places, 1)

    def _gathered_runs(self, page_table: Ints) -> Tensor:
        """Return the runs of [num_chunks, pages] in the order part, chunk, kv head, page."""
        by_page = self.run_ids(page_table.reshape(-1)).reshape(*page_table.shape, -1, self._config.num_kv_heads)
        return torch.from_numpy(by_page.transpose(2, 0, 3, 1).reshape(-1))

    def _unwritten(self, copy: Tensor, kv_lens: Ints) -> tuple[npt.NDArray[np.uint8], ...]:
        """Return views of a copy's slots that are below the longest context and hold none of their chunk's tokens."""
        longest, num_kv_heads = int(kv_lens.max()), self._config.num_kv_heads
        parts = (self._kv_parts, len(kv_lens), num_kv_heads)
        slots = copy.view(torch.uint8).view(*parts, -1, self._slot_bytes).numpy()
        found = []
        for chunk, kv_len in enumerate(kv_lens.tolist()):
            # Past its last page comes its first one again (see Batch), which is full unless it is the last.
            end = -(-kv_len // self._page_size) * self._page_size if kv_len >= self._page_size else longest
            if kv_len < min(end, longest):
                found.append(slots[:, chunk, :, kv_len : min(end, longest)])
        return tuple(found)


def _alike(batch: Batch, first: int) -> Iterator[tuple[int, int]]:
    """Yield [first, last) of each group; a batch orders chunks by query length, then mostly by context."""
    for index in range(first + 1, len(batch.query_lens)):
        limit = max(ALIKE_BELOW, ALIKE_RATIO * batch.kv_lens[first])
        if batch.query_lens[index] != batch.query_lens[first] or batch.kv_lens[index] > limit:
            yield first, index
            first = index
    if first < len(batch.query_lens):
        yield first, len(batch.query_lens)


@dataclass(frozen=True, slots=True)
class _Scoring:
    """What torch's fused attention does not compute."""

    scale: float
    soft_cap: float | None
    sinks: Tensor | None  # float32 [num_heads]


def _scored(heads: tuple[Tensor, Tensor, Tensor], scoring: _Scoring, mask: Tensor | None) -> Tensor:
    """Attend in float32, one KV head after the other.

    heads: q [chunks, heads, queries, head_dim]; k and v [chunks, kv heads, keys, head_dim]. Where q has as many heads
    as k, its queries are those of all heads that share a KV head (of one token). mask: added to the scores.
    """
    q, k, v = heads
    group, parts = q.shape[1] // k.shape[1], []
    sinks = None if scoring.sinks is None else scoring.sinks.view(k.shape[1], group, -1)
    for head in range(k.shape[1]):
        queries, keys, values = q[:, head * group : (head + 1) * group].float(), k[:, head].float(), v[:, head].float()
        scores = torch.matmul(queries, keys.transpose(1, 2)[:, None])
        if scoring.soft_cap is None:
            scores.mul_(scoring.scale)
        else:
            scores.mul_(scoring.scale / scoring.soft_cap).tanh_().mul_(scoring.soft_cap)
        scores = scores if mask is None else scores.add_(mask)
        if sinks is not None:
            sink = sinks[head, :, :, None].expand(*scores.shape[:3], 1)
            scores = torch.cat((scores, sink), -1)
        weights = torch.softmax(scores, -1)[..., : k.shape[2]]
        parts.append(torch.matmul(weights, values[:, None]).to(q.dtype))
    return torch.cat(parts, 1)


def _mask(positions: Ints, begins: Ints, kv_lens: Ints, dtype: torch.dtype) -> Tensor | None:
    """Return 0 where a query sees a key and -inf elsewhere; None where every query sees every key.

    positions, begins: of each chunk's queries, and of the first token that each of them sees.
    """
    longest = int(kv_lens.max())
    if positions.shape[1] == 1 and not begins.any() and bool((kv_lens == longest).all()):
        return None
    keys = np.arange(longest)
    hidden = (keys > positions[:, :, None]) | (keys < begins[:, :, None])
    mask = torch.zeros(hidden.shape, dtype=dtype)
    return mask.masked_fill_(torch.from_numpy(hidden), float("-inf"))[:, None]
