"""Attention with compiled kernels, for CPUs: tokens are rotated and put into pages in one call for each layer, and
chunks of one token attend in the same call, straight over their pages.

Longer chunks take torch's fused attention, which multiplies whole blocks of queries and keys.
"""

import ctypes

import numpy as np
import torch
from torch import Tensor

from pdserve.engine.attention_torch import GroupedAttention
from pdserve.engine.batch import Batch
from pdserve.kernels.cpu.attention import PagedAttention, Rows
from pdserve.model.config import ModelConfig
from pdserve.model.ops import QkNorm
from pdserve.model.rope import Rope


class CompiledAttention:
    """Plans a step once, then serves each layer of it."""

    def __init__(self, loaded: ctypes.CDLL, config: ModelConfig, kv: Tensor, rope: Rope) -> None:
        """Attend within `kv`: [num_pages, num_layers, 2, num_kv_heads, page_size, head_dim]."""
        self._config = config
        self._rope = rope
        self._paged = PagedAttention(loaded, kv, config.num_heads)
        self._grouped = GroupedAttention(config, kv)
        self._width = config.num_heads * config.head_dim
        self._out = torch.empty((0, self._width), dtype=kv.dtype)  # of one layer, until the next one

    def plan(self, batch: Batch) -> None:
        """Prepare what all layers share of the step."""
        num_rows = int(np.searchsorted(batch.query_lens, 1, side="right"))  # chunks are ordered by query length
        ends = batch.kv_lens[:num_rows]
        window = self._config.sliding_window
        begins = np.zeros_like(ends) if window is None else np.maximum(ends - window, 0)
        self._paged.plan(
            self._rope.cos_sin(torch.from_numpy(batch.positions)),
            np.stack((batch.pages, batch.slots), axis=1),
            Rows(batch.page_table[:num_rows], begins, ends),
        )
        self._grouped.plan(batch, num_rows)
        if len(self._out) != num_rows:
            self._out = torch.empty((num_rows, self._width), dtype=self._out.dtype)

    def run(self, layer: int, qkv: Tensor, qk_norm: QkNorm | None) -> Tensor:
        """Attend in one layer; see `pdserve.model.ops.Attention`."""
        norms = None if qk_norm is None else (qk_norm.q, qk_norm.k)
        self._paged.run(layer, qkv, norms, self._config.rms_norm_eps, out=self._out)
        if len(self._out) == len(qkv):
            return self._out
        return torch.cat((self._out, *self._grouped.run(layer, qkv)))
