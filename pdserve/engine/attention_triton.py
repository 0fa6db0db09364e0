"""Attention over pages through the Triton kernels: for GPUs, and for a CPU where Triton interprets.

A batch has its single-token chunks first. They are attended to in one of a few fixed sizes, which may be captured.
Chunks of more tokens have no fixed size, nor have single tokens where no size fits the step.
"""

from bisect import bisect_left
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from pdserve.engine.batch import Batch, Ints
from pdserve.engine.layer_kinds import LayerKind
from pdserve.kernels.attention import AttentionSpec, PagedAttention, StepSize, room_for_partials
from pdserve.kernels.cpu.attention import QkNorm
from pdserve.kernels.kv_rows import KvRows
from pdserve.kernels.pageio import Rotation, Target, rms_norm, rope, rope_write
from pdserve.model.config import ModelConfig
from pdserve.model.design import Scores
from pdserve.model.rope import distinct


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Return the powers of two below `max_num_seqs`, and `max_num_seqs`."""
    return (*(1 << power for power in range((max_num_seqs - 1).bit_length())), max_num_seqs)


def size_for(num_seqs: int, sizes: Seq[int]) -> int | None:
    """Return the smallest of the rising `sizes` that holds `num_seqs`, or None."""
    index = bisect_left(sizes, num_seqs)
    return sizes[index] if index < len(sizes) else None


def attention_spec(config: ModelConfig, scores: Scores, page_size: int, num_pages: int, rows: KvRows) -> AttentionSpec:
    """Return the attention of layers; ValueError names what of the model or its pages the kernels do not serve."""
    return AttentionSpec(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        page_size=page_size,
        num_pages=num_pages,
        scale=config.scale(scores),
        dtype=rows.dtype,
        window=scores.window,
        soft_cap=scores.soft_cap,
        has_sinks=scores.has_sinks,
        value_dim=config.head_dim - config.rope_dim if config.is_latent else None,
        code=rows.code,
    )


class PromptAttention(Protocol):
    """What `PagedAttention` without a size does, by other means: plan once per step, run once per layer."""

    def plan(self, query_lens: Ints, kv_lens: Ints, page_table: Ints) -> None: ...

    def run(self, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor, sinks: Tensor | None = None) -> object: ...


_Part = tuple[PromptAttention, slice]  # one launch, for these tokens of a step; the kernel leaves padding alone


@dataclass(frozen=True, slots=True)
class _Step:
    positions: Tensor  # int32 [num_tokens]
    slots: Tensor  # int32 [num_tokens]
    parts: tuple[_Part, ...]


class TritonAttention:
    """Plans a step once, then serves each layer of one kind of it."""

    def __init__(
        self, config: ModelConfig, max_kv_len: int, sizes: Seq[int], prompts: PromptAttention | None, kind: LayerKind
    ) -> None:
        """Attend in layers of one kind.

        max_kv_len: the longest context. sizes: how many sequences a decode step may have room for, rising.
        prompts: what attends to chunks in place of the kernels. ValueError names what of a model or pool the kernels
        do not serve.
        """
        config, kv = config.with_heads(kind.heads), kind.kv
        self._config = config
        self._spec = attention_spec(config, kind.scores, kv.shape[4], kv.shape[0], kind.rows)
        # Of latent rows, the last features turn, and the others are the value; of K and V all are both.
        self._turning, self._values = slice(None), slice(None)
        if self._spec.tail:
            self._turning, self._values = slice(-config.rope_dim, None), slice(self._spec.width)
        self._pages = [(parts[0], parts[-1]) for parts in (layer.unbind(1) for layer in kv.unbind(1))]
        self._targets = [(k[..., self._turning], v[..., self._values]) for k, v in self._pages]
        found, places = distinct(kind.ropes)
        tables = [rope.table(max_kv_len) for rope in found]
        self._cos_sin = [tables[place] for place in places]
        self._device = kv.device
        self._max_kv_len = max_kv_len
        self._sizes = tuple(sizes)
        self._room = room_for_partials(kv.device)  # a step's parts and layers come one after another
        self._prefill = prompts or PagedAttention(self._spec, kv.device, room=self._room)
        self._decodes: dict[int, PagedAttention] = {}
        self._step: _Step | None = None

    def plan(self, batch: Batch, positions: Tensor, slots: Tensor) -> None:
        """Prepare what all layers share of the step. positions, slots: int32, at least one for each token.

        A step of single tokens whose `positions` are as long as one of the sizes may be captured.
        """
        single = int(np.count_nonzero(batch.query_lens == 1))
        size = size_for(single, self._sizes) if single else None
        parts = []
        if size is not None and size <= len(positions):
            parts.append(_planned(self._decode(size), batch, slice(0, single), slice(0, size)))
        else:
            single = 0
        if single < len(batch.query_lens):
            parts.append(_planned(self._prefill, batch, slice(single, None), slice(single, batch.num_tokens)))
        self._step = _Step(positions, slots, tuple(parts))

    def run(self, layer: int, qkv: Tensor, qk_norm: QkNorm | None, sinks: Tensor | None = None) -> Tensor:
        """Attend in one layer; see `pdserve.model.attention.Attention`."""
        step = self._step
        if step is None:
            raise RuntimeError("run before plan")
        num_heads, num_kv_heads = self._config.num_heads, self._config.num_kv_heads
        q, k, v = qkv[:, :num_heads], qkv[:, num_heads : num_heads + num_kv_heads], qkv[:, -num_kv_heads:]
        if qk_norm is not None and qk_norm.v is not None:
            v = rms_norm(v.reshape(-1, v.shape[-1]), qk_norm.v, qk_norm.eps).view(v.shape)
        (k_pages, v_pages), turned, rotation = self._pages[layer], q, self._rotation(layer, qk_norm)
        if self._spec.tail:
            turned, k, v = q[..., self._turning], k[..., self._turning], v[..., self._values]
        if qkv.shape[1] > num_heads:
            target = Target(*self._targets[layer], step.slots, self._spec.code)
            rope_write((turned, k, v), step.positions, rotation, target, out=turned)
        else:
            rope(q, step.positions, rotation, out=q)
        out = q.new_empty((len(q), num_heads, self._spec.width))
        for kernel, tokens in step.parts:
            kernel.run(q[tokens], k_pages, v_pages, out=out[tokens], sinks=sinks)
        return out.view(len(out), -1)

    def _rotation(self, layer: int, qk_norm: QkNorm | None) -> Rotation:
        cos_sin = self._cos_sin[layer]
        if qk_norm is None:
            return Rotation(cos_sin)
        return Rotation(cos_sin, qk_norm.q, qk_norm.k, qk_norm.eps, qk_norm.after_rope)

    def _decode(self, size: int) -> PagedAttention:
        if size not in self._decodes:
            step = StepSize(size, self._max_kv_len)
            self._decodes[size] = PagedAttention(self._spec, self._device, step, room=self._room)
        return self._decodes[size]


def _planned(kernel: PromptAttention, batch: Batch, chunks: slice, tokens: slice) -> _Part:
    kernel.plan(batch.query_lens[chunks], batch.kv_lens[chunks], batch.page_table[chunks])
    return kernel, tokens
