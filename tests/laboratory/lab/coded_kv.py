"""What K and V in a byte a value cost: perplexity of a text, and the time of a decode step with long contexts.

    PYTHONPATH=tests/laboratory python -m lab.coded_kv quality FILE [TOKENS]
    PYTHONPATH=tests/laboratory python -m lab.coded_kv speed [ROUNDS]

Both are of SmolLM2-135M from an engine alone, in one thread.
"""

import math
import sys
from pathlib import Path
from statistics import median
from time import process_time

import torch

from lab.decoding import step_of
from pdserve.base.ids import PageId
from pdserve.checkpoint.checkpoint import Checkpoint, weights_in_form
from pdserve.checkpoint.fetch import resolve_model
from pdserve.checkpoint.open import open_checkpoint
from pdserve.engine.batch import Batch
from pdserve.engine.runner import Runner
from pdserve.engine.step import Chunk, StepPlan
from pdserve.kernels.kv_rows import KvRows
from pdserve.model.family import Model
from pdserve.model.loading import load_model
from pdserve.protocol.kvlayout import KvCode

CODES: tuple[KvCode | None, ...] = (None, "int8", "fp8_e4m3")
PAGE_SIZE, CHUNK = 16, 64  # tokens
CONTEXTS = (2048, 8000)
STEPS = 5  # of a round


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
    for code, found in times.items():
        ratio = median([one / other for one, other in zip(found, times[None], strict=True)])
        print(f"{context} {code}: least {min(found):.2f} ms, median {median(found):.2f} ms, ratio {ratio:.3f}")  # noqa: T201


def main(what: str, *arguments: str) -> None:
    torch.set_num_threads(1)
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
