"""Time prefill and decode attention, in the shapes the project has goals for, beside other attention.

Peers are torch's cuDNN and flash SDPA, FlexAttention, and FlashInfer where it is installed. They read contiguous K and
V; ours reads pages. A peer that cannot do a shape is left out, with the reason.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from pdserve.kernels.attention import FP8, AttentionSpec, PagedAttention, Scales, StepSize
from pdserve.kernels.gpu.rows import Choice, Row
from pdserve.kernels.gpu.timing import time_us
from pdserve.kernels.reference import layer_views
from pdserve.kernels.tuning import Tile

FLASHINFER_PAGE = 64
FLASHINFER_WORKSPACE_BYTES = 128 << 20
LAYERS = 4  # pages of several layers, as an engine has: strides matter

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Shape:
    """A batch of equal sequences."""

    batch: int
    queries: int
    keys: int


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
        _peer_times(spec, shape, flex=choice.flex or name in FLEX_ALWAYS) if spec.kv_dtype != FP8 else ({}, "")
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


def _peer_times(spec: AttentionSpec, shape: Shape, *, flex: bool) -> tuple[dict[str, float], str]:
    """Time every peer that serves the shape: microseconds by name, and why others are missing."""
    dim = spec.head_dim
    q = torch.randn((shape.batch, spec.num_heads, shape.queries, dim), device="cuda").to(spec.dtype)
    k, v = (torch.randn((shape.batch, spec.num_kv_heads, shape.keys, dim), device="cuda").to(spec.dtype) for _ in "kv")
    builders: dict[str, Callable[[], Call]] = {
        "cudnn": lambda: partial(_sdpa, SDPBackend.CUDNN_ATTENTION, q, k, v),
        "flash": lambda: partial(_sdpa, SDPBackend.FLASH_ATTENTION, q, k, v),
    }
    if flex:
        builders["flex"] = lambda: _flex(q, k, v)
    if importlib.util.find_spec("flashinfer") is not None:
        builders["flashinfer"] = lambda: _flashinfer(q, k, v)
    found, missing = {}, []
    for name, build in builders.items():
        try:
            found[name] = time_us([build()])
        except Exception as error:  # noqa: BLE001 - whatever keeps a peer from running, the rest goes on
            torch.cuda.synchronize()
            missing.append(f"{name}: {type(error).__name__}")
    return found, ", ".join(missing)


def _sdpa(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    queries, keys = q.shape[2], k.shape[2]
    mask: Any = causal_lower_right(queries, keys) if 1 < queries < keys else None
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(q, k, v, mask, is_causal=queries == keys, enable_gqa=True)


def _flex(q: Tensor, k: Tensor, v: Tensor) -> Call:
    from torch.nn.attention import flex_attention as module  # noqa: PLC0415 - slow to import, rarely asked for

    before = k.shape[2] - q.shape[2]

    def causal(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query + before >= key

    mask = module.create_block_mask(causal, None, None, q.shape[2], k.shape[2], device="cuda")
    compiled = torch.compile(module.flex_attention, dynamic=False)
    return partial(compiled, q, k, v, block_mask=mask, enable_gqa=True)


def _flashinfer(q: Tensor, k: Tensor, v: Tensor) -> Call:
    """Return one sequence's prefill, or a batch's decode over pages of FLASHINFER_PAGE slots, planned beforehand."""
    module = importlib.import_module("flashinfer")
    if len(q) == 1:
        rows = [x[0].transpose(0, 1).contiguous() for x in (q, k, v)]
        return partial(module.single_prefill_with_kv_cache, *rows, causal=True)
    if q.shape[2] != 1:
        raise ValueError("only decode is timed in batches")
    batch, num_kv_heads, keys, dim = k.shape
    columns = keys // FLASHINFER_PAGE
    pages = [
        x.transpose(1, 2).reshape(batch * columns, FLASHINFER_PAGE, num_kv_heads, dim).contiguous() for x in (k, v)
    ]
    starts = torch.arange(batch + 1, dtype=torch.int32) * columns
    last = torch.full((batch,), FLASHINFER_PAGE, dtype=torch.int32)
    workspace = torch.empty(FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    wrapper = module.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    wrapper.plan(
        starts.cuda(), torch.arange(batch * columns, dtype=torch.int32).cuda(), last.cuda(),
        q.shape[1], num_kv_heads, dim, FLASHINFER_PAGE, q_data_type=q.dtype, kv_data_type=k.dtype,
    )  # fmt: skip
    return partial(wrapper.run, q[:, :, 0].contiguous(), tuple(pages))
