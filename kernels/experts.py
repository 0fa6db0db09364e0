"""A mixture of experts on a GPU: slots in the order of their experts, then a product over all of them at once.

A slot is a pair of a row and an expert that it has chosen. Nothing waits for the device, and grids depend on shapes
alone, so that steps can be captured: blocks of slots are as many as there can be, and those past the last one return.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from pdserve.kernels import products
from pdserve.kernels.checks import require, require_tensor
from pdserve.kernels.code_blocks import CodeBlocks
from pdserve.kernels.device import experts as device_experts

DTYPES = products.DTYPES
FEW_SLOTS, MANY_SLOTS = 16, 64  # of a block: few where most experts have no more
BLOCK_WIDTH, BLOCK_INPUTS = 64, 64
SUM_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class Grouped:
    """A step's choices: shares and slots of rows, in the order of the experts; rows of slots; blocks of slots."""

    num_experts: int
    shares: Tensor  # float32 [num_rows, num_chosen]
    places: Tensor  # int64 [num_rows, num_chosen]: slots
    rows: Tensor  # int64 [num_slots]
    experts: Tensor  # int64 [num_blocks]; num_experts: a block past the last one
    begins: Tensor  # int64 [num_blocks], and ends: slots
    ends: Tensor
    block_slots: int

    @classmethod
    def of(cls, shares: Tensor, chosen: Tensor, num_experts: int) -> Self:
        """Put choices in order. shares: float32 [num_rows, num_chosen]; chosen: int64, the experts, each once a row."""
        require_tensor("shares", shares, (None, None), (torch.float32,))
        require_tensor("chosen", chosen, tuple(shares.shape), (torch.int64,))
        num_slots, device = chosen.numel(), chosen.device
        block = FEW_SLOTS if num_slots <= FEW_SLOTS * num_experts else MANY_SLOTS
        chosen, order = chosen.sort(-1)
        shares = shares.gather(1, order)
        pairs = chosen.flatten().argsort(stable=True)
        counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=device)
        counts.scatter_add_(0, chosen.flatten(), torch.ones_like(pairs))
        blocks = (counts + block - 1) // block
        ends, block_ends = counts.cumsum(0), blocks.cumsum(0)
        most = min(num_slots, -(-num_slots // block) + num_experts)
        index = torch.arange(most, device=device)
        experts = torch.searchsorted(block_ends[:num_experts].contiguous(), index, right=True)
        begins = (ends - counts)[experts] + (index - (block_ends - blocks)[experts]) * block
        places = torch.empty_like(pairs).scatter_(0, pairs, torch.arange(num_slots, device=device))
        rows = pairs // max(1, chosen.shape[1])
        return cls(num_experts, shares, places.view(chosen.shape), rows, experts, begins, ends[experts], block)


def grouped_product(
    x: Tensor, weights: Tensor | CodeBlocks, bias: Tensor | None, rows: Tensor, of: Grouped, dtype: torch.dtype
) -> Tensor:
    """Multiply each slot with its expert's matrix: [num_slots, width], of `dtype`.

    x: [num_rows, inputs]; weights: [num_experts, width, inputs], or one coded matrix [num_experts * width, inputs];
    bias: [num_experts, width]; rows: int64 [num_slots]: of x, one for each slot.
    """
    require_tensor("x", x, (None, None), DTYPES)
    inputs = x.shape[1]
    if isinstance(weights, CodeBlocks):
        fits = weights.inputs == inputs and weights.outputs % of.num_experts == 0
        require(fits, f"weights: {weights.outputs} outputs, {weights.inputs} inputs do not fit {inputs} inputs")
        width = weights.outputs // of.num_experts
    else:
        require_tensor("weights", weights, (of.num_experts, None, inputs), (x.dtype,))
        require(weights.is_contiguous(), "weights: must be contiguous")
        width = weights.shape[1]
    if bias is not None:
        require_tensor("bias", bias, (of.num_experts, width), (x.dtype,))
    out = torch.empty((len(rows), width), dtype=dtype, device=x.device)
    if len(rows) > 0:
        tile, given, constants = _given(x, weights, of.block_slots)
        device_experts.grouped_product[len(of.experts), -(-width // tile.width)](
            x, *given, x if bias is None else bias, out, rows, of.experts, of.begins, of.ends, of.num_experts,
            x.stride(0), out.stride(0), WIDTH=width, HAS_BIAS=bias is not None, BLOCK_SLOTS=of.block_slots,
            BLOCK_WIDTH=tile.width, num_warps=tile.num_warps, num_stages=tile.num_stages, **constants,
        )  # fmt: skip
    return out


Given = tuple[products.Tile, tuple[Tensor, Tensor, Tensor], dict[str, object]]


def _given(x: Tensor, weights: Tensor | CodeBlocks, slots: int) -> Given:
    """Return how a kernel is launched, its weights, scales and minimums, and what it is compiled for."""
    is_exact = x.dtype == torch.float32
    if isinstance(weights, CodeBlocks):
        minimums, tile = weights.minimums, products.tile_of(slots, weights, is_exact=is_exact)
        parts = weights.codes, weights.scales, weights.scales if minimums is None else minimums
        return tile, parts, products.constants(products.Rows(x, x), weights)
    return products.Tile(slots, BLOCK_WIDTH, 4, 2 if is_exact else 4), (weights, weights, weights), {
        "INPUTS": x.shape[1], "KIND": "", "ZERO": 0, "UNIT": 1.0, "GROUP": 0, "X_GROUP": 0, "HAS_MINIMUMS": False,
        "PRECISION": products.precision_of(x), "BLOCK_INPUTS": BLOCK_INPUTS,
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Added:
    """What joins the sum of a row's experts: what the shared one has made, times the sigmoid of a gate; a residual."""

    shared: Tensor | None = None  # [num_rows, width]
    gates: Tensor | None = None  # float32 [num_rows]
    residual: Tensor | None = None  # [num_rows, width]; is overwritten by the result


def summed(made: Tensor, of: Grouped, added: Added, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Return residual + scale * (the row's slots by shares, and the shared expert): [num_rows, width].

    made: float32 [num_slots, width].
    """
    require_tensor("made", made, (of.places.numel(), None), (torch.float32,))
    (num_rows, num_chosen), width = of.places.shape, made.shape[1]
    for name, each in (("shared", added.shared), ("residual", added.residual)):
        if each is not None:
            require_tensor(name, each, (num_rows, width), (dtype,))
            require(each.is_contiguous(), f"{name}: must be contiguous")
    residual = added.residual
    out = torch.empty((num_rows, width), dtype=dtype, device=made.device) if residual is None else residual
    shared, gates, onto = (made if each is None else each for each in (added.shared, added.gates, residual))
    if num_rows > 0:
        device_experts.sum_slots[num_rows, -(-width // SUM_BLOCK)](
            made, of.shares, of.places, shared, gates, onto, out, scale,
            NUM_CHOSEN=num_chosen, WIDTH=width, HAS_SHARED=added.shared is not None, HAS_GATES=added.gates is not None,
            HAS_RESIDUAL=residual is not None, BLOCK=SUM_BLOCK, num_warps=4,
        )  # fmt: skip
    return out
