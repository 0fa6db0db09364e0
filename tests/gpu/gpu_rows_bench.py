"""Time the kernels bound by memory, and the chip's ceilings. A rate counts each byte read or written once."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from gpu_device import Device
from gpu_problem import layer_views
from gpu_report import Case, Row, timed
from torch import Tensor

from pdserve.kernels import pageio

TOKENS, DRY_TOKENS = 16384, 3
HEADS, KV_HEADS, DIM = 32, 8, 128
PAGE_SIZE, NUM_PAGES, LAYERS = 64, 1024, 32
COPY_BYTES = 4 << 30
MATRIX = 8192

_Case = tuple[str, Callable[[], object], int]  # name, call, bytes it must move


def ceilings(device: Device) -> Iterator[Case]:
    """Measure a large copy and a large matrix product on random data, against which every other figure is read."""
    yield "copy", lambda: [_copy(device)]
    yield "matrix product", lambda: [_product(device)]


def _copy(device: Device) -> Row:
    gigabytes = 2e-9 * device.sized(COPY_BYTES, 1 << 20)
    return timed("device copy, read + write", copy_time_us(device), gigabytes, "GB/s", device.clocks())


def _product(device: Device) -> Row:
    size = device.sized(MATRIX, 64)
    a, b = (torch.randn((size, size), device=device.torch).bfloat16() for _ in range(2))
    time_us = device.time_us([partial(torch.matmul, a, b)])
    return timed(f"bf16 matrix product {size}", time_us, 2e-12 * size**3, "TFLOP/s", device.clocks())


def copy_time_us(device: Device) -> float:
    """Time a copy of COPY_BYTES random bytes within the device's memory."""
    source = torch.empty(device.sized(COPY_BYTES, 1 << 20), dtype=torch.uint8, device=device.torch).random_(0, 255)
    target = torch.empty_like(source)
    time_us = device.time_us([partial(target.copy_, source)])
    del source, target
    device.empty()
    return time_us


def cases(device: Device) -> Iterator[Case]:
    """Time each case at a size several times the L2 cache."""
    for name, call, moved in (*_row_cases(device), *_page_cases(device)):
        yield name, partial(_timed, device, name, call, 1e-9 * moved)


def _timed(device: Device, name: str, call: Callable[[], object], gigabytes: float) -> list[Row]:
    return [timed(name, device.time_us([call]), gigabytes, "GB/s")]


def _random(device: Device, *shape: int) -> Tensor:
    return torch.randn(shape, device=device.torch).bfloat16()


def _row_cases(device: Device) -> Iterator[_Case]:
    tokens = device.sized(TOKENS, DRY_TOKENS)
    for width in device.sized((4096, 8192), (64,)):
        x, weight = _random(device, tokens, width), _random(device, width)
        yield f"rms norm {tokens}x{width}", partial(pageio.rms_norm, x, weight, 1e-5), 4 * x.numel()
    width = device.sized(14336, 64)
    x = _random(device, tokens, 2 * width)
    yield f"silu mul {tokens}x{width}", partial(pageio.silu_mul, x), 3 * x.numel()


def _page_cases(device: Device) -> Iterator[_Case]:
    tokens, num_pages, layers = device.sized((TOKENS, NUM_PAGES, LAYERS), (DRY_TOKENS, 2, 2))
    shape = (num_pages, layers, 2, KV_HEADS, PAGE_SIZE, DIM)
    pool = torch.empty(shape, dtype=torch.bfloat16, device=device.torch).normal_()
    qkv = _random(device, tokens, HEADS + 2 * KV_HEADS, DIM)
    q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    cos_sin = torch.rand((tokens, DIM), device=device.torch)
    rotation = pageio.Rotation(cos_sin, q_norm=_random(device, DIM), k_norm=_random(device, DIM))
    positions = torch.arange(tokens, dtype=torch.int32, device=device.torch)
    slots = torch.randperm(num_pages * PAGE_SIZE, device=device.torch)[:tokens]
    target, out = pageio.Target(*layer_views(pool, 1), slots), _random(device, tokens, HEADS, DIM)
    write = partial(pageio.rope_write, (q, k, v), positions, rotation, target, out=out)
    yield f"norm, rope and write {tokens} tokens", write, 4 * qkv.numel()
    ids = torch.randperm(num_pages, device=device.torch).to(torch.int32)
    yield f"digest {num_pages} pages", partial(pageio.page_digests, pool, ids), pool.numel() * 2
