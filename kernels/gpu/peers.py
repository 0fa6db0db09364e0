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

FLASHINFER_PAGE = 64
FLASHINFER_WORKSPACE_BYTES = 128 << 20

Call = Callable[[], object]


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
