"""Compiled attention straight over pages. Plan a step once, then run each of its layers."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pdserve.kernels.checks import require, require_lens, require_page_table, require_tensor
from pdserve.kernels.cpu.calls import Call, Calls, Kind
from pdserve.kernels.cpu.layers import has_matrix_unit
from pdserve.kernels.cpu.library import DTYPES, Pointer, Size
from pdserve.kernels.kv_rows import KvRows
from pdserve.protocol.kvlayout import KvCode

SPLIT = 256  # keys of an item, as in src/attention.h
TOKENS = 64  # queries of a block, as in src/blocks.c
LANES = 16
VALUES = 32  # of a latent that are summed at once
MAX_HEAD_DIM = 512
MAX_LATENT_DIM = 1024  # of a row that is both K and V; as in src/attention_pass.h
CODES: dict[KvCode, int] = {"int8": 2, "fp8_e4m3": 3}  # forms of rows, as src/kv_rows.h numbers them
MAX_GROUP_DIM = 4096  # of the heads that share K and V: a block's sums, TOKENS floats for each, lie on a thread's stack
MAX_GROUP = 64  # heads that share K and V: a block's states, 128 bytes for each query, lie there, too
LATENT_QUERIES = 128  # of a block, where all heads of a token share one row

Ints = npt.NDArray[np.int64]


class _Step(ctypes.Structure):
    """`struct step` of src/attention.h."""

    _fields_ = (
        *((name, Pointer) for name in ("pool", "cos_sin", "targets", "table", "begins", "ends", "items")),
        *((name, Pointer) for name in ("first_items", "partials")),
        *((name, Pointer) for name in ("blocks", "chunk_starts", "chunk_positions", "chunk_table")),
        *((name, Size) for name in ("chunk_table_stride", "num_blocks", "window")),
        *((name, Size) for name in ("table_stride", "num_tokens", "num_rows", "num_items", "num_keys")),
        *((name, Size) for name in ("num_layers", "num_heads", "num_kv_heads", "head_dim", "page_size", "type")),
        ("kv", Size),
        ("row_bytes", Size),
        *((name, Size) for name in ("page_bytes", "layer_bytes", "part_bytes", "head_bytes")),
        *((name, Size) for name in ("parts", "turning", "value_dim", "block_tokens")),
        ("scale", ctypes.c_double),
        ("soft_cap", ctypes.c_double),
    )


@dataclass(frozen=True, slots=True)
class Rows:
    """The step's first query tokens, each a row that attends by itself."""

    page_table: Ints  # [num_rows, most pages]
    begins: Ints  # [num_rows]: the first position that a row sees
    ends: Ints  # [num_rows]: the position after the last one that it sees


@dataclass(frozen=True, slots=True)
class Chunks:
    """The query tokens after the rows: runs of one sequence's tokens. A token sees itself and those before it."""

    page_table: Ints  # [num_chunks, most pages]
    starts: Ints  # [num_chunks + 1]: the first token of each, and the end
    positions: Ints  # [num_chunks]: of the first token
    window: int | None = None  # the most positions that a token sees


@dataclass(frozen=True, slots=True)
class Scoring:
    """What becomes of products of queries and keys: times `scale`, then cap * tanh(score / cap)."""

    scale: float
    soft_cap: float = 0.0  # 0: none


@dataclass(frozen=True, slots=True)
class QkNorm:
    """RMS norms over each head of q and of k, before they are rotated or after it, and over those of v."""

    q: Tensor  # weights: [head_dim]
    k: Tensor
    eps: float
    after_rope: bool = False
    v: Tensor | None = None  # where each head of v has a norm, too


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """What a layer has learnt of its heads."""

    norms: QkNorm | None = None
    sinks: Tensor | None = None  # float32 [num_heads]: scores that join each softmax, without values


