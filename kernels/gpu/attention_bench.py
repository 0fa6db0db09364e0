"""Time prefill and decode attention beside the peers, in the shapes the project has goals for."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from pdserve.kernels.attention import FP8, AttentionSpec, PagedAttention, Scales, StepSize
from pdserve.kernels.gpu import peers
from pdserve.kernels.gpu.peers import Shape
from pdserve.kernels.gpu.rows import Choice, Row
from pdserve.kernels.gpu.timing import time_us
from pdserve.kernels.reference import layer_views
from pdserve.kernels.tuning import Tile

LAYERS = 4  # pages of several layers, as an engine has: strides matter
LLAMA = AttentionSpec(64, 8, 128, 64, 1, 128**-0.5)
SHARD = replace(LLAMA, num_heads=8, num_kv_heads=1)
QWEN = replace(LLAMA, num_heads=16)
SMALL_HEADS = replace(LLAMA, num_heads=32, head_dim=64, scale=0.125)

PREFILLS = [
    (f"{heads} {shape.queries}@{shape.keys} x{shape.batch}", spec, shape)
    for heads, spec, shape in (
        ("64/8 d128", LLAMA, Shape(1, 2048, 2048)),
        ("64/8 d128", LLAMA, Shape(1, 8192, 8192)),
        ("64/8 d128", LLAMA, Shape(1, 16384, 16384)),
        ("64/8 d128", LLAMA, Shape(1, 2048, 8192)),
        ("64/8 d128", LLAMA, Shape(1, 512, 131072)),
        ("64/8 d128", LLAMA, Shape(8, 1024, 1024)),
        ("64/8 d128 16-slot pages", replace(LLAMA, page_size=16), Shape(1, 8192, 8192)),
        ("8/1 d128", SHARD, Shape(1, 256, 131072)),
        ("8/1 d128", SHARD, Shape(1, 512, 8192)),
        ("16/8 d128", QWEN, Shape(4, 1024, 1024)),
        ("32/8 d64", SMALL_HEADS, Shape(1, 8192, 8192)),
        ("64/8 d128 fp8", replace(LLAMA, kv_dtype=FP8), Shape(1, 8192, 8192)),
    )
]
DECODES = [
    (f"{heads} {shape.batch} x {shape.keys}, width {shape.queries}", spec, shape)
    for heads, spec, shape in (
        *(("64/8 d128", LLAMA, Shape(32, width, 8192)) for width in (1, 2, 4, 8, 16)),
        ("64/8 d128", LLAMA, Shape(1, 1, 131072)),
        ("64/8 d128", LLAMA, Shape(8, 1, 2048)),
        ("64/8 d128", LLAMA, Shape(128, 1, 2048)),
        ("64/8 d128 16-slot pages", replace(LLAMA, page_size=16), Shape(32, 1, 8192)),
        ("64/8 d128 fp8", replace(LLAMA, kv_dtype=FP8), Shape(32, 1, 8192)),
        ("8/1 d128", SHARD, Shape(1, 8, 131072)),
        ("16/8 d128", QWEN, Shape(256, 1, 1024)),
    )
]

FLEX_ALWAYS = {"64/8 d128 8192@8192 x1", "64/8 d128 32 x 8192, width 1"}  # others when asked for: it compiles for long


def prefill(choice: Choice) -> list[Row]:
    """Time prefill; the rate is TFLOP/s of the causal half."""
    rows = []
    for name, spec, shape in PREFILLS:
        if choice.wants(name):
            ours = time_us([prefill_call(spec, shape)])
            pairs = shape.queries * shape.keys - shape.queries * (shape.queries - 1) / 2
            rate = 4 * shape.batch * pairs * spec.num_heads * spec.head_dim / ours / 1e6
            rows.append(_row(name, ours, (rate, "TFLOP/s"), spec, shape, choice))
    return rows


def decode(choice: Choice) -> list[Row]:
    """Time decode; the rate is GB/s of keys and values."""
    rows = []
    for name, spec, shape in DECODES:
        if choice.wants(name):
            ours = time_us([decode_call(spec, shape)])
            per_key = 2 * spec.num_kv_heads * spec.head_dim * spec.kv_dtype.itemsize
            rate = shape.batch * shape.keys * per_key / ours / 1e3
            rows.append(_row(name, ours, (rate, "GB/s"), spec, shape, choice))
    return rows


def _row(name: str, ours: float, rate: tuple[float, str], spec: AttentionSpec, shape: Shape, choice: Choice) -> Row:
    found, missing = (
        peers.times(spec, shape, flex=choice.flex or name in FLEX_ALWAYS) if spec.kv_dtype != FP8 else ({}, "")
    )
    torch.cuda.empty_cache()
    return Row(name, ours, rate[0], rate[1], found, f"no {missing}" if missing else "")


def prefill_call(spec: AttentionSpec, shape: Shape, tile: Tile | None = None) -> Callable[[], object]:
    """Return a planned prefill on random data, ready to run."""
    spec, pages, table = _pool(spec, shape)
    attention = PagedAttention(spec, "cuda", tile=tile)
    attention.plan(np.full(shape.batch, shape.queries), np.full(shape.batch, shape.keys), table)
    q = torch.randn((shape.batch * shape.queries, spec.num_heads, spec.head_dim), device="cuda").to(spec.dtype)
    out, scales = torch.empty_like(q), _scales(spec)
    return lambda: attention.run(q, *pages, out=out, scales=scales)


def decode_call(spec: AttentionSpec, shape: Shape, tile: Tile | None = None) -> Callable[[], object]:
    """Return a planned decode step on random data, ready to run."""
    spec, pages, table = _pool(spec, shape)
    attention = PagedAttention(spec, "cuda", StepSize(shape.batch, shape.queries, shape.keys), tile=tile)
    attention.plan(np.full(shape.batch, shape.queries), np.full(shape.batch, shape.keys), table)
    q = torch.randn((shape.batch * shape.queries, spec.num_heads, spec.head_dim), device="cuda").to(spec.dtype)
    out, scales = torch.empty_like(q), _scales(spec)
    return lambda: attention.run(q, *pages, out=out, scales=scales)


def _pool(
    spec: AttentionSpec, shape: Shape
) -> tuple[AttentionSpec, tuple[torch.Tensor, torch.Tensor], np.ndarray[tuple[int, int], np.dtype[np.int32]]]:
    """Fill a pool with random keys and values on scattered pages."""
    columns = -(-shape.keys // spec.page_size)
    spec = replace(spec, num_pages=shape.batch * columns)
    sizes = (spec.num_pages, LAYERS, 2, spec.num_kv_heads, spec.page_size, spec.head_dim)
    kv = torch.empty(sizes, dtype=torch.bfloat16, device="cuda").normal_().to(spec.kv_dtype)
    order = np.random.default_rng(0).permutation(spec.num_pages).astype(np.int32)
    return spec, layer_views(kv, 1), order.reshape(shape.batch, columns)


def _scales(spec: AttentionSpec) -> Scales | None:
    if spec.kv_dtype != FP8:
        return None
    ones = torch.ones(spec.num_kv_heads, device="cuda")
    return Scales(ones, ones.clone())
