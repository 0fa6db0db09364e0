"""Every kernel with the arguments it ships with, on torch's meta device: what compile reports and tests go through."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from pdserve.kernels import pageio, rows, sample
from pdserve.kernels.attention import FP8, AttentionSpec, PagedAttention, Scales, StepSize
from pdserve.kernels.tuning import Device

CHIPS = {
    80: Device((8, 0), 108, 166_912),  # A100
    90: Device((9, 0), 132, 232_448),  # H200
    100: Device((10, 0), 148, 232_448),  # B200
}
META = torch.device("meta")
LLAMA = AttentionSpec(64, 8, 128, 64, 4096, 128**-0.5)  # Llama 3.1 70B's attention
ROWS = 64


@dataclass(frozen=True, slots=True)
class Case:
    """One shipping use of the kernels."""

    name: str
    run: Callable[[Device], object]
    hot: bool = False  # a step's time goes here: no spills allowed
    min_capability: int = 80


def cases() -> list[Case]:
    """List every kernel in its shipping forms."""
    return [*attention_cases(), *page_cases(), *row_cases()]


def attention_cases() -> list[Case]:
    """List prefill and decode over head dims, page sizes, page dtypes and verify widths."""
    fp8 = replace(LLAMA, kv_dtype=FP8)
    found = []
    for dim in (64, 80, 96, 128, 256):
        spec = replace(LLAMA, head_dim=dim)
        found.append(Case(f"prefill d{dim}", prefill_of(spec), hot=True))
        found.append(Case(f"decode d{dim}", decode_of(spec, 1), hot=True))
    found += [Case(f"decode d128 width {width}", decode_of(LLAMA, width), hot=True) for width in (4, 8, 16)]
    variants = {
        "d128 two heads a group": replace(LLAMA, num_heads=16),  # Qwen3 0.6B
        "d64 three heads a group": replace(LLAMA, num_heads=9, num_kv_heads=3, head_dim=64),  # SmolLM2 135M
        "d128 16-slot pages": replace(LLAMA, page_size=16),
        "d128 window": replace(LLAMA, window=4096),
        "d128 window, soft cap": replace(LLAMA, window=4096, softcap=50.0),
        "d128 window, soft cap, 16-slot pages": replace(LLAMA, page_size=16, window=4096, softcap=50.0),
    }
    for name, spec in variants.items():
        found.append(Case(f"prefill {name}", prefill_of(spec), hot=True))
        found.append(Case(f"decode {name}", decode_of(spec, 1), hot=True))
    return [
        *found,
        Case("prefill d128 fp8", prefill_of(fp8), hot=True, min_capability=90),
        Case("decode d128 fp8", decode_of(fp8, 1), hot=True, min_capability=90),
        Case("prefill d128 float32", prefill_of(replace(LLAMA, dtype=torch.float32, kv_dtype=torch.float32))),
    ]


def page_cases() -> list[Case]:
    """List the kernels that write and move pages."""
    return [
        Case("rope and write", lambda chip: _rope_write(torch.bfloat16, normed=False), hot=True),
        Case("norm, rope and write", lambda chip: _rope_write(torch.bfloat16, normed=True), hot=True),
        Case("norm, rope and write fp8", lambda chip: _rope_write(FP8, normed=True), min_capability=90),
        Case("digest pages", lambda chip: _digest(), hot=True),
    ]


def row_cases() -> list[Case]:
    """List the row-wise kernels and sampling."""
    return [
        Case("rms norm 4096", lambda chip: _norm(4096), hot=True),
        Case("rms norm 8192", lambda chip: _norm(8192), hot=True),
        Case("silu mul", lambda chip: rows.silu_mul(_empty(ROWS, 28672)), hot=True),
        Case("sample", lambda chip: _sample(full=False), hot=True),
        Case("sample with penalties and bias", lambda chip: _sample(full=True), hot=True),
    ]


def prefill_of(spec: AttentionSpec) -> Callable[[Device], object]:
    """Return a 256-token chunk far into a sequence: few enough queries to split keys, so `combine` runs too."""

    def run(chip: Device) -> object:
        attention = PagedAttention(spec, META, chip=chip)
        pages = 65536 // spec.page_size
        attention.plan(np.array([256]), np.array([65536]), np.zeros((1, pages), dtype=np.int32))
        return attention.run(_queries(spec, 256), *_pool(spec), scales=_scales(spec))

    return run


def decode_of(spec: AttentionSpec, width: int) -> Callable[[Device], object]:
    """Return a decode step with `width` queries per sequence."""

    def run(chip: Device) -> object:
        attention = PagedAttention(spec, META, StepSize(32, width, 8192), chip=chip)
        return attention.run(_queries(spec, 32 * width), *_pool(spec), scales=_scales(spec))

    return run


def _queries(spec: AttentionSpec, num_tokens: int) -> Tensor:
    return _empty(num_tokens, spec.num_heads, spec.head_dim, dtype=spec.dtype)


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def _ids(count: int) -> Tensor:
    return _empty(count, dtype=torch.int32)


def _angles() -> Tensor:
    return _empty(4096, 128, dtype=torch.float32)


def _pool(spec: AttentionSpec, layers: int = 32) -> tuple[Tensor, Tensor]:
    shape = (spec.num_pages, layers, 2, spec.num_kv_heads, spec.page_size, spec.head_dim)
    kv = _empty(*shape, dtype=spec.kv_dtype)
    return kv[:, 0, 0], kv[:, 0, 1]


def _scales(spec: AttentionSpec) -> Scales | None:
    if spec.kv_dtype != FP8:
        return None
    heads = spec.num_kv_heads
    return Scales(_empty(heads, dtype=torch.float32), _empty(heads, dtype=torch.float32))


def _rope_write(kv_dtype: torch.dtype, *, normed: bool) -> Tensor:
    spec = replace(LLAMA, kv_dtype=kv_dtype)
    qkv = _empty(ROWS, 80, 128).split([64, 8, 8], dim=1)
    weight = _empty(128) if normed else None
    rotation = pageio.Rotation(_angles(), q_norm=weight, k_norm=weight)
    target = pageio.Target(*_pool(spec), _ids(ROWS), _scales(spec))
    return pageio.rope_write((qkv[0], qkv[1], qkv[2]), _ids(ROWS), rotation, target)


def _whole_pool(dtype: torch.dtype, heads: int, page_size: int) -> Tensor:
    return _empty(128, 32, 2, heads, page_size, 128, dtype=dtype)


def _digest() -> Tensor:
    return pageio.page_digests(_whole_pool(torch.bfloat16, 8, 64), _ids(ROWS))


def _norm(width: int) -> Tensor:
    return rows.rms_norm(_empty(ROWS, width), _empty(width), 1e-5)


def _sample(*, full: bool) -> Tensor:
    def row() -> Tensor:
        return _empty(ROWS, dtype=torch.float32)

    params = sample.Params(_empty(ROWS, 2, dtype=torch.int32), row(), _ids(ROWS), row(), row())
    ids = sample.Ragged(_ids(4096), _ids(ROWS + 1))
    penalties = sample.Penalties(row(), row(), row(), ids, ids) if full else None
    bias = sample.Bias(_ids(32), _empty(32, dtype=torch.float32), _ids(ROWS + 1)) if full else None
    return sample.sample(_empty(ROWS, 128256, dtype=torch.float32), params, penalties=penalties, bias=bias)
