"""What forms of weights cost SmolLM2-135M, and what products take with each, on one thread.

    PYTHONPATH=tests/laboratory python -m lab.formats FILE [MODEL...]
    PYTHONPATH=tests/laboratory python -m lab.formats products [WIDTH INPUTS]

The first writes the catalog's model in each format and measures all: perplexity of a text, and steps in turn. MODEL:
what other tools have written. GPTQ sees this project's docs without FILE. In the second there are 4 matrices of each,
so that no cache holds them; they take turns.
"""

import ctypes
import gc
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from time import process_time

import numpy as np
import torch

from lab.coded_kv import perplexity
from lab.decoding import step_of
from lab.quantizers import FORMS, GGUF, GPTQ, Coder, Parts, hessians, in_gptq, write_form, write_gguf
from pdserve.checkpoint.checkpoint import choose_quantization, weights_in_form
from pdserve.checkpoint.fetch import resolve_model
from pdserve.checkpoint.open import open_checkpoint
from pdserve.engine.runner import Runner
from pdserve.kernels.cpu.build import Missing
from pdserve.kernels.cpu.calls import Immediate
from pdserve.kernels.cpu.layers import SEGMENT, Tiles, multiply, tiled, tiled_codes, tiled_fp8
from pdserve.kernels.cpu.library import library
from pdserve.model.family import Model
from pdserve.model.groups import quantized
from pdserve.model.loading import load_model

NUM_MATRICES, ROUNDS, ROWS = 4, 9, (1, 2, 4, 8, 12, 24, 64, 256)
STEPS, COUNTS, CONTEXT = 15, (1, 16), 96  # steps of so many sequences, of tokens
TOKENS, CALIBRATION = 2048, 8192
DOCS = Path("docs")


def unnamed(code: Coder, _: str, values: torch.Tensor) -> Parts:
    return code(values)


def written(folder: Path, file: Path) -> Iterator[tuple[str, Path]]:
    """Write the model in each format."""
    source = resolve_model("smollm2-135m-instruct")
    checkpoint = open_checkpoint(source)
    for name, (config, code) in FORMS.items():
        yield (
            name,
            write_form(checkpoint, folder / name.split(" (")[0], config, partial(unnamed, code)),
        )
    text = "\n".join(each.read_text() for each in sorted(DOCS.glob("*.md")) if not each.samefile(file))
    found = hessians(folder / "bfloat16", checkpoint.tokenizer().encode(text, add_special=False)[:CALIBRATION])
    for name, by_activation in (("GPTQ", False), ("GPTQ, order of activations", True)):
        config, code = GPTQ | {"desc_act": by_activation}, partial(in_gptq, found, by_activation=by_activation)
        yield name, write_form(checkpoint, folder / name, config, code)
    for name, kind in GGUF.items():
        yield name, write_gguf(source, folder / f"{name}.gguf", kind)


def resident_bytes() -> int:
    """Return what this process has in memory that is no file's."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) << 10


def loaded(path: Path) -> tuple[Model, str, float, int]:
    """Return a model, the form that it is kept in, the processor time of loading it, and the bytes that it takes."""
    before, begun = resident_bytes(), process_time()
    checkpoint = open_checkpoint(path)
    form = choose_quantization("auto", checkpoint, "bfloat16", "cpu")
    model = load_model(checkpoint.config, weights_in_form(checkpoint, form), torch.bfloat16)
    taken_s = process_time() - begun
    return model, form, taken_s, resident_bytes() - before


def quality(file: Path, more: list[Path]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        paths = [*written(Path(folder), file), *((path.name, path) for path in more)]
        loaded(paths[0][1])  # so that what is imported once counts for none
        models = {name: loaded(path) for name, path in paths}
        token_ids = open_checkpoint(paths[0][1]).tokenizer().encode(file.read_text(), add_special=False)[:TOKENS]
    runners = {name: Runner(model, max(COUNTS) * CONTEXT // 16, 16) for name, (model, *_) in models.items()}
    taken = [{name: [step_s(each, count) for count in COUNTS] for name, each in runners.items()} for _ in range(STEPS)]
    say("| weights | kept as | perplexity | load, s | resident, MB | read a step, MB | 1 sequence, ms | 16, ms |")
    say("|" + "---|" * 8)
    for name, (model, form, load_s, num_bytes) in models.items():
        steps = " | ".join(f"{1e3 * median(round_[name][at] for round_ in taken):.1f}" for at in range(len(COUNTS)))
        sizes = f"{load_s:.1f} | {num_bytes / 1e6:.0f} | {model.bytes_read(1) / 1e6:.0f}"
        say(f"| {name} | {form} | {perplexity(model, None, token_ids):.2f} | {sizes} | {steps} |")


def step_s(runner: Runner, count: int) -> float:
    """Return the processor time of a step of so many sequences."""
    begin = process_time()
    runner.run(step_of(count, CONTEXT))
    return process_time() - begin


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def in_fp8(width: int, inputs: int) -> Tiles:
    codes = torch.randint(0, 127, (width, inputs), dtype=torch.uint8)
    scales = torch.rand(width, -(-inputs // SEGMENT))
    return Tiles(tiled_fp8(codes, scales), 8, width, torch.bfloat16, is_float=True)


def in_groups(bits: int, width: int, inputs: int) -> Tiles:
    groups = quantized(np.random.default_rng().standard_normal((width, inputs)).astype(np.float32), bits)
    parts = (torch.from_numpy(each) for each in (groups.codes, groups.scales, groups.minimums))
    return Tiles(tiled_codes(*parts), bits, width, torch.bfloat16)


PRODUCTS: dict[str, Callable[[int, int], Tiles]] = {
    "bfloat16": lambda width, inputs: tiled(torch.randn(width, inputs).bfloat16()),
    "FP8": in_fp8,
    "8 bits": partial(in_groups, 8),
    "4 bits": partial(in_groups, 4),
}


def products(width: int = 4096, inputs: int = 4096) -> None:
    found = library()
    if isinstance(found, Missing):
        sys.exit(f"no compiled kernels: {found}")
    calls = Immediate(found)
    matrices = {name: [make(width, inputs) for _ in range(NUM_MATRICES)] for name, make in PRODUCTS.items()}
    say(f"| rows | {' | '.join(matrices)} |\n|{'---|' * (1 + len(matrices))}")
    for num_rows in ROWS:
        x = torch.randn(num_rows, inputs).bfloat16()
        taken = [[microseconds(calls, each, x) for each in matrices.values()] for _ in range(ROUNDS)]
        say(f"| {num_rows} | {' | '.join(f'{median(each):,.0f}' for each in zip(*taken, strict=True))} |")


def microseconds(calls: Immediate, matrices: list[Tiles], x: torch.Tensor) -> float:
    """Return the processor time of one product."""
    begin = process_time()
    for matrix in matrices:
        multiply(calls, x, matrix)
    return (process_time() - begin) / len(matrices) * 1e6


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "products":
        products(*map(int, sys.argv[2:]))
    else:
        quality(Path(sys.argv[1]), [Path(each) for each in sys.argv[2:]])
