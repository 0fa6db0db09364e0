"""What products with weights in FP8 take beside bfloat16's, on one thread.

    PYTHONPATH=tests/laboratory python -m lab.fp8 [WIDTH INPUTS]

Both are 4 matrices, so that caches hold none, and take turns.
"""

import sys
from statistics import median
from time import process_time

import torch

from pdserve.kernels.cpu.build import Missing
from pdserve.kernels.cpu.calls import Immediate
from pdserve.kernels.cpu.layers import SEGMENT, Tiles, multiply, tiled, tiled_fp8
from pdserve.kernels.cpu.library import library

NUM_MATRICES, ROUNDS, ROWS = 4, 9, (1, 2, 4, 8, 12, 64, 256)


def fp8_matrix(width: int, inputs: int) -> Tiles:
    codes = torch.randint(0, 127, (width, inputs), dtype=torch.uint8)
    scales = torch.rand(width, -(-inputs // SEGMENT))
    return Tiles(tiled_fp8(codes, scales), 8, width, torch.bfloat16, is_float=True)


def microseconds(calls: Immediate, matrices: list[Tiles], x: torch.Tensor) -> float:
    """Return the processor time of one product."""
    begin = process_time()
    for matrix in matrices:
        multiply(calls, x, matrix)
    return (process_time() - begin) / len(matrices) * 1e6


def main(width: int = 4096, inputs: int = 4096) -> None:
    torch.set_num_threads(1)
    loaded = library()
    if isinstance(loaded, Missing):
        sys.exit(f"no compiled kernels: {loaded}")
    calls = Immediate(loaded)
    fp8 = [fp8_matrix(width, inputs) for _ in range(NUM_MATRICES)]
    bfloat16 = [tiled(torch.randn(width, inputs).bfloat16()) for _ in range(NUM_MATRICES)]
    sys.stdout.write("| rows | bfloat16 | FP8 |\n|---|---|---|\n")
    for num_rows in ROWS:
        x = torch.randn(num_rows, inputs).bfloat16()
        taken = [[microseconds(calls, each, x) for each in (bfloat16, fp8)] for _ in range(ROUNDS)]
        shown = " | ".join(f"{median(each):,.0f}" for each in zip(*taken, strict=True))
        sys.stdout.write(f"| {num_rows} | {shown} |\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
