"""What this chip can do at best: a large copy, and a large matrix product on random data."""

from functools import partial

import torch

from pdserve.kernels.gpu.rows import Choice, Row
from pdserve.kernels.gpu.timing import time_us

COPY_BYTES = 4 << 30
MATRIX = 8192


def run(choice: Choice) -> list[Row]:
    """Measure both ceilings; always run, since every other figure is read against them."""
    del choice
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda").random_(0, 255)
    target = torch.empty_like(source)
    copy_us = time_us([partial(target.copy_, source)])
    del source, target
    a, b = (torch.randn((MATRIX, MATRIX), device="cuda").bfloat16() for _ in range(2))
    product_us = time_us([partial(torch.matmul, a, b)])
    torch.cuda.empty_cache()
    return [
        Row("device copy, read + write", copy_us, 2 * COPY_BYTES / copy_us / 1e3, "GB/s"),
        Row(f"bf16 matrix product {MATRIX}", product_us, 2 * MATRIX**3 / product_us / 1e6, "TFLOP/s"),
    ]
