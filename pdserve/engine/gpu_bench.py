"""The engine on a GPU, timed on nano-vllm's workload: a section of `make gpu`.

256 sequences, prompts and answers of 100 to 1,024 tokens, all there at the start (nano-vllm's bench.py), on a model of
Qwen3-0.6B's shape with random weights. The scheduler is the worker's own; prefixes are not reused.
"""

import random
import time
from collections import deque
from dataclasses import dataclass

import torch

from pdserve.engine.device_memory import pages_that_fit, step_bytes
from pdserve.engine.kvcache import KvCache
from pdserve.engine.runner_cuda import CudaRunner, Started, StepLimits
from pdserve.engine.scheduler import Limits, Scheduler
from pdserve.engine.sequence import Job, Sequence
from pdserve.engine.step import StepPlan
from pdserve.ids import Attempt, RequestId
from pdserve.kernels.gpu.rows import Choice, Row
from pdserve.model.config import ModelConfig
from pdserve.model.dummy import dummy_weights
from pdserve.model.loading import load_model
from pdserve.sampling import SamplingParams

NUM_SEQS = 256
SHORTEST, LONGEST = 100, 1024
LARGEST_PROMPT_ID = 10_000
PAGE_SIZE = 64
STEP_LIMITS = StepLimits(max_num_seqs=NUM_SEQS, max_num_batched_tokens=16_384, max_model_len=2 * LONGEST)
UTILIZATION = 0.9
MEMORY_BYTES_PER_S = 4.8e12  # an H200's, by its datasheet

QWEN3_0_6B: dict[str, object] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 151_645,
}


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


def nano_vllm_work() -> Work:
    """Draw the lengths and tokens of nano-vllm's benchmark, in its order, from seed 0."""
    rng = random.Random(0)
    prompts = tuple(
        tuple(rng.randint(0, LARGEST_PROMPT_ID) for _ in range(rng.randint(SHORTEST, LONGEST))) for _ in range(NUM_SEQS)
    )
    return Work(prompts, tuple(rng.randint(SHORTEST, LONGEST) for _ in range(NUM_SEQS)))


@dataclass(frozen=True, slots=True)
class Timed:
    """How long a workload took, and how long of that the host had nothing to do but wait for the device."""

    total_s: float
    waiting_s: float
    num_steps: int
    num_tokens: int


def drive(runner: CudaRunner, scheduler: Scheduler, work: Work, temperature: float, *, ahead: bool) -> Timed:
    """Compute all of the work. With `ahead`, a step is planned and started while the one before it runs."""
    for order, (prompt, answer_len) in enumerate(zip(work.prompts, work.answer_lens, strict=True)):
        params = SamplingParams(temperature=temperature, max_tokens=answer_len, ignore_eos=True, seed=order)
        job = Job(RequestId(order.to_bytes(16)), Attempt(0), prompt, len(prompt), params, (0,))
        scheduler.add(Sequence(job, (0,), list(prompt), order))
    started_s = time.perf_counter()
    waiting_s, num_steps, num_tokens = 0.0, 0, 0
    running: deque[tuple[StepPlan, Started]] = deque()
    while True:
        if (plan := scheduler.plan()) is not None:
            running.append((plan, runner.start(plan)))
            if ahead and len(running) == 1:
                continue
        elif not running:
            return Timed(time.perf_counter() - started_s, waiting_s, num_steps, num_tokens)
        waited_s = time.perf_counter()
        done, step = running.popleft()
        result = runner.finish(step)
        waiting_s += time.perf_counter() - waited_s
        scheduler.commit(done, result)
        num_steps += 1
        num_tokens += sum(map(len, result.tokens))


def run(choice: Choice) -> list[Row]:
    """Time the workload with steps planned ahead, and one by one; the rate is output tokens per second."""
    cases = {
        f"256 sequences, temperature {temperature}, {how}": (temperature, ahead)
        for temperature in (0.0, 0.6)
        for ahead, how in ((True, "steps planned ahead"), (False, "one step at a time"))
    }
    wanted = {name: case for name, case in cases.items() if choice.wants(name)}
    if not wanted:
        return []
    config = ModelConfig.from_hf(QWEN3_0_6B)
    model = load_model(config, dummy_weights(config), torch.bfloat16, device="cuda")
    num_pages = _num_pages(config)
    runner = CudaRunner(model, num_pages, PAGE_SIZE, STEP_LIMITS)
    runner.capture()
    work = nano_vllm_work()
    _time(runner, num_pages, Work(work.prompts[:8], (4,) * 8), (0.6, True))  # compiles what capturing did not
    return [_row(name, _time(runner, num_pages, work, case), work, config) for name, case in wanted.items()]


def _time(runner: CudaRunner, num_pages: int, work: Work, case: tuple[float, bool]) -> Timed:
    temperature, ahead = case
    limits = Limits(NUM_SEQS, STEP_LIMITS.max_num_batched_tokens, STEP_LIMITS.max_model_len, frozenset())
    scheduler = Scheduler(KvCache(num_pages, PAGE_SIZE, None), limits)
    return drive(runner, scheduler, work, temperature, ahead=ahead)


def _row(name: str, timed: Timed, work: Work, config: ModelConfig) -> Row:
    bound_s = work.decode_bytes(_kv_bytes_per_token(config), _weight_bytes(config)) / MEMORY_BYTES_PER_S
    rate = timed.num_tokens / timed.total_s
    note = (
        f"{100 * bound_s / timed.total_s:.0f} % of the byte bound of {work.output_tokens / bound_s:.0f} tok/s; "
        f"{timed.num_steps} steps, the host waited {100 * timed.waiting_s / timed.total_s:.0f} % of the time"
    )
    failed = timed.num_tokens != work.output_tokens
    return Row(name, timed.total_s * 1e6, rate, "tok/s", note=note, failed=failed)


def _num_pages(config: ModelConfig) -> int:
    free, total = torch.cuda.mem_get_info()
    needed = step_bytes(config, STEP_LIMITS.max_num_batched_tokens, NUM_SEQS, torch.bfloat16.itemsize)
    page_bytes = _kv_bytes_per_token(config) * PAGE_SIZE
    enough = NUM_SEQS * -(-STEP_LIMITS.max_model_len // PAGE_SIZE)
    return min(enough, pages_that_fit(total, total - free + needed, UTILIZATION, page_bytes))


def _kv_bytes_per_token(config: ModelConfig) -> int:
    return config.num_layers * 2 * config.num_kv_heads * config.head_dim * torch.bfloat16.itemsize


def _weight_bytes(config: ModelConfig) -> int:
    """Return the bytes of the matrices that a decode step reads whole."""
    heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    per_layer = config.hidden_size * (heads + 3 * config.intermediate_size)
    elements = config.num_layers * per_layer + config.vocab_size * config.hidden_size
    return elements * torch.bfloat16.itemsize