class PagedAttention:
    """The library's attention over one pool of pages, for one model's heads."""

    def __init__(
        self,
        pool: Tensor,
        num_heads: int,
        scoring: Scoring | None = None,
        num_ropes: int = 1,
        rows: KvRows | None = None,
    ) -> None:
        """Attend within `pool`: [num_pages, num_layers, 2, num_kv_heads, page_size, width of a row].

        Pages lie one behind the other, and the rows of a layer, part and head do. Where it has one row of a token in
        place of two, that is K and V of its only KV head: a latent, and behind it the features that turn, which are no
        values.
        scoring: scores are times head_dim ** -0.5 unless given.
        num_ropes: how many its layers have. rows: of the pool, in float32 or bfloat16; unless given, of its own type.
        """
        rows = rows or KvRows(pool.shape[-1], pool.dtype)
        require_tensor("pool", pool, (None, None, None, None, None, rows.width), (rows.pool_dtype,))
        _, num_layers, parts, num_kv_heads, page_size, width = pool.shape
        require(parts == 2 or (parts, num_kv_heads) == (1, 1), f"pool must have K and V, or a row for both: {parts}")
        head_dim = rows.head_dim
        require(pool[0, 0, 0, 0].is_contiguous(), "pool must have contiguous rows")
        strides = [stride * pool.itemsize for stride in pool.stride()[:4]]
        several = [each for each in zip(strides[1:], pool.shape[1:4], strict=True) if each[1] > 1]
        end = page_size * width * pool.itemsize
        for stride, count in (*sorted(several), (strides[0], 1)):
            require(stride >= end, "pool must have pages that lie one behind the other, and runs in them")
            end = stride * count
        require(num_heads % num_kv_heads == 0, f"num_heads must be a multiple of {num_kv_heads}, got {num_heads}")
        most_heads, latent_heads = LATENT_QUERIES if parts == 1 else num_heads, num_heads if parts == 1 else None
        require(num_heads <= most_heads, f"num_heads must be at most {most_heads} over rows for both, got {num_heads}")
        most = MAX_HEAD_DIM if parts == 2 else MAX_LATENT_DIM
        require(serves(head_dim, rows.dtype, latent_heads), f"head_dim must be a multiple of {LANES} to {most}")
        self._pool, self._dtype = pool, rows.dtype
        self._partials = torch.empty(0)
        self._step = _Step(
            pool=pool.data_ptr(), num_layers=num_layers, num_heads=num_heads, num_kv_heads=num_kv_heads,
            head_dim=head_dim, page_size=page_size, type=DTYPES[rows.dtype],
            kv=DTYPES[rows.dtype] if rows.code is None else CODES[rows.code], row_bytes=width * pool.itemsize,
            page_bytes=strides[0], layer_bytes=strides[1], part_bytes=strides[2], head_bytes=strides[3],
            parts=parts, block_tokens=TOKENS if parts == 2 else LATENT_QUERIES // num_heads,
            scale=head_dim**-0.5 if scoring is None else scoring.scale,
            soft_cap=0.0 if scoring is None else scoring.soft_cap,
        )  # fmt: skip
        self._num_ropes = num_ropes
        self._arrays: tuple[object, ...] = ()  # what the step points to

    def plan(self, cos_sin: Sequence[Tensor], targets: Ints, rows: Rows, chunks: Chunks | None = None) -> None:
        """Prepare what the layers of a step share.

        cos_sin: float32 [num_tokens, turning], cosines and then sines, of each rope: all features turn but latents.
        targets: [num_tokens, 2], the page and the slot that K and V of each token go to.
        """
        step = self._step
        num_tokens, num_rows = len(targets), len(rows.ends)
        require(len(cos_sin) == self._num_ropes, f"cos_sin must be of {self._num_ropes} ropes, got {len(cos_sin)}")
        step.turning = step.head_dim if step.parts == 2 else cos_sin[0].shape[1]
        still = step.head_dim - step.turning if step.parts == 1 else step.head_dim
        step.value_dim = min(-(-still // VALUES) * VALUES, step.head_dim)
        for each in cos_sin:
            require_tensor("cos_sin", each, (num_tokens, step.turning), (torch.float32,))
        require(targets.shape == (num_tokens, 2), f"targets must be [{num_tokens}, 2], got {targets.shape}")
        require(num_rows <= num_tokens, f"there are {num_rows} rows of {num_tokens} tokens")
        if num_rows:
            require_lens(np.ones_like(rows.ends), rows.ends - rows.begins)
            require_page_table(rows.page_table, rows.ends, step.page_size)
        if chunks is not None:
            require_page_table(chunks.page_table, chunks.positions + np.diff(chunks.starts), step.page_size)
            within = (int(chunks.starts[0]), int(chunks.starts[-1]))
            require(within == (num_rows, num_tokens), f"chunks must be tokens {num_rows} to {num_tokens}, got {within}")
        items, first_items = _items(rows)
        size = len(items) * step.num_heads * (step.head_dim + 2)
        if self._partials.numel() < size:
            self._partials = torch.empty(size)
        arrays = {
            "targets": targets, "table": rows.page_table, "begins": rows.begins, "ends": rows.ends,
            "items": items, "first_items": first_items,
        }  # fmt: skip
        step.num_blocks, num_keys = 0, int((rows.ends - rows.begins).sum())
        if chunks is not None:
            lens = np.diff(chunks.starts)
            num_keys += int((lens * (chunks.positions + lens)).sum())
            arrays |= {
                "blocks": _blocks(chunks, step.block_tokens), "chunk_starts": chunks.starts,
                "chunk_positions": chunks.positions, "chunk_table": chunks.page_table,
            }  # fmt: skip
            step.num_blocks, step.chunk_table_stride = len(arrays["blocks"]), chunks.page_table.shape[1]
            step.window = chunks.window or 0
        kept = {name: np.ascontiguousarray(array, dtype=np.int64) for name, array in arrays.items()}
        for name, array in kept.items():
            setattr(step, name, array.ctypes.data)
        angles = torch.stack(tuple(cos_sin)) if len(cos_sin) > 1 else cos_sin[0].contiguous()
        step.cos_sin, step.partials = angles.data_ptr(), self._partials.data_ptr()
        step.table_stride = rows.page_table.shape[1]
        step.num_tokens, step.num_rows, step.num_items, step.num_keys = num_tokens, num_rows, len(items), num_keys
        self._arrays = (kept, angles)

    def run(self, calls: Calls, layer: int, qkv: Tensor, weights: HeadWeights = HeadWeights(), rope: int = 0) -> Tensor:
        """Norm and rotate q and k in place, write K and V into the pages, and attend with the planned rows and chunks.

        qkv: [num_tokens, num_heads + parts * num_kv_heads, head_dim], contiguous, of the rows' dtype; or q alone, to
        attend to K and V of `layer` that the step has written before. rope: which of the planned ones.
        Returns [num_tokens, num_heads * head_dim]: of the rows, then of the chunks if they are planned. Of a latent's
        results, features that turn mean nothing.
        """
        step, dtype = self._step, self._dtype
        require_tensor("qkv", qkv, (None, None, step.head_dim), (dtype,))
        new_heads = 0 if step.parts == 2 and qkv.shape[1] == step.num_heads else step.num_kv_heads
        num_heads = step.num_heads + step.parts * new_heads
        require(qkv.shape[1] == num_heads, f"qkv must have {num_heads} heads, got {qkv.shape[1]}")
        require(qkv.is_contiguous(), "qkv must be contiguous")
        require(len(qkv) >= step.num_tokens, f"qkv must be of {step.num_tokens} tokens, got {len(qkv)}")
        require(0 <= layer < step.num_layers, f"layer must be below {step.num_layers}, got {layer}")
        require(0 <= rope < self._num_ropes, f"rope must be below {self._num_ropes}, got {rope}")
        out = calls.empty(len(qkv), step.num_heads * step.head_dim, dtype)
        where = {"x": qkv.data_ptr(), "step": ctypes.addressof(step), "layer": layer, "out": out.data_ptr()}
        where["new_heads"] = new_heads
        placing, norms = Call(kind=Kind.PLACING, rope=rope, **where), weights.norms
        if norms is not None:
            named = {"q_norm": norms.q, "k_norm": norms.k} | ({} if norms.v is None else {"v_norm": norms.v})
            for name, weight in named.items():
                require_tensor(name, weight, (step.head_dim,), (dtype,))
                setattr(placing, name, weight.data_ptr())
            placing.eps, placing.norms_after = norms.eps, norms.after_rope
        kinds = [Kind.RANGES, Kind.COMBINING] if step.num_rows else []
        kinds += [Kind.BLOCKS] if step.num_blocks else []
        if weights.sinks is not None:
            require_tensor("sinks", weights.sinks, (step.num_heads,), (torch.float32,))
            where["sinks"] = weights.sinks.data_ptr()
        calls.take(len(qkv), placing, *(Call(kind=kind, **where) for kind in kinds))
        return out


def serves(head_dim: int, dtype: torch.dtype, latent_heads: int | None = None) -> bool:
    """Say whether the library attends with heads of this width in this type. latent_heads: how many share a latent."""
    most = MAX_HEAD_DIM if latent_heads is None else MAX_LATENT_DIM
    fits = latent_heads is None or latent_heads <= LATENT_QUERIES
    return fits and head_dim % LANES == 0 and 0 < head_dim <= most and dtype in DTYPES


def serves_chunks(loaded: ctypes.CDLL, head_dim: int, group: int, dtype: torch.dtype, *, latent: bool = False) -> bool:
    """Say whether the library is fastest for chunks, too: torch is where it alone knows a matrix unit."""
    has_room = latent or (group <= MAX_GROUP and head_dim * group <= MAX_GROUP_DIM)
    fits = head_dim % 32 == 0 and has_room and dtype == torch.bfloat16
    return fits and (has_matrix_unit(loaded) or not torch.cpu._is_amx_tile_supported())


def _blocks(chunks: Chunks, tokens: int) -> Ints:
    """Return each block's chunk and first token in it. The longest come first, so that threads end together."""
    counts = -(-np.diff(chunks.starts) // tokens)
    of_chunk = np.repeat(np.arange(len(counts)), counts)
    firsts = (np.arange(len(of_chunk)) - np.repeat(np.cumsum(counts) - counts, counts)) * tokens
    order = np.argsort(-(chunks.positions[of_chunk] + firsts), kind="stable")
    return np.stack((of_chunk, firsts), axis=1)[order]


def _items(rows: Rows) -> tuple[Ints, Ints]:
    """Return each item's row and range, and each row's first item with the end."""
    firsts = rows.begins // SPLIT
    counts = (rows.ends - 1) // SPLIT + 1 - firsts
    first_items = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(counts)))
    of_row = np.repeat(np.arange(len(counts)), counts)
    ranges = np.arange(len(of_row)) - first_items[of_row] + firsts[of_row]
    return np.stack((of_row, ranges), axis=1), first_items
