"""Time the kernels bound by memory: page I/O, rows, sampling. A rate counts each byte read or written once."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from pdserve.kernels import elementwise, pageio, rng, sample
from pdserve.kernels.gpu.rows import Choice, Row
from pdserve.kernels.gpu.timing import time_us
from pdserve.kernels.reference import layer_views

TOKENS = 16384
HEADS, KV_HEADS, DIM = 32, 8, 128
PAGE_SIZE, NUM_PAGES, LAYERS = 64, 1024, 32
VOCAB = 128256

Case = tuple[str, Callable[[], object], int]  # name, call, bytes it must move


def run(choice: Choice) -> list[Row]:
    """Time each case at a size several times the L2 cache."""
    rows = []
    for name, call, moved in [*_row_cases(), *_page_cases(), *_sampling_cases()]:
        if choice.wants(name):
            time = time_us([call])
            rows.append(Row(name, time, moved / time / 1e3, "GB/s"))
    torch.cuda.empty_cache()
    return rows


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


def _row_cases() -> Iterator[Case]:
    for width in (4096, 8192):
        x, residual, weight = _random(TOKENS, width), _random(TOKENS, width), _random(width)
        out = torch.empty_like(x)
        yield f"rms norm {TOKENS}x{width}", _bind(elementwise.rms_norm, x, weight, 1e-5, out=out), 4 * x.numel()
        fused = _bind(elementwise.rms_norm, x, weight, 1e-5, residual=residual, out=out)
        yield f"rms norm {TOKENS}x{width} with residual", fused, 8 * x.numel()
    x = _random(TOKENS, 2 * 14336)
    out = torch.empty((TOKENS, 14336), dtype=x.dtype, device="cuda")
    yield f"silu mul {TOKENS}x14336", _bind(elementwise.silu_mul, x, out=out), 6 * out.numel()


def _page_cases() -> Iterator[Case]:
    pool = torch.empty((NUM_PAGES, LAYERS, 2, KV_HEADS, PAGE_SIZE, DIM), dtype=torch.bfloat16, device="cuda").normal_()
    qkv = _random(TOKENS, HEADS + 2 * KV_HEADS, DIM)
    q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    rotation = pageio.Rotation(torch.rand((TOKENS, DIM), device="cuda"), q_norm=_random(DIM), k_norm=_random(DIM))
    positions = torch.arange(TOKENS, dtype=torch.int32, device="cuda")
    slots = torch.randperm(NUM_PAGES * PAGE_SIZE, device="cuda")[:TOKENS]
    target, out = (
        pageio.Target(*layer_views(pool, 3), slots),
        torch.empty((TOKENS, HEADS, DIM), device="cuda").bfloat16(),
    )
    write = _bind(pageio.rope_write, (q, k, v), positions, rotation, target, out=out)
    yield f"norm, rope and write {TOKENS} tokens", write, 4 * qkv.numel()
    page_bytes = pool[0].numel() * 2
    ids = torch.randperm(NUM_PAGES, device="cuda").to(torch.int32)
    half = NUM_PAGES // 2
    yield "copy 512 pages", _bind(pageio.copy_pages, pool, pool, ids[:half], ids[half:]), 2 * half * page_bytes
    yield "digest 1024 pages", _bind(pageio.page_digests, pool, ids), NUM_PAGES * page_bytes
    small = torch.empty((2 * half, LAYERS, 2, KV_HEADS // 2, PAGE_SIZE // 2, DIM), dtype=pool.dtype, device="cuda")
    small_ids = torch.randperm(2 * half, device="cuda").to(torch.int32)
    heads = pageio.HeadRange(KV_HEADS // 2, 0, KV_HEADS // 2)
    cut = _bind(pageio.reshard, (small, pool), small_ids, ids[:half], half * PAGE_SIZE, heads)
    yield "re-cut 512 pages, half the heads", cut, half * page_bytes


def _sampling_cases() -> Iterator[Case]:
    for rows in (8, 64, 256):
        logits = torch.randn((rows, VOCAB), device="cuda") * 3
        keys = rng.as_tensor(rng.keys(list(range(rows)), [0] * rows), "cuda")
        ones = torch.ones(rows, device="cuda")
        for name, top_k, top_p in (("free", 0, 1.0), ("top-p 0.95", 0, 0.95), ("top-k 20, top-p 0.95", 20, 0.95)):
            limits = torch.full((rows,), top_k, dtype=torch.int32, device="cuda")
            draw = sample.Draw(keys, ones, limits, ones * top_p, ones * 0)
            yield f"sample {rows} rows, {name}", _bind(sample.sample, logits, draw), logits.numel() * 4


def _bind(function: Callable[..., object], *args: object, **kwargs: object) -> Callable[[], object]:
    return lambda: function(*args, **kwargs)
