"""Time the kernels bound by memory, and the chip's ceilings. A rate counts each byte read or written once."""

from collections.abc import Callable, Iterator

import reference_kernels as reference
import torch
from gpu_problem import layer_views
from gpu_report import Row, time_us
from torch import Tensor

from pdserve.kernels import pageio, rng, sample

TOKENS = 16384
HEADS, KV_HEADS, DIM = 32, 8, 128
PAGE_SIZE, NUM_PAGES, LAYERS = 64, 1024, 32
VOCAB = 128256
COPY_BYTES = 4 << 30
MATRIX = 8192

Case = tuple[str, Callable[[], object], int]  # name, call, bytes it must move


def ceilings(only: str) -> list[Row]:
    """Measure a large copy and a large matrix product on random data, against which every other figure is read."""
    del only
    copy_us = copy_time_us()
    a, b = (torch.randn((MATRIX, MATRIX), device="cuda").bfloat16() for _ in range(2))
    product_us = time_us([_bind(torch.matmul, a, b)])
    torch.cuda.empty_cache()
    return [
        Row("device copy, read + write", copy_us, 2 * COPY_BYTES / copy_us / 1e3, "GB/s"),
        Row(f"bf16 matrix product {MATRIX}", product_us, 2 * MATRIX**3 / product_us / 1e6, "TFLOP/s"),
    ]


def copy_time_us() -> float:
    """Time a copy of COPY_BYTES random bytes within the device's memory."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda").random_(0, 255)
    target = torch.empty_like(source)
    return time_us([_bind(target.copy_, source)])


def run(only: str) -> list[Row]:
    """Time each case at a size several times the L2 cache."""
    found = []
    for name, call, moved in [*_row_cases(), *_page_cases(), *_sampling_cases()]:
        if only in name:
            time = time_us([call])
            found.append(Row(name, time, moved / time / 1e3, "GB/s"))
    torch.cuda.empty_cache()
    return found


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


def _row_cases() -> Iterator[Case]:
    for width in (4096, 8192):
        x, weight = _random(TOKENS, width), _random(width)
        yield f"rms norm {TOKENS}x{width}", _bind(pageio.rms_norm, x, weight, 1e-5), 4 * x.numel()
    x = _random(TOKENS, 2 * 14336)
    yield f"silu mul {TOKENS}x14336", _bind(pageio.silu_mul, x), 3 * x.numel()


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
    yield "digest 1024 pages", _bind(pageio.page_digests, pool, ids), NUM_PAGES * page_bytes


def _sampling_cases() -> Iterator[Case]:
    for num_rows in (8, 64, 256):
        logits = torch.randn((num_rows, VOCAB), device="cuda") * 3
        keys = reference.as_tensor(rng.keys(list(range(num_rows)), [0] * num_rows), "cuda")
        ones = torch.ones(num_rows, device="cuda")
        for name, top_k, top_p in (("free", 0, 1.0), ("top-p 0.95", 0, 0.95), ("top-k 20, top-p 0.95", 20, 0.95)):
            limits = torch.full((num_rows,), top_k, dtype=torch.int32, device="cuda")
            params = sample.Params(keys, ones, limits, ones * top_p, ones * 0)
            yield f"sample {num_rows} rows, {name}", _bind(sample.sample, logits, params), logits.numel() * 4


def _bind(function: Callable[..., object], *args: object, **kwargs: object) -> Callable[[], object]:
    return lambda: function(*args, **kwargs)
