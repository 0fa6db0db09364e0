"""Read quantized tensors of a GGUF file as they are coded.

Block layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

import numpy as np
from gguf import GGMLQuantizationType, dequantize
from gguf.quants import Q4_K

from pdserve.model.groups import GROUP, SIGNED_ZERO, Bytes, Floats, Groups, Halves, packed_halves, quantized

SUPER_GROUP = 256  # inputs of a block of Q4_K
HALF_BYTES = 2  # of a float16


def read_groups(coded: Bytes, kind: GGMLQuantizationType) -> Groups:
    """Return a matrix as it is coded; codings that have no exact counterpart are rounded to 8 bits.

    coded: [width, bytes of a row]. The scales of Q4_K are multiplied out to a float16 for each 32 inputs.
    """
    width = len(coded)
    match kind:
        case GGMLQuantizationType.Q4_0:
            scales, codes = _split(coded, 1, GROUP // 2)
            return Groups(4, codes, scales[0], -SIGNED_ZERO[4] * scales[0])
        case GGMLQuantizationType.Q4_1:
            (scale, minimum), codes = _split(coded, 2, GROUP // 2)
            return Groups(4, codes, scale, minimum)
        case GGMLQuantizationType.Q8_0:
            scales, codes = _split(coded, 1, GROUP)
            return Groups(8, codes ^ np.uint8(SIGNED_ZERO[8]), scales[0], -SIGNED_ZERO[8] * scales[0])
        case GGMLQuantizationType.Q4_K:
            return _q4_k(coded)
        case _:
            values: Floats = dequantize(coded, kind)
            return quantized(values.reshape(width, -1), 8)


def _split(coded: Bytes, num_halves: int, num_codes: int) -> tuple[list[Halves], Bytes]:
    """Part each block's leading float16s from its codes."""
    head = num_halves * HALF_BYTES
    blocks = coded.reshape(len(coded), -1, head + num_codes)
    halves = np.ascontiguousarray(blocks[..., :head]).view(np.float16)
    return [halves[..., index] for index in range(num_halves)], blocks[..., head:]


def _q4_k(coded: Bytes) -> Groups:
    width = len(coded)
    blocks = coded.reshape(-1, 2 * HALF_BYTES + Q4_K.K_SCALE_SIZE + SUPER_GROUP // 2)
    halves, rest = blocks[:, : 2 * HALF_BYTES], blocks[:, 2 * HALF_BYTES :]
    scale, minimum = np.ascontiguousarray(halves).view(np.float16).astype(np.float32).T
    scales, minimums = Q4_K.get_scale_min(np.ascontiguousarray(rest[:, : Q4_K.K_SCALE_SIZE]))
    pairs = rest[:, Q4_K.K_SCALE_SIZE :].reshape(len(blocks), -1, 1, GROUP)  # low halves: one group, high: the next
    codes = np.concatenate((pairs & 15, pairs >> 4), axis=2)
    return Groups(
        4,
        packed_halves(codes).reshape(width, -1, GROUP // 2),
        (scale[:, None] * scales).astype(np.float16).reshape(width, -1),
        (minimum[:, None] * minimums * -1.0).astype(np.float16).reshape(width, -1),
    )
