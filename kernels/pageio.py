"""Writes K and V into pages, digests pages, and computes the row-wise kernels of layers: RMSNorm and SiLU gating.

A pool is [num_pages, num_layers, 2 (k|v), num_kv_heads, page_size, head_dim], each page one contiguous run.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.kernels.checks import require, require_tensor, require_words
from pdserve.kernels.device import pages as device_pages
from pdserve.protocol.kvlayout import SCALED, KvCode

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_WIDTH = 32768
MIN_ELEMENTS = 2048  # one program's share: narrower rows are taken several at a time
SILU_BLOCK = 1024


def power_of_two(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalize rows [num_rows, width] and scale by weight [width]."""
    require_tensor("x", x, (None, None), DTYPES)
    num_rows, width = x.shape
    require(1 <= width <= MAX_WIDTH, f"x must have 1 to {MAX_WIDTH} columns, got {width}")
    require_tensor("weight", weight, (width,), DTYPES)
    out = torch.empty_like(x)
    block = power_of_two(width)
    rows = max(1, MIN_ELEMENTS // block)
    if num_rows > 0:
        device_pages.rms_norm[(-(-num_rows // rows),)](
            x, weight, out, num_rows, x.stride(0), out.stride(0), eps,
            WIDTH=width, BLOCK=block, ROWS=rows, num_warps=max(4, min(16, block * rows // 1024)),
        )  # fmt: skip
    return out


def silu_mul(x: Tensor) -> Tensor:
    """Gate rows: x [num_rows, 2 * width], gates first -> [num_rows, width]."""
    require_tensor("x", x, (None, None), DTYPES)
    require(x.shape[1] % 2 == 0, f"x must have an even number of columns, got {x.shape[1]}")
    num_rows, width = x.shape[0], x.shape[1] // 2
    out = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    if num_rows > 0:
        device_pages.silu_mul[num_rows, -(-width // SILU_BLOCK)](
            x, out, x.stride(0), out.stride(0), WIDTH=width, BLOCK=SILU_BLOCK, num_warps=4
        )
    return out


ROPE_HEADS = 8  # heads one program turns
DIGEST_BLOCK = 1024  # 8-byte words hashed at a time
DIGEST_TURNS = 8
ID_DTYPES = (torch.int32, torch.int64)


@dataclass(frozen=True, slots=True)
class Rotation:
    """How a model turns q and k before attention."""

    cos_sin: Tensor  # float32 [max_positions, head_dim]: cosines of head_dim/2 angles, then sines
    q_norm: Tensor | None = None  # weight [head_dim] of a per-head RMSNorm, as in Qwen 3; both or neither
    k_norm: Tensor | None = None
    eps: float = 1e-6
    norms_after: bool = False  # whether norms come after the rotation


@dataclass(frozen=True, slots=True)
class Target:
    """Where a step's new K and V go."""

    k_pages: Tensor  # one layer's views [num_pages, num_kv_heads, page_size, head_dim]
    v_pages: Tensor  # of rows that may have another width
    slots: Tensor  # int32 or int64 [num_tokens]: page * page_size + slot; num_pages * page_size is nowhere (padding)
    code: KvCode | None = None  # rows are bytes, as `kernels.kv_rows` says; None: values


def rope_write(
    qkv: tuple[Tensor, Tensor, Tensor],
    positions: Tensor,
    rotation: Rotation,
    target: Target,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Normalize and rotate q and k, write k and v into their slots; returns the finished q (`out` may be q).

    qkv: q [num_tokens, num_heads, head_dim], k and v [num_tokens, num_kv_heads, width], any token and head strides.
    positions: int32 or int64 [num_tokens], rows of rotation.cos_sin. Raises ValueError naming the argument.
    """
    _check_rope_write(qkv, target)
    return _turn(qkv, positions, rotation, target, out)


def rope(q: Tensor, positions: Tensor, rotation: Rotation, *, out: Tensor | None = None) -> Tensor:
    """Normalize and rotate q alone, as `rope_write` does; returns the finished q."""
    require_tensor("q", q, (None, None, None), DTYPES)
    nothing = q[:, :0]
    return _turn((q, nothing, nothing), positions, rotation, Target(q[:, :0, None], q[:, :0, None], positions), out)


def _turn(
    qkv: tuple[Tensor, Tensor, Tensor], positions: Tensor, rotation: Rotation, target: Target, out: Tensor | None
) -> Tensor:
    q, k, v = qkv
    require_tensor("cos_sin", rotation.cos_sin, (None, q.shape[2]), (torch.float32,))
    require(rotation.cos_sin.is_contiguous(), f"cos_sin must be contiguous, got strides {rotation.cos_sin.stride()}")
    require_tensor("positions", positions, (q.shape[0],), ID_DTYPES)
    require((rotation.q_norm is None) == (rotation.k_norm is None), "rotation must norm both q and k, or neither")
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    require_tensor("out", out, q.shape, (q.dtype,))
    num_tokens, num_heads, head_dim = q.shape
    num_slots = target.k_pages.shape[0] * target.k_pages.shape[2]
    if num_tokens == 0:
        return out
    unused = rotation.cos_sin
    device_pages.rope_write[num_tokens, -(-num_heads // ROPE_HEADS) + -(-k.shape[1] // ROPE_HEADS)](
        q, k, v, out, target.k_pages, target.v_pages, rotation.cos_sin, positions, target.slots,
        unused if rotation.q_norm is None else rotation.q_norm,
        unused if rotation.k_norm is None else rotation.k_norm,
        rotation.eps, num_heads, k.shape[1], num_slots,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *out.stride()[:2],
        *target.k_pages.stride()[:3], *target.v_pages.stride()[:3],
        HEAD_DIM=head_dim, BLOCK_HALF=power_of_two(head_dim // 2), V_DIM=v.shape[2], BLOCK_V=power_of_two(v.shape[2]),
        HEADS=ROPE_HEADS,
        PAGE_SIZE=target.k_pages.shape[2], HAS_NORM=rotation.q_norm is not None,
        NORM_AFTER=rotation.q_norm is not None and rotation.norms_after, CODE=target.code or "",
        num_warps=4,
    )  # fmt: skip
    return out


def _check_rope_write(qkv: tuple[Tensor, Tensor, Tensor], target: Target) -> None:
    """Raise ValueError naming what does not fit."""
    q, k, v = qkv
    require_tensor("q", q, (None, None, None), DTYPES)
    num_tokens, _, head_dim = q.shape
    dtypes, scaled = (DTYPES, 0) if target.code is None else ((torch.uint8,), SCALED[target.code])
    require_tensor("k_pages", target.k_pages, (None, None, None, head_dim + scaled), dtypes)
    num_kv_heads = target.k_pages.shape[1]
    require_tensor("v_pages", target.v_pages, (*target.k_pages.shape[:3], None), (target.k_pages.dtype,))
    if target.code is not None:
        require_words("k_pages", target.k_pages)
        require_words("v_pages", target.v_pages)
    require_tensor("k", k, (num_tokens, num_kv_heads, head_dim), (q.dtype,))
    require_tensor("v", v, (num_tokens, num_kv_heads, target.v_pages.shape[3] - scaled), (q.dtype,))
    require_tensor("slots", target.slots, (num_tokens,), ID_DTYPES)


def page_digests(pool: Tensor, page_ids: Tensor, first_word: int = 0) -> Tensor:
    """Hash pages to 64 bits each, as `tests/support/reference_kernels.py` defines: int64 [len(page_ids)].

    first_word: which word of a longer page each page here begins with; digests of a page's parts add up to its own.
    """
    words = _words("pool", pool)
    require_tensor("page_ids", page_ids, (None,), ID_DTYPES)
    out = torch.zeros(len(page_ids), dtype=torch.int64, device=pool.device)
    if len(page_ids) > 0:
        device_pages.digest_pages[len(page_ids), -(-words.shape[1] // (DIGEST_BLOCK * DIGEST_TURNS))](
            out, words, page_ids, words.stride(0), words.shape[1], first_word,
            BLOCK=DIGEST_BLOCK, TURNS=DIGEST_TURNS, num_warps=4,
        )  # fmt: skip
    return out


def _words(name: str, pool: Tensor) -> Tensor:
    """View a pool as [num_pages, 8-byte words]; each page must be one contiguous run."""
    page = pool[0]
    require(page.is_contiguous(), f"{name} must have contiguous pages, got strides {pool.stride()}")
    page_bytes = page.numel() * pool.element_size()
    aligned = page_bytes % 8 == 0 and pool.stride(0) * pool.element_size() % 8 == 0
    require(aligned, f"{name} must have pages of a multiple of 8 bytes, got {page_bytes}")
    flat = pool.as_strided((len(pool), page.numel()), (pool.stride(0), 1))
    return flat.view(torch.int64)
