"""Attention of prompts by FlashInfer, which an operator may ask for where it is measured to be faster.

It reads the same pages as the kernels, and is used only if its results agree with theirs on the device at hand.
"""

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pdserve.kernels.attention import AttentionSpec, PagedAttention
from pdserve.kernels.attention_plan import Ints, pages_in_use

WORKSPACE_BYTES = 128 << 20  # as much as its documentation recommends
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3}  # of results near 1; both round differently
_CHECKED_QUERIES, _CHECKED_CONTEXTS = (5, 1, 70), (0, 130, 300)


class FlashInferPrompts:
    """Does what a `PagedAttention` without a size does: plan once per step, run once per layer."""

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper  # type: ignore[import-not-found] # noqa: PLC0415

        self._spec = spec
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrapper: Any = BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")

    def plan(self, query_lens: Ints, kv_lens: Ints, page_table: Ints) -> None:
        """See `PagedAttention.plan`."""
        spec = self._spec
        num_pages = -(-kv_lens // spec.page_size)
        last_slots = kv_lens - (num_pages - 1) * spec.page_size
        pages = pages_in_use(page_table, kv_lens, spec.page_size)
        arrays = (_offsets(query_lens), _offsets(num_pages), pages, last_slots)
        self._wrapper.plan(
            *[torch.from_numpy(np.ascontiguousarray(array, dtype=np.int32)) for array in arrays],
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            spec.page_size,
            causal=True,
            sm_scale=spec.scale,
            window_left=-1 if spec.window is None else spec.window - 1,
            q_data_type=spec.dtype,
            kv_data_type=spec.dtype,
        )

    def run(self, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor, sinks: Tensor | None = None) -> None:
        """See `PagedAttention.run`."""
        assert sinks is None, "why_not refuses layers with sinks"
        self._wrapper.run(q.contiguous(), (k, v), out=out)


def why_not(specs: Sequence[AttentionSpec], device: torch.device) -> str:
    """Return why FlashInfer cannot be used for the attentions of a model's layers on a device; empty: it can.

    Computes a few prompts with it and with the kernels.
    """
    spec = specs[0]
    if len(specs) > 1 or spec.soft_cap is not None or spec.has_sinks or spec.value_dim is not None:
        return "it is used where all layers are alike, without a soft cap of scores, sinks or latent rows"
    if find_spec("flashinfer") is None:
        return "it is not installed: pip install flashinfer-python"
    if spec.dtype not in TOLERANCE:
        return f"it is used for bfloat16 and float16, not {spec.dtype}"
    try:
        difference = _difference(spec, device)
    except Exception as error:  # noqa: BLE001 - whatever a library that compiles as it goes may raise
        return f"it fails on this device: {type(error).__name__}: {error}"
    if not difference <= TOLERANCE[spec.dtype]:  # NaN, too
        return f"its results differ from the kernels' by {difference:.3g} on this device"
    return ""


def _difference(spec: AttentionSpec, device: torch.device) -> float:
    """Return the largest difference between results for prompts at odd places of shuffled pages, one layer of two."""
    query_lens = np.array(_CHECKED_QUERIES)
    kv_lens = query_lens + np.array(_CHECKED_CONTEXTS)
    columns = -(-int(kv_lens.max()) // spec.page_size)
    generator = torch.Generator().manual_seed(0)
    table = torch.randperm(len(query_lens) * columns, generator=generator).view(-1, columns).numpy()
    shape = (table.size, 2, 2, spec.num_kv_heads, spec.page_size, spec.head_dim)
    kv = torch.randn(shape, generator=generator).to(device, spec.dtype)
    q = torch.randn((int(query_lens.sum()), spec.num_heads, spec.head_dim), generator=generator).to(device, spec.dtype)
    results = []
    spec = replace(spec, num_pages=table.size)
    for attention in (FlashInferPrompts(spec, device), PagedAttention(spec, device)):
        attention.plan(query_lens, kv_lens, table)
        out = torch.empty_like(q)
        attention.run(q, kv[:, 1, 0], kv[:, 1, 1], out=out)
        results.append(out.float())
    return float((results[0] - results[1]).abs().max())


def _offsets(lengths: Ints) -> npt.NDArray[np.int64]:
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths)))
