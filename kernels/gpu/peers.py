"""Other attention on the same data sizes: torch's cuDNN and flash SDPA, FlexAttention, FlashInfer where installed.

They read contiguous K and V; ours reads pages. A peer that cannot do a shape is left out, with the reason.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from pdserve.kernels.attention import AttentionSpec
from pdserve.kernels.gpu.timing import time_us


@dataclass(frozen=True, slots=True)
class Shape:
    """A batch of equal sequences."""

    batch: int
    queries: int
    keys: int


def times(spec: AttentionSpec, shape: Shape, *, flex: bool) -> tuple[dict[str, float], str]:
    """Time every peer that serves the shape: microseconds by name, and why others are missing."""
    dim = spec.head_dim
    q = torch.randn((shape.batch, spec.num_heads, shape.queries, dim), device="cuda").to(spec.dtype)
    k, v = (torch.randn((shape.batch, spec.num_kv_heads, shape.keys, dim), device="cuda").to(spec.dtype) for _ in "kv")
    contenders: dict[str, Callable[[], object]] = {
        "cudnn": partial(_sdpa, SDPBackend.CUDNN_ATTENTION, q, k, v),
        "flash": partial(_sdpa, SDPBackend.FLASH_ATTENTION, q, k, v),
    }
    if flex:
        contenders["flex"] = partial(_flex(), q, k, v, shape.keys - shape.queries)
    if shape.batch == 1 and importlib.util.find_spec("flashinfer") is not None:
        contenders["flashinfer"] = partial(_flashinfer, q, k, v)
    found, missing = {}, []
    for name, call in contenders.items():
        try:
            found[name] = time_us([call])
        except Exception as error:  # noqa: BLE001 - whatever keeps a peer from running, the rest goes on
            torch.cuda.synchronize()
            missing.append(f"{name}: {type(error).__name__}")
    return found, ", ".join(missing)


def _sdpa(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    queries, keys = q.shape[2], k.shape[2]
    mask: Any = causal_lower_right(queries, keys) if 1 < queries < keys else None
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(q, k, v, mask, is_causal=queries == keys, enable_gqa=True)


def _flex() -> Callable[..., object]:
    from torch.nn.attention import flex_attention as module  # noqa: PLC0415 - slow to import, rarely asked for

    compiled = torch.compile(module.flex_attention, dynamic=False)

    def call(q: Tensor, k: Tensor, v: Tensor, before: int) -> object:
        def causal(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return query + before >= key

        mask = module.create_block_mask(causal, None, None, q.shape[2], k.shape[2], device="cuda")
        return compiled(q, k, v, block_mask=mask, enable_gqa=True)

    return call


def _flashinfer(q: Tensor, k: Tensor, v: Tensor) -> object:
    module = importlib.import_module("flashinfer")
    rows = (x[0].transpose(0, 1).contiguous() for x in (q, k, v))
    return module.single_prefill_with_kv_cache(*rows, causal=True)
