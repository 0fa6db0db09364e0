"""Time prefill and decode attention, in the shapes the project has goals for, beside other attention; and tune tiles.

Peers are torch's cuDNN and flash SDPA. They read contiguous K and V; ours reads pages. A peer that cannot do a shape is
left out, with the reason: cuDNN where a prompt has fewer queries than keys, for torch makes a mask for it in each call.
All rotate over several sets of keys and values, so that no caches are timed.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gpu_problem import layer_views
from gpu_report import Row, time_us
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from pdserve.kernels.attention import AttentionSpec, PagedAttention, StepSize
from pdserve.kernels.tuning import Tile

LAYERS = 4  # pages of several layers, as an engine has: strides matter, and calls rotate over them


@dataclass(frozen=True, slots=True)
class Shape:
    """A batch of equal sequences."""

    batch: int
    queries: int
    keys: int


Case = tuple[str, AttentionSpec, Shape]

LLAMA = AttentionSpec(64, 8, 128, 64, 1, 128**-0.5)
SHARD = replace(LLAMA, num_heads=8, num_kv_heads=1)
QWEN = replace(LLAMA, num_heads=16)
SMALL_HEADS = replace(LLAMA, num_heads=32, head_dim=64, scale=0.125)
SMALL_PAGES = replace(LLAMA, page_size=16)

PREFILLS = [
    (f"{heads} {shape.queries}@{shape.keys} x{shape.batch}", spec, shape)
    for heads, spec, shape in (
        ("64/8 d128", LLAMA, Shape(1, 2048, 2048)),
        ("64/8 d128", LLAMA, Shape(1, 8192, 8192)),
        ("64/8 d128", LLAMA, Shape(1, 16384, 16384)),
        ("64/8 d128", LLAMA, Shape(1, 2048, 8192)),
        ("64/8 d128", LLAMA, Shape(1, 512, 131072)),
        ("64/8 d128", LLAMA, Shape(8, 1024, 1024)),
        ("64/8 d128 16-slot pages", SMALL_PAGES, Shape(1, 8192, 8192)),
        ("8/1 d128", SHARD, Shape(1, 256, 131072)),
        ("8/1 d128", SHARD, Shape(1, 512, 8192)),
        ("16/8 d128", QWEN, Shape(4, 1024, 1024)),
        ("32/8 d64", SMALL_HEADS, Shape(1, 8192, 8192)),
    )
]
DECODES = [
    (f"{heads} {shape.batch} x {shape.keys}", spec, shape)
    for heads, spec, shape in (
        ("64/8 d128", LLAMA, Shape(32, 1, 8192)),
        ("64/8 d128", LLAMA, Shape(1, 1, 131072)),
        ("64/8 d128", LLAMA, Shape(8, 1, 2048)),
        ("64/8 d128", LLAMA, Shape(128, 1, 2048)),
        ("64/8 d128 16-slot pages", SMALL_PAGES, Shape(32, 1, 8192)),
        ("8/1 d128", SHARD, Shape(1, 1, 131072)),
        ("16/8 d128", QWEN, Shape(256, 1, 1024)),
    )
]


SHOWN = 4
PREFILL_TILES = [
    *(Tile(128, block_n, 8, stages) for block_n, stages in product((32, 64, 128), (2, 3))),
    *(Tile(128, 32, 8, stages, 2, 128) for stages in (2, 3, 4)),
    *(Tile(64, 64, 4, stages, 2) for stages in (2, 3)),
    *(Tile(64, 32, 4, stages, 3, 168) for stages in (2, 3)),
    Tile(128, 64, 8, 3, 2, 128),
]
DECODE_TILES = [
    Tile(16, block_n, warps, stages, per_sm)
    for block_n, warps, stages, per_sm in product((32, 64, 128), (4, 8), (2, 3, 4), (1, 2, 3))
    if per_sm * (2 * (stages - 1) * block_n + 16) * 256 <= 227 * 1024
]


def prefill(only: str) -> list[Row]:
    """Time prefill; the rate is that of the causal half."""

    def tera_operations(spec: AttentionSpec, shape: Shape) -> float:
        pairs = shape.queries * shape.keys - shape.queries * (shape.queries - 1) / 2
        return 4e-12 * shape.batch * pairs * spec.num_heads * spec.head_dim

    return _bench(PREFILLS, only, tera_operations, "TFLOP/s")


def decode(only: str) -> list[Row]:
    """Time decode; the rate is that of reading keys and values."""

    def gigabytes(spec: AttentionSpec, shape: Shape) -> float:
        per_key = 2 * spec.num_kv_heads * spec.head_dim * spec.dtype.itemsize
        return 1e-9 * shape.batch * shape.keys * per_key

    return _bench(DECODES, only, gigabytes, "GB/s")


def tune(only: str) -> list[Row]:
    """Return the best tiles of a few shapes, fastest first: rows for `kernels/tuning.py`."""
    long_prompt, batch = Shape(1, 8192, 8192), Shape(32, 1, 8192)
    cases = [
        ("prefill d128", LLAMA, long_prompt, PREFILL_TILES),
        ("prefill d64", SMALL_HEADS, long_prompt, PREFILL_TILES),
        ("prefill d128 16-slot pages", SMALL_PAGES, long_prompt, PREFILL_TILES),
        ("decode d128", LLAMA, batch, DECODE_TILES),
    ]
    return [row for name, spec, shape, tiles in cases if only in name for row in _best(name, spec, shape, tiles)]


def _bench(cases: Iterable[Case], only: str, work: Callable[[AttentionSpec, Shape], float], unit: str) -> list[Row]:
    rows = []
    for name, spec, shape in cases:
        if only in name:
            ours_us = time_us(_calls(spec, shape))
            peers, missing = _peer_times(spec, shape)
            torch.cuda.empty_cache()
            rate = 1e6 * work(spec, shape) / ours_us
            rows.append(Row(name, ours_us, rate, unit, peers, f"no {missing}" if missing else ""))
    return rows


def _best(name: str, spec: AttentionSpec, shape: Shape, tiles: Iterable[Tile]) -> list[Row]:
    timed, refused = [], 0
    for tile in tiles:
        try:
            timed.append((time_us(_calls(spec, shape, tile)), tile))
        except Exception:  # noqa: BLE001 - a tile that does not compile or fit is no candidate
            refused += 1
    timed.sort(key=lambda pair: pair[0])
    notes = [f"({refused} tiles refused)"] + [""] * SHOWN
    return [
        Row(f"{name} #{rank}", time, note=f"{tile} {note}")
        for rank, ((time, tile), note) in enumerate(zip(timed[:SHOWN], notes, strict=False), 1)
    ]


def _calls(spec: AttentionSpec, shape: Shape, tile: Tile | None = None) -> list[Callable[[], object]]:
    """Return a planned step on random data for each layer, ready to run."""
    spec, kv, table = _pool(spec, shape)
    size = StepSize(shape.batch, shape.keys) if shape.queries == 1 else None
    attention = PagedAttention(spec, "cuda", size, tile=tile)
    attention.plan(np.full(shape.batch, shape.queries), np.full(shape.batch, shape.keys), table)
    q = torch.randn((shape.batch * shape.queries, spec.num_heads, spec.head_dim), device="cuda").to(spec.dtype)
    out = torch.empty_like(q)
    return [partial(attention.run, q, *layer_views(kv, layer), out=out) for layer in range(LAYERS)]


def _pool(spec: AttentionSpec, shape: Shape) -> tuple[AttentionSpec, Tensor, npt.NDArray[np.int32]]:
    """Fill a pool with random keys and values on scattered pages."""
    columns = -(-shape.keys // spec.page_size)
    spec = replace(spec, num_pages=shape.batch * columns)
    sizes = (spec.num_pages, LAYERS, 2, spec.num_kv_heads, spec.page_size, spec.head_dim)
    kv = torch.empty(sizes, dtype=spec.dtype, device="cuda").normal_()
    order = np.random.default_rng(0).permutation(spec.num_pages).astype(np.int32)
    return spec, kv, order.reshape(shape.batch, columns)


def _peer_times(spec: AttentionSpec, shape: Shape) -> tuple[dict[str, float], str]:
    """Time every peer that serves the shape: microseconds by name, and why others are missing."""
    dim = spec.head_dim
    q = torch.randn((shape.batch, spec.num_heads, shape.queries, dim), device="cuda").to(spec.dtype)
    sizes = (LAYERS, 2, shape.batch, spec.num_kv_heads, shape.keys, dim)
    layers = torch.empty(sizes, dtype=spec.dtype, device="cuda").normal_()
    found, missing = {}, []
    for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
        if name == "cudnn" and 1 < shape.queries < shape.keys:
            missing.append("cudnn: it would take a mask")
            continue
        try:
            found[name] = time_us([partial(_sdpa, backend, q, *kv) for kv in layers])
        except Exception as error:  # noqa: BLE001 - whatever keeps a peer from running, the rest goes on
            torch.cuda.synchronize()
            missing.append(f"{name}: {type(error).__name__}")
    return found, ", ".join(missing)


def _sdpa(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    queries, keys = q.shape[2], k.shape[2]
    mask: Any = causal_lower_right(queries, keys) if 1 < queries < keys else None
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(q, k, v, mask, is_causal=queries == keys, enable_gqa=True)
