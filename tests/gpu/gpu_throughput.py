"""The engine end to end: nano-vllm's workload on a model of Qwen3-0.6B's shape, and an 8B model with random weights.

nano-vllm's bench.py has 256 sequences, prompts and answers of 100 to 1,024 tokens, all there at the start. Time to the
first token is therefore mostly the time in the queue.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from gpu_device import Device
from gpu_models import (
    QWEN3_0_6B,
    QWEN3_8B,
    Driven,
    Engine,
    Shape,
    config_of,
    kv_bytes_per_token,
    limits_of,
    random_model,
    random_prompt,
    sequence_of,
)
from gpu_report import Case, Row
from gpu_rows_bench import COPY_BYTES, copy_time_us

from pdserve.engine.scheduler import Limits
from pdserve.engine.sequence import Sequence
from pdserve.model.family import Model
from pdserve.protocol.sampling import SamplingParams

NUM_SEQS = 256
SHORTEST, LONGEST = 100, 1024
LARGEST_PROMPT_ID = 10_000
STEP_LIMITS = limits_of(NUM_SEQS, max_num_batched_tokens=16_384, max_model_len=2 * LONGEST)
DRY_LIMITS = limits_of(2, max_num_batched_tokens=32, max_model_len=64)
LARGE_LIMITS = limits_of(NUM_SEQS, max_num_batched_tokens=8_192, max_model_len=2 * LONGEST)
GREEDY, SAMPLED = SamplingParams(temperature=0.0), SamplingParams(temperature=0.6)
PENALIZED = SamplingParams(temperature=0.6, repetition_penalty=1.1, presence_penalty=0.2)
AHEAD, ONE_BY_ONE = 2, 1


@dataclass(frozen=True, slots=True)
class Work:
    """Prompts, and how many tokens follow each."""

    prompts: tuple[tuple[int, ...], ...]
    answer_lens: tuple[int, ...]

    @property
    def output_tokens(self) -> int:
        return sum(self.answer_lens)

    def decode_bytes(self, kv_bytes_per_token: int, weight_bytes: int) -> int:
        """Return the fewest bytes that decoding must read: each context once a token, all weights once a step."""
        lengths = zip(self.prompts, self.answer_lens, strict=True)
        contexts = sum(count * len(prompt) + count * (count - 1) // 2 for prompt, count in lengths)
        return contexts * kv_bytes_per_token + max(self.answer_lens) * weight_bytes

    def sequences(self, params: SamplingParams) -> Iterator[Sequence]:
        for order, (prompt, count) in enumerate(zip(self.prompts, self.answer_lens, strict=True)):
            yield sequence_of(order, prompt, replace(params, max_tokens=count, ignore_eos=True))


def nano_vllm_work() -> Work:
    """Choose the lengths and tokens of nano-vllm's benchmark, in its order, from seed 0."""
    rng = random.Random(0)
    prompts = tuple(
        tuple(rng.randint(0, LARGEST_PROMPT_ID) for _ in range(rng.randint(SHORTEST, LONGEST))) for _ in range(NUM_SEQS)
    )
    return Work(prompts, tuple(rng.randint(SHORTEST, LONGEST) for _ in range(NUM_SEQS)))


def equal_work(num_seqs: int, prompt_len: int, answer_len: int, vocab_size: int) -> Work:
    prompts = tuple(random_prompt(prompt_len, vocab_size, seed) for seed in range(num_seqs))
    return Work(prompts, (answer_len,) * num_seqs)


DRY_WORK = Work(((1, 2, 3), (4,) * 20, (5,)), (2, 3, 1))


def small(device: Device) -> Iterator[Case]:
    """Time nano-vllm's workload greedily: the engine's figure for the goal."""
    yield from _small(device, {"greedy": (GREEDY, AHEAD)})


def end_to_end(device: Device) -> Iterator[Case]:
    """Time the workload in other ways, then an 8B model at several loads."""
    yield from _small(
        device,
        {
            "temperature 0.6": (SAMPLED, AHEAD),
            "temperature 0.6, penalties": (PENALIZED, AHEAD),
            "greedy, one step at a time": (GREEDY, ONE_BY_ONE),
        },
    )
    engine, model = _engine(device, QWEN3_8B, LARGE_LIMITS)
    for num_seqs, answer_len in device.sized(((1, 128), (32, 256), (256, 256)), ((1, 2),)):
        work = equal_work(num_seqs, device.sized(1000, 20), answer_len, model.config.vocab_size)
        yield f"8B, {num_seqs} sequences", partial(_run, engine, f"8B, {num_seqs} x 1000+{answer_len}", work)


def _small(device: Device, ways: dict[str, tuple[SamplingParams, int]]) -> Iterator[Case]:
    bytes_per_s = 2e6 * device.sized(COPY_BYTES, 1 << 20) / copy_time_us(device)  # while there is room for it
    engine, model = _engine(device, QWEN3_0_6B, STEP_LIMITS)
    work = device.sized(nano_vllm_work(), DRY_WORK)
    bound_s = work.decode_bytes(kv_bytes_per_token(model.config), model.bytes_read(len(work.prompts))) / bytes_per_s
    warm_up = Work(work.prompts[:8], (2,) * len(work.prompts[:8]))
    for name, (params, depth) in ways.items():
        engine.drive(warm_up.sequences(params), depth)  # compiles what capturing did not
        yield name, partial(_run, engine, f"0.6B, {name}", work, params, depth, bound_s)


def _engine(device: Device, shape: Shape, limits: Limits) -> tuple[Engine, Model]:
    model = random_model(config_of(device, shape), device)
    return Engine.of(device, model, device.sized(limits, DRY_LIMITS)), model


def _run(
    engine: Engine,
    name: str,
    work: Work,
    params: SamplingParams = GREEDY,
    depth: int = AHEAD,
    bound_s: float | None = None,
) -> list[Row]:
    """Drive the work. `bound_s`: how long a copy of all bytes takes that must be read."""
    driven = engine.drive(work.sequences(params), depth)
    figures = {
        "tok/s": driven.num_tokens / driven.total_s,
        "ms to first token": driven.ttft_ms,
        "ms a token": driven.tpot_ms,
        "% waited": 100 * driven.waiting_s / driven.total_s,
    }
    if bound_s is not None:
        figures["% of the bytes' bound"] = 100 * bound_s / driven.total_s
    return [Row(name, figures, _steps(driven), failed=driven.num_tokens != work.output_tokens)]


def _steps(driven: Driven) -> str:
    return f"{driven.num_tokens} tokens in {driven.num_steps} steps"
