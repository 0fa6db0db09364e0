"""The engine on a GPU against the engine on the CPU, token for token: a section of `make gpu`.

Small random models in float32; prompts in chunks, decode steps replayed and planned ahead, greedy and sampled sequences
side by side.
"""

import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from pdserve.engine.kvcache import KvCache
from pdserve.engine.runner import Runner
from pdserve.engine.runner_cuda import CudaRunner, StepLimits
from pdserve.engine.scheduler import Limits, Scheduler
from pdserve.engine.sequence import Job, Sampled, Sequence
from pdserve.engine.step import StepPlan, StepResult
from pdserve.ids import Attempt, RequestId
from pdserve.kernels.gpu.rows import Choice, Row
from pdserve.model.config import ModelConfig
from pdserve.model.dummy import dummy_weights
from pdserve.model.llama import Model
from pdserve.model.loading import load_model
from pdserve.sampling import SamplingParams

VOCAB = 300
PAGE_SIZE, NUM_PAGES = 16, 80
PROMPT_LENS = (1, 15, 16, 17, 40, 70, 100)
NUM_TOKENS = 32
LIMITS = StepLimits(max_num_seqs=6, max_num_batched_tokens=48, max_model_len=256)
WEIGHT_SCALE = 4.0  # makes random models say more than one thing
_Step = TypeVar("_Step")
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
    "eos_token_id": 5,
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


@dataclass(frozen=True, slots=True)
class Work:
    """Prompts of some lengths, and how many tokens are to follow each."""

    prompt_lens: Seq[int] = PROMPT_LENS
    num_tokens: int = NUM_TOKENS


def run(choice: Choice) -> list[Row]:
    """Compare each family's texts; a row fails if one token differs."""
    rows = []
    for family in FAMILIES:
        name = f"engine {family}"
        if choice.wants(name):
            wrong = different_texts(family, torch.device("cuda"), Work())
            note = (
                f"sequences {wrong} differ" if wrong else f"{len(PROMPT_LENS)} sequences of {NUM_TOKENS} tokens agree"
            )
            rows.append(Row(name, note=note, failed=bool(wrong)))
    return rows


def different_texts(family: str, device: torch.device, work: Work) -> list[int]:
    """Return which sequences the engine over the kernels continues otherwise than the one in plain torch."""
    config = ModelConfig.from_hf({**SHAPE, **FAMILIES[family]})
    kernels = CudaRunner(_model(config, device), NUM_PAGES, PAGE_SIZE, LIMITS)
    if device.type == "cuda":
        kernels.capture()
    plain = Runner(_model(config, torch.device("cpu")), NUM_PAGES, PAGE_SIZE)
    ours = _texts(work, kernels.start, kernels.finish, num_running=2)
    theirs = _texts(work, lambda plan: plan, plain.run, num_running=1)
    pairs = zip(ours, theirs, strict=True)
    return [order for order, (text, expected) in enumerate(pairs) if text != expected]


def _model(config: ModelConfig, device: torch.device) -> Model:
    weights = ((name, w if w.ndim == 1 else w * WEIGHT_SCALE) for name, w in dummy_weights(config))
    return load_model(config, weights, torch.float32, device=device)


def _texts(
    work: Work, start: Callable[[StepPlan], _Step], finish: Callable[[_Step], StepResult], num_running: int
) -> list[list[int]]:
    """Compute the work's texts, with as many steps running at a time as they are planned ahead."""
    limits = Limits(LIMITS.max_num_seqs, LIMITS.max_num_batched_tokens, LIMITS.max_model_len, frozenset())
    scheduler = Scheduler(KvCache(NUM_PAGES, PAGE_SIZE, None), limits)
    for sequence in _sequences(work):
        scheduler.add(sequence)
    texts: list[list[int]] = [[] for _ in work.prompt_lens]
    running: deque[tuple[StepPlan, _Step]] = deque()
    while True:
        if len(running) < num_running and (plan := scheduler.plan()) is not None:
            running.append((plan, start(plan)))
            continue
        if not running:
            return texts
        done, step = running.popleft()
        for outcome in scheduler.commit(done, finish(step)):
            if isinstance(outcome, Sampled):
                texts[outcome.sequence.order].append(outcome.token.token_id)


def _sequences(work: Work) -> Iterator[Sequence]:
    rng = random.Random(0)
    for order, length in enumerate(work.prompt_lens):
        params = replace(PARAMS[order % len(PARAMS)], max_tokens=work.num_tokens, ignore_eos=True, seed=order)
        prompt = tuple(rng.randrange(VOCAB) for _ in range(length))
        job = Job(RequestId(order.to_bytes(16)), Attempt(0), prompt, length, params, (0,))
        yield Sequence(job, (0,), list(prompt), order)
