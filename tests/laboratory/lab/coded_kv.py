"""What K and V in a byte a value cost: perplexity of a text, and the time of a decode step with long contexts.

    PYTHONPATH=tests/laboratory python -m lab.coded_kv quality FILE [TOKENS]
    PYTHONPATH=tests/laboratory python -m lab.coded_kv speed [ROUNDS]
    PYTHONPATH=tests/laboratory python -m lab.coded_kv attention [ROUNDS [LIBRARY...]]

The first two are of SmolLM2-135M from an engine alone. The last is of the attention of a decode step alone, over random
K and V, with this processor's library or with some that were built before. All compute in one thread.
"""

import ctypes
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median, quantiles
from time import process_time

import numpy as np
import torch

from lab.decoding import step_of
from pdserve.base.ids import PageId
from pdserve.checkpoint.checkpoint import Checkpoint, weights_in_form
from pdserve.checkpoint.fetch import resolve_model
from pdserve.checkpoint.open import open_checkpoint
from pdserve.engine.batch import Batch
from pdserve.engine.runner import Runner
from pdserve.engine.step import Chunk, StepPlan
from pdserve.kernels.cpu.attention import PagedAttention, Rows
from pdserve.kernels.cpu.build import Missing
from pdserve.kernels.cpu.calls import Immediate
from pdserve.kernels.cpu.library import library
from pdserve.kernels.kv_rows import KvRows
from pdserve.model.family import Model
from pdserve.model.loading import load_model
from pdserve.protocol.kvlayout import KvCode

CODES: tuple[KvCode | None, ...] = (None, "int8", "fp8_e4m3")
PAGE_SIZE, CHUNK = 16, 64  # tokens
CONTEXTS = (2048, 8000)
STEPS = 5  # of a round


@dataclass(frozen=True)
class Shape:
    """Of attention. All layers of a context are more than a cache holds."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int


SHAPES = (Shape(9, 3, 64, 30), Shape(32, 8, 128, 8))


def loaded(checkpoint: Checkpoint) -> Model:
    return load_model(checkpoint.config, weights_in_form(checkpoint, "gguf"), torch.bfloat16)


@torch.inference_mode()
def perplexity(model: Model, code: KvCode | None, token_ids: list[int]) -> float:
    """Return that of a text which is computed in chunks, so that most K and V are read from pages."""
    runner, total = Runner(model, -(-len(token_ids) // PAGE_SIZE), PAGE_SIZE, code=code), 0.0
    pages = tuple(map(PageId, range(len(runner.kv))))
    for start in range(0, len(token_ids) - 1, CHUNK):
        part = token_ids[start : start + CHUNK]
        batch = Batch.of(StepPlan((Chunk(part, start, pages, ()),)), runner._pool)
        logits = model.forward(runner._planned(batch), runner._attention, None).float().log_softmax(-1)
        following = torch.tensor(token_ids[start + 1 : start + 1 + CHUNK])
        total -= float(logits[: len(following)].gather(1, following[:, None]).sum())
    return math.exp(total / (len(token_ids) - 1))


def speed(model: Model, context: int, rounds: int) -> None:
    """Print the processor time of steps of one sequence, form after form in each round."""
    times: dict[KvCode | None, list[float]] = {code: [] for code in CODES}
    runners = {code: Runner(model, context // PAGE_SIZE, PAGE_SIZE, (), code=code) for code in CODES}
    for code, runner in runners.items():
        rows = KvRows(model.config.head_dim, torch.bfloat16, code)
        for page in runner.kv:
            page.copy_(rows.packed(torch.randn(*page.shape[:-1], rows.head_dim)))
        runner.run(step_of(1, context))
    for number in range(rounds):
        for code in CODES if number % 2 else CODES[::-1]:
            for _ in range(STEPS):
                begun = process_time()
                runners[code].run(step_of(1, context))
                times[code].append((process_time() - begun) * 1e3)
    report(str(context), times)


def attention(libraries: Mapping[str, ctypes.CDLL], shape: Shape, context: int, rounds: int) -> None:
    """Print the processor time of one token's attention in all layers, form after form in each round."""
    nothing, head_dim, num_pages = np.zeros(1, dtype=np.int64), shape.head_dim, -(-context // PAGE_SIZE)
    pages, ends = np.random.default_rng(0).permutation(num_pages)[None], np.array([context])
    targets = np.array([(pages[0, -1], (context - 1) % PAGE_SIZE)])
    forms = {}
    for code in CODES:
        rows = KvRows(head_dim, torch.bfloat16, code)
        pool_shape = (num_pages, shape.num_layers, 2, shape.num_kv_heads, PAGE_SIZE)
        pool = torch.empty((*pool_shape, rows.width), dtype=rows.pool_dtype)
        for page in pool:
            page.copy_(rows.packed(torch.randn(*pool_shape[1:], head_dim).bfloat16()))
        forms[code] = PagedAttention(pool, shape.num_heads, rows=rows)
        forms[code].plan([torch.ones(1, head_dim)], targets, Rows(pages, nothing, ends))
    qkv = torch.randn(1, shape.num_heads + 2 * shape.num_kv_heads, head_dim).bfloat16()
    turns = [*product(libraries, CODES)]
    times: dict[tuple[str, KvCode | None], list[float]] = {turn: [] for turn in turns}
    for number in range(rounds + 1):
        for name, code in turns if number % 2 else turns[::-1]:
            begun = process_time()
            for layer in range(shape.num_layers):
                forms[code].run(Immediate(libraries[name]), layer, qkv.clone())
            times[name, code].append((process_time() - begun) * 1e3)
    heads = f"{shape.num_heads}/{shape.num_kv_heads} heads of {head_dim}, {shape.num_layers} layers, {context}"
    for name in libraries:
        report(f"{name}: {heads}", {code: times[name, code][1:] for code in CODES})


def report(name: str, times: Mapping[KvCode | None, list[float]]) -> None:
    for code, found in times.items():
        low, ratio, high = quantiles([one / other for one, other in zip(found, times[None], strict=True)], n=4)
        spread = f"{ratio:.3f} ({low:.3f} to {high:.3f})"
        print(f"{name} {code}: least {min(found):.2f} ms, median {median(found):.2f} ms, ratio {spread}")  # noqa: T201


def main(what: str, *arguments: str) -> None:
    torch.set_num_threads(1)
    if what == "attention":
        own = library()
        assert not isinstance(own, Missing), own
        libraries = {path: ctypes.CDLL(path) for path in arguments[1:]} or {"own": own}
        for shape, context in product(SHAPES, CONTEXTS):
            attention(libraries, shape, context, int(arguments[0]) if arguments else 11)
        return
    checkpoint = open_checkpoint(resolve_model("smollm2-135m-instruct"))
    model = loaded(checkpoint)
    if what == "speed":
        for context in CONTEXTS:
            speed(model, context, int(arguments[0]) if arguments else 11)
        return
    text, limit = Path(arguments[0]).read_text(encoding="utf-8"), int(arguments[1]) if len(arguments) > 1 else 2048
    token_ids = checkpoint.tokenizer().encode(text, add_special=False)[:limit]
    for code in CODES:
        print(f"{len(token_ids)} tokens, {code}: perplexity {perplexity(model, code, token_ids):.4f}")  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
