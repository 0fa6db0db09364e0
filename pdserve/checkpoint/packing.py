"""How published formats pack quantized matrices, and what they stand for.

Each reader takes the tensors of one matrix, and returns its integers and what they are multiplied with.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.model.fp8 import MAGNITUDE, Fp8
from pdserve.model.groups import Groups, packed_halves
from pdserve.model.weights import GROUP, SEGMENT

Parts = Mapping[str, Tensor]  # of one matrix, by what comes after its name

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where output i of eight lies in a word, in units of 4 bits, from its low end


@dataclass(frozen=True, slots=True)
class Coded:
    """A matrix of integers; a weight is (code - zero) * scale."""

    bits: int
    codes: Tensor  # uint8 [outputs, inputs]
    zeros: Tensor  # int16 [outputs, groups]
    scales: Tensor  # [outputs, groups]
    of_groups: Tensor | None = None  # int64 [inputs]: the group of each; None: they have the same number, in order

    def values(self) -> Tensor:
        """Return the weights, float32 [outputs, inputs]."""
        zeros, scales = (self._spread(each) for each in (self.zeros, self.scales))
        return (self.codes.float() - zeros.float()) * scales.float()

    def kept(self, *, any_order: bool = False) -> Groups | None:
        """Return the same matrix as products take it; None if its groups or its scales are not theirs.

        any_order: of inputs in groups.
        """
        outputs, inputs = self.codes.shape
        size = inputs // self.scales.shape[1]
        halves = self.scales.half()
        if size % GROUP or inputs % GROUP:
            return None
        order, codes = None, self.codes
        if self.of_groups is not None:
            if not any_order or bool((self.of_groups.bincount(minlength=self.scales.shape[1]) != size).any()):
                return None
            order = self.of_groups.argsort(stable=True)
            codes = codes[:, order].contiguous()
        minimums = (self.zeros.float() * -halves.float()).half()
        nearly = torch.allclose(halves.float(), self.scales.float(), rtol=2.0**-11, atol=2.0**-24)
        if not nearly or not bool(minimums.isfinite().all()):
            return None
        times = size // GROUP
        by_block = codes.view(outputs, -1, GROUP).numpy()
        by_group = [part.repeat_interleave(times, 1).contiguous().numpy() for part in (halves, minimums)]
        packed = packed_halves(by_block) if self.bits == 4 else by_block
        return Groups(self.bits, packed, by_group[0], by_group[1], order=None if order is None else order.numpy())

    def _spread(self, each: Tensor) -> Tensor:
        """Return what each input has of its group: [outputs, inputs]."""
        if self.of_groups is not None:
            return each[:, self.of_groups]
        return each.repeat_interleave(self.codes.shape[1] // each.shape[1], 1)


def unpacked(words: Tensor, bits: int, dim: int) -> Tensor:
    """Return the integers of int32 words, uint8: from the low end of each, along a dimension."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    each = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return each.movedim(-1, dim + 1).flatten(dim, dim + 1).to(torch.uint8)


def read_awq(parts: Parts) -> Coded:
    """Read AWQ's `gemm` packing: words are of eight outputs of one input (Lin et al. 2023, llm-awq)."""

    def of_outputs(words: Tensor) -> Tensor:
        eights = unpacked(words, 4, 1).view(len(words), -1, 8)
        return eights[..., list(AWQ_ORDER)].flatten(1).t().contiguous()

    zeros = of_outputs(parts["qzeros"]).to(torch.int16)
    return Coded(4, of_outputs(parts["qweight"]), zeros, parts["scales"].t().contiguous())


