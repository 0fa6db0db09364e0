"""Quantized matrices as checkpoints hold them: codes, and a scale and a minimum for each 32 inputs of an output."""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from pdserve.model.weights import GROUP, Part

HALF = GROUP // 2
MOST_HALF = float(np.finfo(np.float16).max)
FP4_ZERO = 12
FP4_LEVELS = (12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0)  # of codes: twice their values, and FP4_ZERO
FP4_EXPONENTS = range(-24, 13)  # of scales that, as FP4_ZERO times them, are float16
SIGNED_ZERO = {4: 8, 8: 128}  # the code of zero where weights are symmetric around it

Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.float16]
Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Groups:
    """A matrix [width, inputs]; a weight is minimum + scale * code, or where codes are floats, times their level."""

    bits: int  # 4 or 8
    codes: Bytes  # [width, inputs / GROUP, GROUP], or of 4 bits [.., HALF]: byte j holds j (low) and j + HALF
    scales: Halves  # [width, inputs / GROUP]
    minimums: Halves  # the same
    fp4: bool = False  # codes of 4 bits are floats: see FP4_LEVELS
    order: Ints | None = None  # of whose inputs the codes are; None: in their order

    @property
    def shape(self) -> tuple[int, int]:
        """Return width and inputs."""
        width, num_groups = self.scales.shape
        return width, num_groups * GROUP

    def eight_bits(self) -> "Groups":
        """Return the same matrix with 8 bits a code."""
        return replace(self, bits=8, codes=self._unpacked(), fp4=False)

    def values(self) -> Floats:
        scaled = self.scales[..., None].astype(np.float32) * self._unpacked()
        found = (scaled + self.minimums[..., None].astype(np.float32)).reshape(self.shape)
        return found if self.order is None else found[:, np.argsort(self.order)]

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes + self.minimums.nbytes

    def of_inputs(self, inputs: slice) -> "Groups":
        """Return the matrix of some inputs, which must be whole groups."""
        assert self.order is None, "groups in an order of their own cannot be parted"
        return self.of_groups(slice(inputs.start // GROUP, inputs.stop // GROUP))

    def of_groups(self, groups: "slice | Ints") -> "Groups":
        """Return the matrix of some groups of inputs, in their order."""
        return self._of(self.codes[:, groups], self.scales[:, groups], self.minimums[:, groups])

    def of_outputs(self, outputs: slice | Ints) -> "Groups":
        """Return the matrix of some outputs, in their order."""
        return self._of(self.codes[outputs], self.scales[outputs], self.minimums[outputs])

    def part(self, part: Part) -> "Groups":
        """Return a part, as tensors are indexed: some outputs, or some inputs, or all."""
        found = self.of_outputs(part[0]) if part and part[0] != slice(None) else self
        return found.of_inputs(part[1]) if len(part) > 1 else found

    def _of(self, codes: Bytes, scales: Halves, minimums: Halves) -> "Groups":
        codes, scales, minimums = map(np.ascontiguousarray, (codes, scales, minimums))
        return replace(self, codes=codes, scales=scales, minimums=minimums)

    def _unpacked(self) -> Bytes:
        if self.bits == 8:
            return self.codes
        codes = np.concatenate((self.codes & 15, self.codes >> 4), axis=-1)
        return np.array(FP4_LEVELS, np.uint8)[codes] if self.fp4 else codes


def joined_groups(*matrices: Groups) -> Groups:
    """Return one matrix with the rows of all, with 8 bits if their codes differ."""
    matrices = alike(*matrices)
    parts = ((matrix.codes, matrix.scales, matrix.minimums) for matrix in matrices)
    return matrices[0]._of(*map(np.concatenate, zip(*parts, strict=True)))


def alike(*matrices: Groups) -> tuple[Groups, ...]:
    """Return matrices whose codes are of one kind: as they are, or with 8 bits."""
    same = len({(matrix.bits, matrix.fp4) for matrix in matrices}) == 1
    return matrices if same else tuple(matrix.eight_bits() for matrix in matrices)


def mxfp4(codes: Bytes, exponents: Bytes) -> Groups | None:
    """Return a matrix in MXFP4 as it is; None if a scale is no float16, or not a number.

    codes: [width, inputs / GROUP, HALF], packed as those of `Groups`. exponents: of the groups' powers of two, and 127.
    """
    has_values = (codes & 0x77).any(axis=-1) | (exponents == 255)
    halved = np.where(has_values, exponents.astype(np.int32) - 128, 0)  # since levels are twice the values
    if halved.min() < FP4_EXPONENTS.start or halved.max() >= FP4_EXPONENTS.stop:
        return None
    scales = np.where(has_values, np.ldexp(np.float32(1.0), halved), 0).astype(np.float16)
    return Groups(4, codes, scales, np.float16(-FP4_ZERO) * scales, fp4=True)


def quantized(values: Floats, bits: int) -> Groups:
    """Round a matrix to 4 or 8 bits, symmetrically in each group. values: [width, inputs], a multiple of GROUP.

    The value of the greatest magnitude becomes the lowest code, so that all codes are used, as in GGUF's Q4_0.
    ValueError for a value that float16 cannot hold, as minimums are.
    """
    if (most := float(np.abs(values).max(initial=0.0))) > MOST_HALF:
        raise ValueError(f"a value of magnitude {most:g} cannot be rounded to {bits} bits: the limit is {MOST_HALF:g}")
    groups = values.reshape(len(values), -1, GROUP)
    zero = SIGNED_ZERO[bits]
    greatest = np.take_along_axis(groups, np.abs(groups).argmax(-1, keepdims=True), -1)[..., 0]
    scales = (greatest / -zero).astype(np.float16)
    wide = scales.astype(np.float32)
    inverse = np.divide(1.0, wide, out=np.zeros_like(wide), where=wide != 0.0)
    codes = np.clip(np.rint(groups * inverse[..., None]) + zero, 0, 2 * zero - 1).astype(np.uint8)
    packed = packed_halves(codes) if bits == 4 else codes
    return Groups(bits, packed, scales, (wide * -zero).astype(np.float16))


def packed_halves(codes: Bytes) -> Bytes:
    """Pack codes [.., GROUP] of 4 bits into bytes [.., HALF]."""
    return codes[..., :HALF] | (codes[..., HALF:] << np.uint8(4))
