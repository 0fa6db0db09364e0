"""What steps of a model take on a CPU, in one or more trees of pdserve that take turns.

    PYTHONPATH=tests/laboratory python -m lab.steps MODEL ROUNDS TREE...

The model is random, in bfloat16: `small` has the shape of SmolLM2-135M, `latents` the attention of DeepSeek-V2-Lite,
`delta` the layers of Qwen3-Next, `space` those of Falcon-H1, `conv` those of LFM2. Each tree's engine is a process of
its own, alone and in one thread.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import process_time

import torch

from pdserve.base.ids import PageId
from pdserve.engine.runner import Runner
from pdserve.engine.step import Chunk, SampleSpec, StepPlan
from pdserve.model.config import ModelConfig
from pdserve.model.layer_groups import LayerGroup, layer_groups
from pdserve.model.loading import dummy_weights, load_model
from pdserve.protocol.sampling import SamplingParams

_SIZES: dict[str, object] = {
    "vocab_size": 8192,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "max_position_embeddings": 16_384,
    "eos_token_id": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
_OWN: dict[str, dict[str, object]] = {
    "small": {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 49_152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
    },
    "latents": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "first_k_dense_replace": 8,  # attention is what is measured
    },
    "delta": {
        "architectures": ["Qwen3NextForCausalLM"],
        "num_attention_heads": 8,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256,
    },
    "space": {
        "architectures": ["FalconH1ForCausalLM"],
        "num_key_value_heads": 4,
        "mamba_d_ssm": 1536,
        "mamba_n_heads": 24,
        "mamba_d_state": 256,
        "ssm_multipliers": [0.7, 1.4, 0.6, 1.2, 0.8],
        "attention_out_multiplier": 0.9,
    },
    "conv": {
        "architectures": ["Lfm2ForCausalLM"],
        "num_hidden_layers": 16,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    },
}
_FEW, _MANY = ((1, 2000, 1), (16, 2000, 1)), ((1, 512, 512), (1, 2048, 2048))
STEPS = {
    "latents": (*_FEW, (1, 8000, 1), (16, 8000, 1), (1, 2048, 2048), (1, 8000, 512)),
    "small": (*_MANY, (8, 1024, 1024)),  # prompts
    **dict.fromkeys(("delta", "space", "conv"), (*_FEW, *_MANY)),
}
PAGE_SIZE, MOST_TOKENS, WARM_UP = 16, 16 * 8000, 2


def plan_of(groups: Sequence[LayerGroup], count: int, context: int, length: int) -> StepPlan:
    """Return a step of the last tokens of so many sequences."""
    chunks, size = [], groups[0].page_size
    num_pages = -(-context // size)
    for row in range(count):
        sample = SampleSpec(SamplingParams(temperature=0.0), 0, 0, (), (), forbid_stops=False, sequence=(0, row))
        pages, *others = (
            [PageId((row * len(groups) + place) * num_pages + page) for page in range(num_pages)]
            for place in range(len(groups))
        )
        tokens = [5 + (7 * row + i) % 5000 for i in range(length)]
        chunks.append(Chunk(tokens, context - length, pages, (sample,), other_pages=tuple(others)))
    return StepPlan(tuple(chunks))


def serve(name: str) -> None:
    """Run the step that each line of the input names, and write the milliseconds of processor time that it took."""
    torch.set_num_threads(1)
    config = ModelConfig.from_hf({**_SIZES, **_OWN[name]})
    groups = layer_groups(config, PAGE_SIZE)
    num_pages = len(groups) * (MOST_TOKENS // groups[0].page_size + 16)
    runner = Runner(load_model(config, dummy_weights(config), torch.bfloat16), num_pages, PAGE_SIZE, ())
    runner.kv.normal_(std=0.3)
    plans = [plan_of(groups, *step) for step in STEPS[name]]
    for line in sys.stdin:
        begun_s = process_time()
        runner.run(plans[int(line)])
        sys.stdout.write(f"{1e3 * (process_time() - begun_s)}\n")
        sys.stdout.flush()


class Engine:
    """The engine of one tree, in a process of its own."""

    def __init__(self, tree: str, name: str) -> None:
        path = os.pathsep.join((tree, str(Path(__file__).parents[1])))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "lab.steps", name],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def step_ms(self, place: int) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{place}\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


def compare(name: str, rounds: int, trees: Sequence[str]) -> None:
    """Write of each step the medians of its times, and of its ratios to the first tree's."""
    engines = [Engine(tree, name) for tree in trees]
    for place, step in enumerate(STEPS[name]):
        taken = []
        for turn in range(WARM_UP + (rounds if step[2] == 1 else max(3, rounds // 4))):
            ms = [0.0] * len(engines)
            for offset in range(len(engines)):
                at = (offset + turn) % len(engines)
                ms[at] = engines[at].step_ms(place)
            taken.append(ms)
        del taken[:WARM_UP]
        medians = ", ".join(f"{median(column):.1f}" for column in zip(*taken, strict=True))
        ratios = ", ".join(f"{median(ms[at] / ms[0] for ms in taken):.2f}" for at in range(1, len(trees)))
        sys.stdout.write(f"{step}: {medians} ms; to the first: {ratios}\n")
        sys.stdout.flush()
    for engine in engines:
        engine.close()


if __name__ == "__main__":
    serve(sys.argv[1]) if len(sys.argv) == 2 else compare(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
