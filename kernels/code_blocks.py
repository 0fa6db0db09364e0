"""Matrices of codes on a device, in the order in which its products read them. Free of Triton."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pdserve.kernels.checks import require, require_tensor

BLOCK = 32  # inputs of an output whose codes lie side by side
ZEROS = {"int4": 8, "int8": 128}  # the codes of zero where there are no minimums

Kind = Literal["int4", "int8", "fp4", "fp8"]


@dataclass(frozen=True, slots=True)
class CodeBlocks:
    """A matrix [outputs, inputs] of codes.

    A weight is scale * (code - ZEROS[kind]), or minimum + scale * code where there are minimums. Of floats (MXFP4's
    e2m1, and e4m3) it is scale * float; scales of fp4 are half of the format's.
    """

    kind: Kind
    codes: Tensor  # uint8 [inputs / BLOCK, outputs, bytes of BLOCK codes]; of 4 bits: byte j holds j (low) and j + 16
    scales: Tensor  # float16 or float32 [groups, outputs]
    minimums: Tensor | None  # like the scales
    inputs: int  # the last block may be filled up, with zeros
    group: int  # inputs that share a scale: a multiple of BLOCK, or all
    bias: Tensor | None = None  # [outputs]
    order: Tensor | None = None  # int64 [inputs]: of whose inputs the codes are; None: in their order
    rounded: bool = False  # whether products round inputs to 8 bits first

    def __post_init__(self) -> None:
        num_blocks, outputs, groups = -(-self.inputs // BLOCK), self.codes.shape[1], -(-self.inputs // self.group)
        require_tensor("codes", self.codes, (num_blocks, None, BLOCK * self.bits // 8), (torch.uint8,))
        require_tensor("scales", self.scales, (groups, outputs), (torch.float16, torch.float32))
        parts = [self.codes, self.scales]
        if self.minimums is not None:
            require_tensor("minimums", self.minimums, (groups, outputs), (self.scales.dtype,))
            parts.append(self.minimums)
        require(self.group % BLOCK == 0 or groups == 1, f"group must be all inputs or whole blocks, got {self.group}")
        require(all(part.is_contiguous() for part in parts), "codes and scales must be contiguous")

    @property
    def bits(self) -> int:
        return 4 if self.kind.endswith("4") else 8

    @property
    def outputs(self) -> int:
        return self.codes.shape[1]

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes * (1 if self.minimums is None else 2)
