"""Random attention problems with their float64 answers, for tests and for checks on a GPU."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import reference_kernels as reference
import torch
from torch import Tensor

from pdserve.kernels.attention import AttentionSpec
from pdserve.kernels.attention_plan import Int32s, Ints
from pdserve.kernels.kv_rows import KvRows

SPARE_PAGES = 3  # belong to no sequence
OUTSIDE = 1_000_000  # fills the page table past each sequence's pages: reading it is a bug


@dataclass(frozen=True, slots=True)
class Lens:
    """How many new tokens each sequence has, and how many in all."""

    query: tuple[int, ...]
    kv: tuple[int, ...]

    @property
    def arrays(self) -> tuple[Ints, Ints]:
        """Both as vectors."""
        return np.array(self.query), np.array(self.kv)


@dataclass(frozen=True, slots=True)
class Problem:
    """A ragged batch over scattered pages. Slots and pages that are not in use hold NaN or infinity."""

    spec: AttentionSpec
    lens: Lens
    page_table: Int32s
    q: Tensor
    kv: Tensor  # [num_pages, 2 layers, 2, num_kv_heads, page_size, head_dim]; of latent rows, 1 in the place of 2
    sinks: Tensor | None  # float32 [num_heads]

    @property
    def pages(self) -> tuple[Tensor, Tensor]:
        """The K and V views under test: the second layer's."""
        return layer_views(self.kv, 1)

    def read(self, pages: Tensor, page_ids: Sequence[int], num_tokens: int) -> Tensor:
        """Collect what a sequence's K or V stand for: [heads, num_tokens, head_dim]."""
        rows = self.spec.rows
        if rows.code is not None:  # numbers in float32, as the kernels read them
            rows = KvRows(rows.head_dim, torch.float32, rows.code)
        return rows.expanded(read_pages(pages, page_ids, num_tokens))

    def expected(self) -> Tensor:
        """Compute the answer in float64: [num_tokens, num_heads, head_dim]."""
        spec, start, answers = self.spec, 0, []
        for row, (query_len, kv_len) in enumerate(zip(self.lens.query, self.lens.kv, strict=True)):
            ids = self.page_table[row, : -(-kv_len // spec.page_size)]
            k, v = (self.read(pages, ids.tolist(), kv_len).double() for pages in self.pages)
            v = v[..., : spec.width]
            q = self.q[start : start + query_len].double()
            scoring = reference.Scoring(spec.scale, spec.window, spec.soft_cap, self.sinks)
            answers.append(reference.attention(q, k, v, scoring))
            start += query_len
        return torch.cat(answers)

    def unwritten(self, num_tokens: int) -> Tensor:
        """Return room for results, full of NaN."""
        return self.q.new_full((num_tokens, self.spec.num_heads, self.spec.width), torch.nan)

    def error(self, out: Tensor) -> float:
        """Return the largest absolute difference from the answer; infinite where `out` has NaN."""
        gap = (out[: sum(self.lens.query)].double() - self.expected()).abs()
        return float(gap.nan_to_num(nan=torch.inf).max())


def spec_of(heads: tuple[int, int], head_dim: int, page_size: int, lens: Lens, **fields: object) -> AttentionSpec:
    """Return a spec whose pool just holds `lens`; `fields` are AttentionSpec's own."""
    num_pages = sum(-(-length // page_size) for length in lens.kv) + SPARE_PAGES
    return AttentionSpec(*heads, head_dim, page_size, num_pages, head_dim**-0.5, **fields)  # type: ignore[arg-type]


def make(spec: AttentionSpec, lens: Lens, *, device: str = "cpu", seed: int = 0, unused: float = math.nan) -> Problem:
    """Make a problem; queries and keys are normal, values within 0.75 of zero so that rounding stays comparable.

    unused: what slots and pages that are not in use hold.
    """
    random = torch.Generator(device).manual_seed(seed)
    order = np.random.default_rng(seed).permutation(spec.num_pages)
    counts = [-(-length // spec.page_size) for length in lens.kv]
    table = np.full((len(counts), max(counts) + 2), OUTSIDE, dtype=np.int32)
    parts = 2 if spec.tail == 0 else 1
    shape = (spec.num_pages, 2, parts, spec.num_kv_heads, spec.page_size, spec.head_dim)
    kv = torch.full(shape, unused, device=device)
    taken = 0
    for row, (count, length) in enumerate(zip(counts, lens.kv, strict=True)):
        ids = order[taken : taken + count]
        table[row, :count] = ids
        taken += count
        slots = torch.as_tensor((ids[:, None] * spec.page_size + np.arange(spec.page_size)).reshape(-1)[:length])
        rows = torch.randn((length, parts, spec.num_kv_heads, spec.head_dim), generator=random, device=device)
        values = rows[:, -1, :, : spec.width]
        values.mul_(0.3).clamp_(-0.75, 0.75)
        for pages, written in zip(kv[:, 1].unbind(1), rows.unbind(1), strict=True):
            write_pages(pages, written, slots.to(device))
    q_shape = (sum(lens.query), spec.num_heads, spec.head_dim)
    q = torch.randn(q_shape, generator=random, device=device).to(spec.dtype)
    sinks = torch.randn(spec.num_heads, generator=random, device=device) * 3 if spec.has_sinks else None
    return Problem(spec, lens, table, q, kv.to(spec.dtype) if spec.code is None else coded(spec, kv), sinks)


def coded(spec: AttentionSpec, kv: Tensor) -> Tensor:
    """Return pages with coded rows; where no values were written, the scale is NaN, and codes are the greatest."""
    rows = spec.rows.packed(kv)
    rows[..., : spec.head_dim].masked_fill_(kv.isnan(), 0x7E)
    return rows


def layer_views(kv: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """Return one layer's K and V as strided views [num_pages, num_kv_heads, page_size, head_dim].

    kv: [num_pages, num_layers, 2, num_kv_heads, page_size, head_dim], a page being one contiguous run; of latent rows,
    which are K and V at once, 1 in the place of 2.
    """
    parts = kv[:, layer].unbind(1)
    return parts[0], parts[-1]


def read_pages(pages: Tensor, page_ids: Sequence[int], num_tokens: int) -> Tensor:
    """Collect a sequence's K or V: [num_pages, heads, page_size, head_dim] -> [heads, num_tokens, head_dim]."""
    chosen = pages[torch.as_tensor(np.asarray(page_ids), dtype=torch.long)]
    return chosen.transpose(0, 1).flatten(1, 2)[:, :num_tokens]


def write_pages(pages: Tensor, rows: Tensor, slots: Tensor) -> None:
    """Put rows [num_tokens, heads, head_dim] into `pages` in place; slots: [num_tokens] page * page_size + slot."""
    page_size = pages.shape[2]
    pages[slots // page_size, :, slots % page_size] = rows.to(pages.dtype)
