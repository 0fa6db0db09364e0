"""Paged attention: what prefill and decode share, which is everything but where their plans live.

q: [num_tokens, num_heads, head_dim]; k, v: [num_pages, num_kv_heads, page_size, head_dim], one layer's strided views
of the page-major pool, with the same strides. Plan once per step, run once per layer.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from pdserve.kernels import tuning
from pdserve.kernels.checks import require, require_tensor
from pdserve.kernels.device import attention as device_attention

FP8 = torch.float8_e4m3fn
QUERY_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PAGE_SIZES = (16, 32, 64, 128)
MAX_HEAD_DIM = 256
MAX_GROUP = 128
LOG2_E = math.log2(math.e)
MERGE_SPLITS = 16  # partial results the merge kernel holds at a time
MERGE_WARPS = 4


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The facts of one layer's attention that do not change between steps."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    num_pages: int  # in the pool
    scale: float  # of q·k, usually head_dim ** -0.5
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype = torch.bfloat16
    window: int | None = None  # positions a query sees, its own included
    softcap: float | None = None

    def __post_init__(self) -> None:
        """Raise ValueError naming the first field the kernels do not serve."""
        require(self.num_kv_heads >= 1, f"num_kv_heads must be positive, got {self.num_kv_heads}")
        ratio_fits = self.num_heads % self.num_kv_heads == 0 and 1 <= self.group <= MAX_GROUP
        require(ratio_fits, f"num_heads must be 1 to {MAX_GROUP} times num_kv_heads, got {self.num_heads}")
        dim_fits = self.head_dim % 16 == 0 and 16 <= self.head_dim <= MAX_HEAD_DIM
        require(dim_fits, f"head_dim must be a multiple of 16 up to {MAX_HEAD_DIM}, got {self.head_dim}")
        require(self.page_size in PAGE_SIZES, f"page_size must be one of {PAGE_SIZES}, got {self.page_size}")
        require(self.num_pages >= 1, f"num_pages must be positive, got {self.num_pages}")
        require(self.dtype in QUERY_DTYPES, f"dtype must be one of {QUERY_DTYPES}, got {self.dtype}")
        kv_fits = self.kv_dtype == self.dtype or (self.kv_dtype == FP8 and self.dtype != torch.float32)
        require(kv_fits, f"kv_dtype must be {self.dtype} or (with 16-bit queries) {FP8}, got {self.kv_dtype}")
        require(math.isfinite(self.scale) and self.scale > 0, f"scale must be positive, got {self.scale}")
        require(self.window is None or self.window >= 1, f"window must be positive, got {self.window}")
        require(self.softcap is None or self.softcap > 0, f"softcap must be positive, got {self.softcap}")

    @property
    def group(self) -> int:
        """Query heads that share a K/V head."""
        return self.num_heads // self.num_kv_heads

    @property
    def block_d(self) -> int:
        """head_dim rounded up to a power of two."""
        return 1 << (self.head_dim - 1).bit_length()

    @property
    def demand(self) -> tuning.Demand:
        """What decides how the kernels are launched."""
        return tuning.Demand(self.block_d, self.kv_dtype.itemsize, self.page_size, self.softcap is not None)


@dataclass(frozen=True, slots=True)
class Scales:
    """What fp8 K and V were divided by: float32 [num_kv_heads] each."""

    k: Tensor
    v: Tensor


@dataclass(frozen=True, slots=True)
class PlanTensors:
    """A step's plan on the device. items: [n, 8] int32; merges: [m, 4] int32; table: [num_seqs, columns] int32."""

    items: Tensor
    merges: Tensor
    table: Tensor
    partials: Tensor  # float32 [num_partials, num_kv_heads, block_m, head_dim]
    lse: Tensor  # float32 [num_partials, num_kv_heads, block_m]
    num_tokens: int


def check_inputs(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, scales: Scales | None) -> None:
    """Raise ValueError naming the argument whose shape, dtype or strides do not fit `spec`."""
    require_tensor("q", q, (None, spec.num_heads, spec.head_dim), (spec.dtype,))
    pool = (spec.num_pages, spec.num_kv_heads, spec.page_size, spec.head_dim)
    for name, pages in (("k", k), ("v", v)):
        require_tensor(name, pages, pool, (spec.kv_dtype,))
        # 16-byte loads: each row must start on a multiple of 16 elements.
        aligned = all(stride % 16 == 0 for stride in pages.stride()[:-1])
        require(aligned, f"{name} must have strides in multiples of 16 elements, got {pages.stride()}")
        require(pages.device == q.device, f"{name} must be on {q.device}, got {pages.device}")
    require(k.stride() == v.stride(), f"v must have the strides of k, {k.stride()}, got {v.stride()}")
    require((scales is not None) == (spec.kv_dtype == FP8), "scales must be given for fp8 pages, and only for those")
    if scales is not None:
        require_tensor("scales.k", scales.k, (spec.num_kv_heads,), (torch.float32,))
        require_tensor("scales.v", scales.v, (spec.num_kv_heads,), (torch.float32,))


