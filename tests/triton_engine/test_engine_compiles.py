"""What the engine launches for a Qwen3-0.6B step compiles for a Hopper chip, in its own shapes and without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
SHARED_BYTES = 232_448  # most that one program may use on sm_90
PROGRAM = """
import json, random, torch
from pdserve.engine.attention_triton import TritonAttention, graph_sizes
from pdserve.engine.batch import Batch, PoolShape
from gpu_models import PAGE_SIZE, QWEN3_0_6B
from pdserve.engine.layer_kinds import LayerKind
from pdserve.engine.step_inputs import step_inputs
from pdserve.engine.sampler_triton import KernelSampler
from pdserve.engine.step import Chunk, SampleSpec, StepPlan
import kernel_compiler as compiling
from pdserve.kernels.kv_rows import KvRows
from pdserve.kernels.staging import Staging
from pdserve.model.config import ModelConfig
from pdserve.model.design import Activation
from pdserve.kernels.cpu.attention import QkNorm
from pdserve.model.ops import Dense, RmsNorm
from pdserve.model.ops_cuda import CudaOps
from pdserve.model.rope import Rope
from pdserve.protocol.sampling import SamplingParams

META, NUM_PAGES = torch.device("meta"), 64
config = ModelConfig.from_hf(QWEN3_0_6B)

def empty(*shape):
    return torch.empty(shape, dtype=torch.bfloat16, device=META)

ASKED = (
    {"frequency_penalty": 1.0}, {"logit_bias": ((3, 1.0),)}, {"allowed_token_ids": (3, 4)}, {"top_k": 3},
    {"frequency_penalty": 1.0, "logit_bias": ((3, 1.0),), "allowed_token_ids": (3, 4), "temperature": 0.0},
)
POOL = PoolShape(NUM_PAGES, PAGE_SIZE, config.vocab_size)

def step(*query_lens, **params):
    spec = SampleSpec(SamplingParams(**params), 1, 0, (), (), False, (0, 0))
    chunks = tuple(Chunk((1,) * n, 100, tuple(range(-(-(n + 100) // PAGE_SIZE))), (spec,)) for n in query_lens)
    return Batch.of(StepPlan(chunks), POOL)

def launch(attention, batch, size):
    _, positions, slots = Staging(META).send(*step_inputs(batch, POOL, size))
    attention.plan(batch, positions, slots)
    heads, ops = config.num_heads + 2 * config.num_kv_heads, CudaOps()
    norm = QkNorm(empty(config.head_dim), empty(config.head_dim), 1e-6)
    attention.run(1, empty(size, heads, config.head_dim), norm)
    gate, up = (Dense(empty(config.design.layers[0].mlp.inner_size, config.hidden_size)) for _ in range(2))
    x = ops.norm(empty(size, config.hidden_size), RmsNorm(empty(config.hidden_size), 1e-6))
    ops.gated(x, ops.held_gate_up(gate, up), Activation.SILU)
    sampler = KernelSampler((1,), config.vocab_size, 4, META)
    sampler.sample(empty(len(batch.samples), config.vocab_size), batch.samples)

kv = empty(NUM_PAGES, config.num_layers, 2, config.num_kv_heads, PAGE_SIZE, config.head_dim)
ropes = [Rope(config.head_dim, config.design.layers[0].attention.rope, META)] * config.num_layers
rows = KvRows(config.head_dim, torch.bfloat16)
kind = LayerKind(0, config.design.layers[0].attention.scores, kv, tuple(ropes), rows)
attention = TritonAttention(config, 2048, graph_sizes(256), None, kind)
with compiling.recorded() as launches:
    launch(attention, step(1, 1, 1), 4)
    launch(attention, step(1, 200, 300), 501)
    for asked in ASKED:
        launch(attention, step(1, **asked), 1)
unique = {repr((each.kernel, each.signature, each.constants, each.options)): each for each in launches}
for each in unique.values():
    made = compiling.compile_launch(each, 90)
    print(json.dumps([made.kernel, made.spill_bytes, made.shared_bytes]))
"""


@pytest.mark.long  # each run compiles the kernels alone: tests/kernels/test_compile.py
def test_every_kernel_of_a_step_compiles_for_hopper_and_keeps_to_its_registers() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(str(TESTS / folder) for folder in ("support", "gpu"))
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    made = [json.loads(line) for line in done.stdout.splitlines()]
    names = [name for name, _, _ in made]
    assert {"attend", "combine", "rope_write", "rms_norm", "silu_mul", "scan", "choose", "count_ids"} <= set(names)
    assert names.count("attend") == 2  # once for single tokens, once for chunks
    assert [names.count(name) for name in ("scan", "choose", "count_ids")] == [1, 1, 1], "whatever is asked for"
    assert [(name, spilled) for name, spilled, _ in made if spilled] == []
    assert max(shared for _, _, shared in made) <= SHARED_BYTES
