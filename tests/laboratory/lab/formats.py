"""What products with weights in FP8 take beside bfloat16's, on one thread, and what they cost SmolLM2 in perplexity.

    PYTHONPATH=tests/laboratory python -m lab.fp8 [WIDTH INPUTS]
    PYTHONPATH=tests/laboratory python -m lab.fp8 quality FILE

Matrices are 4 of each form, so that caches hold none, and take turns. In a model all but its embedding are rounded,
with a scale for each output.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import process_time
from typing import cast

import torch

from lab.coded_kv import perplexity
from lab.decoding import step_of
from pdserve.checkpoint.fetch import resolve_model
from pdserve.checkpoint.open import open_checkpoint
from pdserve.engine.runner import Runner
from pdserve.kernels.cpu.build import Missing
from pdserve.kernels.cpu.calls import Immediate
from pdserve.kernels.cpu.layers import SEGMENT, Tiles, multiply, tiled, tiled_fp8
from pdserve.kernels.cpu.library import library
from pdserve.model.fp8 import Fp8
from pdserve.model.loading import load_model
from pdserve.model.weights import Part, Stored

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


def rounded(stored: Stored) -> Stored:
    """Return a matrix in FP8."""

    def read(part: Part) -> Fp8 | None:
        values = torch.as_tensor(stored.read(())).float()
        scales = values.abs().amax(1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
        codes = (values / scales).to(torch.float8_e4m3fn)
        return Fp8(codes.view(torch.uint8).numpy(), scales.numpy()).part(part)

    return Stored(stored.shape, cast("Callable[[Part], Fp8]", read))


def quality(file: str) -> None:
    torch.set_num_threads(1)
    checkpoint = open_checkpoint(resolve_model("smollm2-135m-instruct"))
    token_ids = checkpoint.tokenizer().encode(Path(file).read_text(), add_special=False)[:2048]
    plain = checkpoint.weights()
    coded = {
        name: rounded(stored) if ".layers." in name and len(stored.shape) == 2 else stored
        for name, stored in plain.items()
    }
    models = {
        name: load_model(checkpoint.config, weights, torch.bfloat16)
        for name, weights in (("bfloat16", plain), ("FP8", coded))
    }
    runners = {name: Runner(model, 8, 16) for name, model in models.items()}
    taken = [{name: step_s(runner) for name, runner in runners.items()} for _ in range(40)]
    for name, model in models.items():
        found, step_ms = perplexity(model, None, token_ids), 1e3 * median(each[name] for each in taken)
        megabytes = model.bytes_read(1) / 1e6
        sys.stdout.write(f"{name}: perplexity {found:.2f}, a step {step_ms:.2f} ms, {megabytes:.0f} MB read\n")


def step_s(runner: Runner) -> float:
    """Return the processor time of a step of one sequence."""
    begin = process_time()
    runner.run(step_of(1, 96))
    return process_time() - begin


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
    if sys.argv[1:2] == ["quality"]:
        quality(sys.argv[2])
    else:
        main(*map(int, sys.argv[1:]))