@dataclass(frozen=True, slots=True)
class Program:
    """A spec's kernels with their launch parameters on one kind of device."""

    spec: AttentionSpec
    tile: tuning.Tile
    heads_inner: bool  # neighbours in the grid share keys' pages (True) or a K/V head (False)
    use_tma: bool  # K and V tiles through tensor descriptors
    exact: bool  # multiply in float32

    @classmethod
    def choose(
        cls, spec: AttentionSpec, tile: tuning.Tile, chip: tuning.Device, *, heads_inner: bool, on_gpu: bool
    ) -> "Program":
        """Return the program for a chip; `on_gpu` is False under Triton's interpreter."""
        if spec.kv_dtype == FP8:
            require(chip.capability >= (8, 9), f"kv_dtype {FP8} needs compute capability 8.9, got {chip.capability}")
        use_tma = chip.capability >= (9, 0) and spec.page_size >= tile.block_n and spec.dtype != torch.float32
        return cls(spec, tile, heads_inner, use_tma, exact=spec.dtype == torch.float32 or not on_gpu)

    def launch(
        self, plan: PlanTensors, q: Tensor, pages: tuple[Tensor, Tensor], out: Tensor | None, scales: Scales | None
    ) -> Tensor:
        """Run the planned items and merges; returns `out`, or a fresh tensor like q."""
        spec, tile = self.spec, self.tile
        k, v = pages
        check_inputs(spec, q, k, v, scales)
        require(q.shape[0] >= plan.num_tokens, f"q must hold the {plan.num_tokens} planned tokens, got {q.shape[0]}")
        out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
        require_tensor("out", out, q.shape, (q.dtype,))
        grid = (spec.num_kv_heads, len(plan.items)) if self.heads_inner else (len(plan.items), spec.num_kv_heads)
        device_attention.attend[grid](
            q, self._source(k), self._source(v), out, plan.partials, plan.lse, plan.items, plan.table,
            scales.k if scales else plan.lse, scales.v if scales else plan.lse,
            *q.stride()[:2], *k.stride()[:3], *out.stride()[:2], plan.table.stride(0),
            *self._score_factors(), spec.window or 0, spec.num_kv_heads,
            **self.attend_constants(), num_warps=tile.num_warps, num_stages=tile.num_stages,
            maxnreg=tile.max_registers,
        )  # fmt: skip
        if len(plan.merges) > 0:
            device_attention.merge[len(plan.merges), spec.num_kv_heads, tile.block_m](
                out, plan.partials, plan.lse, plan.merges, *out.stride()[:2], spec.num_kv_heads,
                **self.merge_constants(), num_warps=MERGE_WARPS,
            )  # fmt: skip
        return out

    def attend_constants(self) -> dict[str, int | bool | str]:
        """Return the attention kernel's compile-time arguments."""
        spec, tile = self.spec, self.tile
        return {
            "GROUP": spec.group,
            "HEAD_DIM": spec.head_dim,
            "BLOCK_D": spec.block_d,
            "PAGE_SIZE": spec.page_size,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "HEADS_INNER": self.heads_inner,
            "HAS_WINDOW": spec.window is not None,
            "HAS_SOFTCAP": spec.softcap is not None,
            "IS_FP8": spec.kv_dtype == FP8,
            "PRECISION": "ieee" if self.exact else "native",
            "USE_TMA": self.use_tma,
        }

    def merge_constants(self) -> dict[str, int | bool | str]:
        """Return the merge kernel's compile-time arguments."""
        spec = self.spec
        return {
            "GROUP": spec.group,
            "HEAD_DIM": spec.head_dim,
            "BLOCK_D": spec.block_d,
            "BLOCK_M": self.tile.block_m,
            "BLOCK_S": MERGE_SPLITS,
        }

    def _score_factors(self) -> tuple[float, float]:
        """Return what q·k is multiplied by, and the soft cap, both for exponents of two."""
        if self.spec.softcap is None:
            return self.spec.scale * LOG2_E, 1.0
        return 2 * self.spec.scale / self.spec.softcap * LOG2_E, self.spec.softcap * LOG2_E

    def _source(self, pages: Tensor) -> Tensor | TensorDescriptor:
        """Return what the kernel reads K or V through."""
        if not self.use_tma:
            return pages
        block = [1, 1, self.tile.block_n, self.spec.block_d]
        return TensorDescriptor(pages, list(pages.shape), list(pages.stride()), block)
