"""Attention over pages through the compiled library, for CPUs.

Tokens are rotated, put into pages, and attend straight over their pages. Chunks of several tokens take torch's fused
attention where the compiled kernels do not serve them.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pdserve.engine.attention_torch import GroupedAttention
from pdserve.engine.batch import Batch
from pdserve.engine.layer_kinds import LayerKind
from pdserve.kernels.cpu.attention import Chunks, HeadWeights, PagedAttention, QkNorm, Rows, Scoring
from pdserve.kernels.cpu.calls import Calls
from pdserve.model.config import ModelConfig
from pdserve.model.rope import distinct


@dataclass(frozen=True, slots=True)
class Planned:
    """Attention of the planned rows and chunks; other chunks are only rotated and put into pages."""

    paged: PagedAttention
    calls: Calls
    ropes: Seq[int]  # of each layer, which of the planned ones

    def run(self, layer: int, qkv: Tensor, qk_norm: QkNorm | None, sinks: Tensor | None = None) -> Tensor:
        return self.paged.run(self.calls, layer, qkv, HeadWeights(qk_norm, sinks), self.ropes[layer])


class CompiledAttention:
    """Plans a step once, then serves each layer of one kind of it."""

    def __init__(self, calls: Calls, config: ModelConfig, kind: LayerKind, *, with_chunks: bool) -> None:
        """Attend in layers of one kind. with_chunks: whether the kernels serve chunks of several tokens."""
        self._window, config = kind.scores.window, config.with_heads(kind.heads)
        self._ropes, self._rope_of_layer = distinct(kind.ropes)
        scoring = Scoring(config.scale(kind.scores), kind.scores.soft_cap or 0.0)
        self._paged = PagedAttention(kind.kv, config.num_heads, scoring, len(self._ropes), kind.rows)
        self._planned = self.planned(calls)
        self._grouped = None if with_chunks else GroupedAttention(config, kind)
        self._num_rows, self._num_heads = 0, config.num_heads
        self._dtype = kind.rows.dtype
        self._growths: list[Tensor | None] = []  # of the planned step's queries, by rope

    @property
    def grows(self) -> bool:
        """Say whether queries of the planned step grow with their position; then its rows are no program's."""
        return any(growth is not None for growth in self._growths)

    def planned(self, calls: Calls) -> Planned:
        """Return this attention through other calls, for steps of single tokens."""
        return Planned(self._paged, calls, self._rope_of_layer)

    def plan(self, batch: Batch) -> None:
        """Prepare what all layers share of the step."""
        self._num_rows = num_rows = int(np.searchsorted(batch.query_lens, 1, side="right"))  # chunks are in that order
        ends = batch.kv_lens[:num_rows]
        window = self._window
        begins = np.zeros_like(ends) if window is None else np.maximum(ends - window, 0)
        positions = torch.from_numpy(batch.positions)
        self._growths = [rope.growth(positions, self._dtype) for rope in self._ropes]
        self._paged.plan(
            [rope.cos_sin(positions) for rope in self._ropes],
            np.stack((batch.pages, batch.slots), axis=1),
            Rows(batch.page_table[:num_rows], begins, ends),
            self._chunks(batch, num_rows) if self._grouped is None and num_rows < len(batch.kv_lens) else None,
        )
        if self._grouped is not None:
            self._grouped.plan(batch, num_rows)

    def run(self, layer: int, qkv: Tensor, qk_norm: QkNorm | None, sinks: Tensor | None = None) -> Tensor:
        """Attend in one layer; see `pdserve.model.attention.Attends`."""
        if (growth := self._growths[self._rope_of_layer[layer]]) is not None:
            qkv[:, : self._num_heads] *= growth
        out = self._planned.run(layer, qkv, qk_norm, sinks)
        if self._grouped is None or self._num_rows == len(qkv):
            return out
        return torch.cat((out[: self._num_rows], *self._grouped.run(layer, qkv, sinks)))

    def _chunks(self, batch: Batch, first: int) -> Chunks:
        positions = (batch.kv_lens - batch.query_lens)[first:]
        return Chunks(batch.page_table[first:], batch.query_starts[first:], positions, self._window)
