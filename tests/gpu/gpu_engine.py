"""The engine's sections of `make gpu`: its tokens beside the CPU engine's, and its speed on nano-vllm's workload.

The check compares small random models in float32: prompts in chunks, decode steps replayed and scheduled
asynchronously, greedy and sampled sequences side by side. The benchmark is nano-vllm's bench.py: 256 sequences, prompts
and answers of 100 to 1,024 tokens, all there at the start, on a model of Qwen3-0.6B's shape with random weights.
"""

import random
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import torch
from gpu_report import Row
from gpu_rows_bench import COPY_BYTES, copy_time_us

from pdserve.engine.kvcache import KvCache
from pdserve.engine.runner import Runner
from pdserve.engine.runner_cuda import CudaRunner, GpuMemory, step_bytes
from pdserve.engine.scheduler import Limits, Scheduler
from pdserve.engine.sequence import Job, Sampled, Sequence
from pdserve.engine.step import StepPlan, StepResult
from pdserve.ids import Attempt, RequestId
from pdserve.model.config import ModelConfig
from pdserve.model.family import Model
from pdserve.model.loading import dummy_weights, load_model
from pdserve.sampling import SamplingParams


@dataclass(slots=True)
class Driven:
    """A workload's result: the tokens of each sequence, and how long the host only waited for the device."""

    texts: dict[int, list[int]] = field(default_factory=dict)  # by the sequence's order
    total_s: float = 0.0
    waiting_s: float = 0.0
    num_steps: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.texts.values()))


class OneByOne:
    """Wraps a CPU runner for `drive`: `finish` computes the step."""

    max_in_flight = 1

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def start(self, plan: StepPlan) -> None:
        self._plan = plan

    def finish(self) -> StepResult:
        return self._runner.run(self._plan)


def drive(runner: CudaRunner | OneByOne, scheduler: Scheduler, sequences: Iterable[Sequence], depth: int) -> Driven:
    """Compute all tokens of some sequences, with up to `depth` steps in flight."""
    for sequence in sequences:
        scheduler.add(sequence)
    driven, started_s = Driven(), time.perf_counter()
    in_flight: deque[StepPlan] = deque()
    while True:
        if len(in_flight) < depth and (plan := scheduler.plan()) is not None:
            runner.start(plan)
            in_flight.append(plan)
            continue
        if not in_flight:
            driven.total_s = time.perf_counter() - started_s
            return driven
        waited_s = time.perf_counter()
        result = runner.finish()
        driven.waiting_s += time.perf_counter() - waited_s
        driven.num_steps += 1
        for outcome in scheduler.commit(in_flight.popleft(), result):
            if isinstance(outcome, Sampled):
                driven.texts.setdefault(outcome.sequence.order, []).append(outcome.token.token_id)


def _sequence(order: int, prompt: tuple[int, ...], params: SamplingParams) -> Sequence:
    job = Job(RequestId(order.to_bytes(16)), Attempt(0), prompt, len(prompt), replace(params, seed=order), (0,))
    return Sequence(job, (0,), list(prompt), order)


def _scheduler(limits: Limits, num_pages: int, page_size: int) -> Scheduler:
    return Scheduler(KvCache(num_pages, page_size, None), limits)


# ---- the check

VOCAB = 300
CHECK_PAGE_SIZE, CHECK_PAGES = 16, 80
PROMPT_LENS = (1, 15, 16, 17, 40, 70, 100)
NUM_TOKENS = 32
CHECK_EOS = 5
CHECK_LIMITS = Limits(6, max_num_batched_tokens=48, max_model_len=256, eos_token_ids=frozenset({CHECK_EOS}))
WEIGHT_SCALE = 4.0  # lets random models write more than one token over and over
PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9),
    SamplingParams(temperature=0.8, top_k=40, top_p=0.9, repetition_penalty=1.2, frequency_penalty=0.3),
    SamplingParams(temperature=0.0, presence_penalty=1.0, logit_bias=((7, 3.0),)),
)
SHAPE: Mapping[str, object] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "head_dim": 32,
    "eos_token_id": CHECK_EOS,
}
FAMILIES: Mapping[str, Mapping[str, object]] = {
    "qwen3 4/2": {"architectures": ["Qwen3ForCausalLM"], "num_attention_heads": 4, "num_key_value_heads": 2},
    "llama 9/3": {"architectures": ["LlamaForCausalLM"], "num_attention_heads": 9, "num_key_value_heads": 3},
    "mistral 4/4, window 24": {
        "architectures": ["MistralForCausalLM"],
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "sliding_window": 24,
    },
}


def check(only: str) -> list[Row]:
    """Compare each family's texts; a row fails if one token differs."""
    rows = []
    for family in FAMILIES:
        name = f"engine {family}"
        if only in name:
            wrong = different_texts(family, torch.device("cuda"), PROMPT_LENS, NUM_TOKENS)
            agree = f"{len(PROMPT_LENS)} sequences of {NUM_TOKENS} tokens agree"
            rows.append(Row(name, note=f"sequences {wrong} differ" if wrong else agree, failed=bool(wrong)))
    return rows


