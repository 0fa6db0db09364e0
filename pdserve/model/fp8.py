"""Matrices in FP8 as checkpoints hold them: e4m3 (Micikevicius et al. 2022), and scales of outputs or of blocks."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pdserve.model.groups import Groups, joined_groups
from pdserve.model.weights import SEGMENT, Part

MAGNITUDE = 127  # the bits of a code but its sign, and the code that is not a number

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


def _values() -> Floats:
    codes = np.arange(256)
    exponents, mantissas = codes >> 3 & 15, codes & 7
    sizes = np.where(exponents > 0, np.ldexp(1.0 + mantissas / 8, exponents - 7), mantissas / 8 * 2.0**-6)
    return np.where(codes & MAGNITUDE == MAGNITUDE, np.nan, np.where(codes > MAGNITUDE, -sizes, sizes)).astype(
        np.float32
    )


VALUES = _values()  # of all codes


@dataclass(frozen=True, slots=True)
class Fp8:
    """A matrix [width, inputs]; a weight is its code's value times a scale. No code is NaN."""

    codes: Bytes  # [width, inputs]
    scales: Floats  # [width, 1], or [width, inputs / SEGMENT], rounded up

    @property
    def shape(self) -> tuple[int, int]:
        """Return width and inputs."""
        width, inputs = self.codes.shape
        return width, inputs

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def values(self) -> Floats:
        return VALUES[self.codes] * np.repeat(self.segment_scales(), SEGMENT, 1)[:, : self.shape[1]]

    def segment_scales(self) -> Floats:
        """Return the scale of each segment: [width, inputs / SEGMENT], rounded up."""
        segments = -(-self.shape[1] // SEGMENT)
        return self.scales if self.scales.shape[1] == segments else np.repeat(self.scales, segments, 1)

    def of_outputs(self, outputs: slice | Ints) -> "Fp8":
        """Return the matrix of some outputs, in their order."""
        return Fp8(np.ascontiguousarray(self.codes[outputs]), np.ascontiguousarray(self.scales[outputs]))

    def part(self, part: Part) -> "Fp8 | None":
        """Return a part, as tensors are indexed: some outputs, or some inputs, or all; None if it parts a segment."""
        found = self.of_outputs(part[0]) if part and part[0] != slice(None) else self
        if len(part) < 2:
            return found
        start, stop = part[1].start, part[1].stop
        segments = slice(0, 1)
        if self.scales.shape[1] > 1:
            if start % SEGMENT or (stop % SEGMENT and stop < self.shape[1]):
                return None
            segments = slice(start // SEGMENT, -(-stop // SEGMENT))
        return Fp8(np.ascontiguousarray(found.codes[:, part[1]]), np.ascontiguousarray(found.scales[:, segments]))


Coded = Groups | Fp8


def joined_coded(*matrices: Coded) -> Coded | None:
    """Return one matrix with the rows of all; None if they are of different forms."""
    fp8 = [matrix for matrix in matrices if isinstance(matrix, Fp8)]
    if len(fp8) == len(matrices):
        codes, scales = (
            np.concatenate(parts) for parts in zip(*((each.codes, each.segment_scales()) for each in fp8), strict=True)
        )
        return Fp8(codes, scales)
    groups = [matrix for matrix in matrices if isinstance(matrix, Groups)]
    return None if fp8 or len({_order(each) for each in groups}) > 1 else joined_groups(*groups)


def _order(matrix: Groups) -> bytes | None:
    return None if matrix.order is None else matrix.order.tobytes()
