"""The engine's part of `make gpu`: its workload, what it needs, and how pages share a device's memory."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gpu_engine import Texts
from gpu_models import QWEN3_0_6B, drive
from gpu_throughput import Work, nano_vllm_work
from held_weights import held

from pdserve.engine.gpu_memory import GpuMemory, step_bytes
from pdserve.engine.kvcache import KvCache
from pdserve.engine.runner_cuda import CudaRunner
from pdserve.engine.scheduler import Limits, Scheduler
from pdserve.kernels.attention import PARTIALS_BYTES
from pdserve.model.config import ModelConfig
from pdserve.model.loading import dummy_weights, load_model, shapes_of
from pdserve.model.rope import Rope
from pdserve.protocol.paging import Paging
from pdserve.protocol.sampling import SamplingParams

ROOT = Path(__file__).resolve().parents[2]
WHAT_A_BARE_MACHINE_LACKS = (
    "gguf", "google", "grpc", "jinja2", "nixl_cu12", "psutil", "pydantic", "rich", "tokenizers", "transformers",
    "typer", "uvloop", "xxhash", "yaml",
)  # fmt: skip
CARRIED = ("nixl_cu12", "psutil", "xxhash")
FOUNDATIONS = ("base", "net", "observe", "protocol")  # of which a bare machine needs some modules
FOR_HANDOFFS = (
    "base.clock", "kvtransfer.backends.collective", "kvtransfer.backends.nixl", "kvtransfer.backends.pairing",
    "kvtransfer.device_region", "kvtransfer.mover",
)  # fmt: skip
BARE_IMPORT = """
import importlib, sys
root, tests, lacking, carried, wanted = sys.argv[1], sys.argv[2], *(each.split(",") for each in sys.argv[3:])
class Lacking:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in lacking:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Lacking())
sys.path[:0] = root, tests
import run_gpu
run_gpu.find_package()
sys.path.insert(0, root)
import gpu_sections
lacking = set(lacking).difference(carried)
for name in wanted:
    importlib.import_module(f"pdserve.{name}")
import pdserve.engine.runner_cuda as engine
assert engine.__file__.startswith(root), engine.__file__
"""


def test_the_workload_is_nano_vllms() -> None:
    work = nano_vllm_work()
    assert (sum(map(len, work.prompts)), work.output_tokens) == (142_827, 133_966)
    assert work.decode_bytes(114_688, 0) == 13_870_140_899_328


def test_what_make_gpu_runs_needs_no_more_than_a_bare_machine_has(tmp_path: Path) -> None:
    package = tmp_path / "pdserve"
    package.mkdir()
    skip = shutil.ignore_patterns("__pycache__")
    for name in ("engine", "executor", "model", *FOUNDATIONS):
        shutil.copytree(ROOT / "pdserve" / name, package / name, ignore=skip)
    for name in ("kernels", "kvtransfer"):
        shutil.copytree(ROOT / name, package / name, ignore=skip)
    shutil.copy(ROOT / "pdserve" / "__init__.py", package)
    names = map(",".join, (WHAT_A_BARE_MACHINE_LACKS, CARRIED, FOR_HANDOFFS))
    command = [sys.executable, "-P", "-c", BARE_IMPORT, str(tmp_path), str(ROOT / "tests" / "gpu"), *names]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("depth", [2, 1])
def test_driving_computes_every_token_of_the_work(depth: int) -> None:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "num_hidden_layers": 1}
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 32, "eos_token_id": 1}
    config = ModelConfig.from_hf({"architectures": ["Qwen3ForCausalLM"], **heads, **sizes})
    limits = Limits(2, 16, 32, frozenset())
    runner = CudaRunner(load_model(config, dummy_weights(config), torch.float32), 12, 16, limits)
    scheduler = Scheduler(KvCache(12, Paging.of(16), None), limits)
    work = Work(((1, 2, 3), (4,) * 20, (5,)), (2, 3, 1))
    timed = drive(runner, scheduler, work.sequences(SamplingParams(temperature=0.6)), depth)
    assert timed.num_tokens == 6
    assert not scheduler.running
    assert not scheduler.waiting
    assert 0.0 < timed.waiting_s < timed.total_s
    assert scheduler.cache.pool.num_free == 12


@pytest.mark.gpu
def test_the_engine_on_the_gpu_draws_the_tokens_of_the_cpus() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(ROOT / "tests" / "gpu" / "run_gpu.py"), "--only", "engine"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.long
@pytest.mark.parametrize("family", ["deepseek-v3, 16 heads", "qwen3.5, delta nets", "falcon-h1", "lfm2"])
def test_an_engine_over_other_rows_than_k_and_v_draws_the_tokens_of_the_cpus(family: str) -> None:
    """Of prompts that are computed in chunks, beside sequences that decode."""
    found = Texts.of(family, torch.device("cpu"), (15, 17, 3, 60), 4)
    assert (found.unlike_the_cpus, found.unlike_ahead) == ([], [])
    assert not any(unlike for unlike, _ in found.guessed.values())


def test_pages_take_what_is_left_of_their_share() -> None:
    alone = GpuMemory(1000, 700, 250)  # and 50 of CUDA's
    assert alone.pages_that_fit(0.9, 100, 100) == 5
    assert alone.pages_that_fit(0.9, 100, 501) == 0
    assert alone.pages_that_fit(0.3, 100, 1) == 0
    gib = 1 << 30
    shared = GpuMemory(80 * gib, 40 * gib, 16 * gib)  # another process has 23 of it
    assert shared.pages_that_fit(0.45, 4 * gib, gib) == 36 - 16 - 1 - 4
    assert GpuMemory(80 * gib, 10 * gib, 16 * gib).pages_that_fit(0.45, 4 * gib, gib) == 6, "no more than is free"


def test_what_torch_only_keeps_is_given_back_first(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [300]
    monkeypatch.setattr(torch.cuda, "empty_cache", kept.clear)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (700 - sum(kept), 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 250 + sum(kept))
    assert GpuMemory.of(torch.device("cuda", 0)) == GpuMemory(1000, 700, 250)


def test_a_larger_step_leaves_less_for_pages() -> None:
    config = ModelConfig.from_hf(QWEN3_0_6B | {"num_hidden_layers": 1})
    empty = {name: torch.empty(shape, device="meta") for name, shape in shapes_of(config).items()}
    model = load_model(config, held(empty), torch.float16, device="meta")
    sizes = ((8, 512, 4096), (8, 1024, 4096), (16, 512, 4096), (8, 512, 131072))
    limits = [Limits(*size, frozenset()) for size in sizes]
    small, wide, many, long = (step_bytes(model, each) for each in limits)
    assert PARTIALS_BYTES < small < wide
    assert step_bytes(model, replace(limits[0], num_speculative_tokens=1)) == many, "a guess is sampled behind as well"
    assert step_bytes(model, replace(limits[0], num_speculative_tokens=100)) == step_bytes(
        model, replace(limits[0], max_num_seqs=512)
    )
    assert many - small > 8 * config.vocab_size * 2 * 3  # a row's logits, and twice as much in captured steps
    assert (
        long - small
        == Rope(config.head_dim, config.design.layers[0].attention.rope, torch.device("meta"))
        .table(131072 - 4096)
        .nbytes
    )