def different_texts(family: str, device: torch.device, prompt_lens: Seq[int], num_tokens: int) -> list[int]:
    """Return the sequences to which the engine over the kernels and the one in plain torch give different tokens."""
    config = ModelConfig.from_hf({**SHAPE, **FAMILIES[family]})
    kernels = CudaRunner(_small_model(config, device), CHECK_PAGES, CHECK_PAGE_SIZE, CHECK_LIMITS)
    kernels.capture()
    plain = Runner(_small_model(config, torch.device("cpu")), CHECK_PAGES, CHECK_PAGE_SIZE)

    def texts(runner: CudaRunner | OneByOne) -> dict[int, list[int]]:
        scheduler = _scheduler(CHECK_LIMITS, CHECK_PAGES, CHECK_PAGE_SIZE)
        return drive(runner, scheduler, _mixed_sequences(prompt_lens, num_tokens), runner.max_in_flight).texts

    ours, theirs = texts(kernels), texts(OneByOne(plain))
    return [order for order in range(len(prompt_lens)) if ours[order] != theirs[order]]


def _small_model(config: ModelConfig, device: torch.device) -> Model:
    weights = ((name, w if w.ndim == 1 else w * WEIGHT_SCALE) for name, w in dummy_weights(config))
    return load_model(config, weights, torch.float32, device=device)


def _mixed_sequences(prompt_lens: Seq[int], num_tokens: int) -> Iterator[Sequence]:
    rng = random.Random(0)
    for order, length in enumerate(prompt_lens):
        params = replace(PARAMS[order % len(PARAMS)], max_tokens=num_tokens, ignore_eos=True)
        yield _sequence(order, tuple(rng.randrange(VOCAB) for _ in range(length)), params)


# ---- the benchmark

NUM_SEQS = 256
SHORTEST, LONGEST = 100, 1024
LARGEST_PROMPT_ID = 10_000
PAGE_SIZE = 64
STEP_LIMITS = Limits(NUM_SEQS, max_num_batched_tokens=16_384, max_model_len=2 * LONGEST, eos_token_ids=frozenset())
UTILIZATION = 0.9
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

    def sequences(self, temperature: float) -> Iterator[Sequence]:
        for order, (prompt, count) in enumerate(zip(self.prompts, self.answer_lens, strict=True)):
            yield _sequence(order, prompt, SamplingParams(temperature=temperature, max_tokens=count, ignore_eos=True))


def nano_vllm_work() -> Work:
    """Choose the lengths and tokens of nano-vllm's benchmark, in its order, from seed 0."""
    rng = random.Random(0)
    prompts = tuple(
        tuple(rng.randint(0, LARGEST_PROMPT_ID) for _ in range(rng.randint(SHORTEST, LONGEST))) for _ in range(NUM_SEQS)
    )
    return Work(prompts, tuple(rng.randint(SHORTEST, LONGEST) for _ in range(NUM_SEQS)))


def bench(only: str) -> list[Row]:
    """Time the workload, scheduled asynchronously and step by step; the rate is output tokens per second."""
    cases = {
        f"256 sequences, temperature {temperature}, {how}": (temperature, depth)
        for temperature in (0.0, 0.6)
        for depth, how in ((2, "asynchronous scheduling"), (1, "one step at a time"))
    }
    wanted = {name: case for name, case in cases.items() if only in name}
    if not wanted:
        return []
    config = ModelConfig.from_hf(QWEN3_0_6B)
    model = load_model(config, dummy_weights(config), torch.bfloat16, device="cuda")
    bytes_per_s = 2e6 * COPY_BYTES / copy_time_us()
    torch.cuda.empty_cache()
    num_pages = _num_pages(config)
    runner = CudaRunner(model, num_pages, PAGE_SIZE, STEP_LIMITS)
    runner.capture()

    def timed(work: Work, temperature: float, depth: int) -> Driven:
        return drive(runner, _scheduler(STEP_LIMITS, num_pages, PAGE_SIZE), work.sequences(temperature), depth)

    work = nano_vllm_work()
    timed(Work(work.prompts[:8], (4,) * 8), 0.6, 2)  # compiles what capturing did not
    bound_s = work.decode_bytes(_kv_bytes_per_token(config), _weight_bytes(config)) / bytes_per_s
    return [_row(name, timed(work, *case), work, bound_s) for name, case in wanted.items()]


def _row(name: str, driven: Driven, work: Work, bound_s: float) -> Row:
    """`bound_s`: the time to read the bytes that decoding must read, at the rate of a copy."""
    rate = driven.num_tokens / driven.total_s
    note = (
        f"{100 * bound_s / driven.total_s:.0f} % of the bytes' bound, {work.output_tokens / bound_s:.0f} tok/s; "
        f"{driven.num_steps} steps, the host waited {100 * driven.waiting_s / driven.total_s:.0f} % of the time"
    )
    failed = driven.num_tokens != work.output_tokens
    return Row(name, driven.total_s * 1e6, rate, "tok/s", note=note, failed=failed)


def _num_pages(config: ModelConfig) -> int:
    sizes = (STEP_LIMITS.max_num_batched_tokens, NUM_SEQS, STEP_LIMITS.max_model_len)
    needed = step_bytes(config, *sizes, torch.bfloat16.itemsize)
    page_bytes = _kv_bytes_per_token(config) * PAGE_SIZE
    enough = NUM_SEQS * -(-STEP_LIMITS.max_model_len // PAGE_SIZE)
    memory = GpuMemory.of(torch.device("cuda", torch.cuda.current_device()))
    return min(enough, memory.pages_that_fit(UTILIZATION, needed, page_bytes))


def _kv_bytes_per_token(config: ModelConfig) -> int:
    return config.num_layers * 2 * config.num_kv_heads * config.head_dim * torch.bfloat16.itemsize


def _weight_bytes(config: ModelConfig) -> int:
    """Return the bytes of the matrices that a decode step reads whole."""
    heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    per_layer = config.hidden_size * (heads + 3 * config.intermediate_size)
    elements = config.num_layers * per_layer + config.vocab_size * config.hidden_size
    return elements * torch.bfloat16.itemsize
