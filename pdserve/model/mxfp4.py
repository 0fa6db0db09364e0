"""MXFP4: blocks of 32 floats of four bits, and a power of two for each (OCP Microscaling Formats 1.0, 2023)."""

import torch
from torch import Tensor

from pdserve.model.groups import FP4_EXPONENTS, FP4_LEVELS, FP4_ZERO, Groups, mxfp4, packed_halves

BIAS = 127  # of exponents
NOT_A_NUMBER = 255  # a scale


def decoded(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the values, float32 [.., num_blocks * 32]; bfloat16 holds them exactly unless their scale is extreme.

    codes: uint8 [.., num_blocks, 16], the first of two in the low bits. scales: uint8 [.., num_blocks].
    ValueError for a scale that is not a number.
    """
    if bool((scales == NOT_A_NUMBER).any()):
        raise ValueError(f"scale {NOT_A_NUMBER}, which is not a number")
    table = (torch.tensor(FP4_LEVELS, device=codes.device) - FP4_ZERO) / 2
    powers = torch.exp2(scales.float() - BIAS)
    return (table[_unpacked(codes).long()] * powers[..., None]).flatten(-2)


def kept(codes: Tensor, scales: Tensor) -> Groups | None:
    """Return a matrix as it is, for products; None if theirs cannot have such scales. codes, scales: as `decoded`."""
    return mxfp4(packed_halves(_unpacked(codes).numpy()), scales.numpy())


def takes_scales(scales: Tensor) -> bool:
    """Say whether products take all of these scales, whatever their codes are."""
    return all(int(scale) - BIAS - 1 in FP4_EXPONENTS for scale in scales.aminmax())


def _unpacked(codes: Tensor) -> Tensor:
    return torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
