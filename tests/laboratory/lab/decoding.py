"""What a decode step of each family takes on a CPU, on random weights, from an engine alone in one thread."""

import json
from statistics import median
from time import process_time

import torch
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pdserve.base.ids import PageId
from pdserve.base.values import value
from pdserve.checkpoint.checkpoint import in_form
from pdserve.engine.runner import Runner
from pdserve.engine.step import Chunk, Phase, SampleSpec, StepPlan
from pdserve.model.config import ModelConfig
from pdserve.model.loading import dummy_weights, load_model
from pdserve.protocol.sampling import SamplingParams

FAMILIES = ("llama", "granite", "gemma", "glm4", "olmo2", "starcoder2", "nemotron", "apertus", "phi")
_SIZES = {
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "eos_token_id": 1,
    "bos_token_id": 0,
    "pad_token_id": None,
}
_OWN = {"granite": {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0}}  # as in 3.x
_CONTEXT, _PAGE_SIZE = 256, 16  # tokens
_WARM_UP = 10  # steps


@value
class DecodeSpeed:
    """CPU milliseconds of one decode step."""

    family: str
    num_sequences: int
    least_ms: float
    median_ms: float


def measure_decoding(family: str, counts: tuple[int, ...], num_steps: int) -> list[DecodeSpeed]:
    """Measure steps of so many sequences, with weights in codes of 8 bits and states in bfloat16."""
    runner = loaded(family, max(counts))
    return [measured(runner, family, count, num_steps) for count in counts]


def loaded(family: str, most: int) -> Runner:
    """Return an engine for up to `most` sequences."""
    config = AutoConfig.for_model(family, **_SIZES, **_OWN.get(family, {}))
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]]
    ours = ModelConfig.from_hf(json.loads(config.to_json_string()))
    model = load_model(ours, in_form(dummy_weights(ours), "int8"), torch.bfloat16)
    return Runner(model, most * (_CONTEXT // _PAGE_SIZE), _PAGE_SIZE, ())


def step_of(count: int, context: int, length: int = 1, num_groups: int = 1) -> StepPlan:
    """Return a step of the last `length` tokens of so many sequences, each of which has `context` tokens then.

    num_groups: of layers, whose pages are no larger than those of others are here.
    """
    per_row, phase = -(-context // _PAGE_SIZE), Phase.DECODE if length == 1 else Phase.PROMPT
    greedy, chunks = SamplingParams(temperature=0.0), []
    for row in range(count):
        pages, *others = [
            tuple(PageId((group * count + row) * per_row + page) for page in range(per_row))
            for group in range(num_groups)
        ]
        sample = SampleSpec(greedy, 0, 0, (), (), forbid_stops=False, sequence=(0, row))
        tokens = [5 + (7 * row + place) % 5000 for place in range(length)]
        chunks.append(Chunk(tokens, context - length, pages, (sample,), phase, other_pages=tuple(others)))
    return StepPlan(tuple(chunks))


def measured(runner: Runner, family: str, count: int, num_steps: int) -> DecodeSpeed:
    plan, taken_ms = step_of(count, _CONTEXT), list[float]()
    for _ in range(_WARM_UP + num_steps):
        begun_s = process_time()
        runner.run(plan)
        taken_ms.append(1e3 * (process_time() - begun_s))
    return DecodeSpeed(family, count, min(taken_ms[_WARM_UP:]), median(taken_ms[_WARM_UP:]))