def read_gptq(parts: Parts, bits: int, *, older: bool) -> Coded:
    """Read GPTQ's packing: words are of some inputs of one output. older: files hold zeros less one (AutoGPTQ's)."""
    codes = unpacked(parts["qweight"], bits, 0).t().contiguous()
    zeros = (unpacked(parts["qzeros"], bits, 1).t().to(torch.int16) + int(older)) & ((1 << bits) - 1)
    scales, inputs, of_groups = parts["scales"].t().contiguous(), codes.shape[1], None
    if "g_idx" in parts:
        in_order = torch.arange(inputs) // (inputs // scales.shape[1])
        given = parts["g_idx"].long()
        of_groups = None if torch.equal(given, in_order) else given
    return Coded(bits, codes, zeros.contiguous(), scales, of_groups)


def read_compressed(parts: Parts, inputs: int) -> Coded:
    """Read compressed-tensors' integers: int8, or packed, from the low end of words, as far above zero as they go."""
    scales = parts["weight_scale"]
    if "weight" in parts:
        codes = (parts["weight"].short() + 128).to(torch.uint8)
        scales = scales.reshape(-1, 1) if scales.dim() < 2 else scales
        zeros = torch.full(scales.shape, 128, dtype=torch.int16)
        if "weight_zero_point" in parts:
            zeros = zeros + parts["weight_zero_point"].reshape(scales.shape).short()
        return Coded(8, codes, zeros.expand(len(codes), -1), scales.expand(len(codes), -1))
    words = parts["weight_packed"]
    bits = words.shape[1] * 32 // inputs
    codes = unpacked(words, bits, 1)[:, :inputs]
    zeros = torch.full(scales.shape, 1 << (bits - 1), dtype=torch.int16)
    if "weight_zero_point" in parts:
        zeros = unpacked(parts["weight_zero_point"], bits, 0)[: len(scales)].to(torch.int16)
    of_groups = parts["weight_g_idx"].long() if "weight_g_idx" in parts else None
    return Coded(bits, codes.contiguous(), zeros, scales, of_groups)


@dataclass(frozen=True, slots=True)
class Scaled:
    """A matrix of narrow floats, times scales: of blocks, or of each output, or of all."""

    narrow: Tensor  # [outputs, inputs]
    scales: Tensor
    block: tuple[int, int] | None = None  # outputs and inputs

    def values(self) -> Tensor:
        """Return the weights, float32 [outputs, inputs]."""
        wide, (outputs, inputs) = self.scales.float(), self.narrow.shape
        if self.block is not None:
            rows, columns = self.block
            wide = wide.repeat_interleave(rows, 0)[:outputs].repeat_interleave(columns, 1)[:, :inputs]
        elif wide.dim() < 2:
            wide = wide.reshape(-1, 1)
        elif wide.shape[1] > 1:
            wide = wide.repeat_interleave(inputs // wide.shape[1], 1)
        return self.narrow.float() * wide

    def kept(self, *, any_order: bool = False) -> Fp8 | None:
        """Return the same matrix as products take it; None if its type or its blocks are not theirs."""
        del any_order
        if self.narrow.dtype != torch.float8_e4m3fn or (self.block is not None and self.block[1] % SEGMENT):
            return None
        outputs, codes, scales = len(self.narrow), self.narrow.view(torch.uint8), self.scales.float()
        if self.block is not None:
            scales = scales.repeat_interleave(self.block[0], 0)[:outputs].repeat_interleave(self.block[1] // SEGMENT, 1)
            scales = scales[:, : -(-codes.shape[1] // SEGMENT)].contiguous()
        elif scales.dim() < 2 or scales.shape[1] == 1:
            scales = scales.reshape(-1, 1).expand(outputs, 1).contiguous()
        else:
            return None
        return Fp8(codes.numpy(), scales.numpy())

    def is_finite(self) -> bool:
        """Say whether all of its floats are numbers."""
        if self.narrow.dtype == torch.float8_e4m3fn:
            return not bool((self.narrow.view(torch.uint8) & MAGNITUDE == MAGNITUDE).any())
        return bool(self.narrow.float().isfinite().all())


def scales_that_are_not_finite(parts: Parts) -> str | None:
    """Return the name of such a part."""
    return next((name for name, part in parts.items() if "scale" in name and not part.float().isfinite().all()), None)
