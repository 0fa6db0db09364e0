"""Where a worker's engine runs, and what is said when it cannot."""

import ctypes
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from worker_settings import needed

from pdserve.base.errors import ConfigError
from pdserve.executor.loading import engine_device, pages_asked_for
from pdserve.executor.no_gpu import driver_version, why_no_gpu
from pdserve.protocol.kvlayout import KvLayout
from pdserve.settings.config import WorkerConfig
from pdserve.settings.processor import allocator_problem
from pdserve.worker.boot import build_engine, open_model

LATENTS = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_key_value_heads": 4,
    "head_dim": 16,
    "q_lora_rank": 24,
    "kv_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "first_k_dense_replace": 1,
}


def config_of(**settings: object) -> WorkerConfig:
    return WorkerConfig.model_validate({**needed(Path("m")), "role": "prefill", **settings})


def test_left_to_itself_a_worker_runs_on_the_cpu() -> None:
    assert engine_device(config_of()) == torch.device("cpu")


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
@pytest.mark.parametrize("given", ["expandable_segments:True", "backend:native, Expandable_Segments : true"])
def test_an_allocator_whose_memory_nobody_can_be_given_is_refused(
    name: str, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, given)
    with pytest.raises(ConfigError, match=f"^{name}: expandable_segments"):
        engine_device(config_of(device="cuda"))
    assert engine_device(config_of()) == torch.device("cpu")
    monkeypatch.setenv(name, "expandable_segments:False")
    assert not allocator_problem()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^device: cuda is asked for, and torch sees no CUDA device: \w+"):
        engine_device(config_of(device="cuda"))


@pytest.mark.parametrize(
    ("built_for", "driver", "visible", "reason"),
    [
        (None, (13, 0), None, r"torch \S+ is built without CUDA"),
        ("12.8", None, None, r"no NVIDIA driver.*libcuda\.so\.1"),
        ("13.0", (12, 4), None, r"the driver knows CUDA 12\.4, torch is built for 13\.0: update the driver"),
        ("12.8", (12, 4), "", r"CUDA_VISIBLE_DEVICES='' leaves none"),
        ("12.8", (13, 0), "7", r"CUDA_VISIBLE_DEVICES='7' leaves none"),
        ("12.8", (13, 0), None, r"nvidia-smi"),
    ],
)
def test_why_torch_sees_no_gpu_is_said_with_what_helps(
    built_for: str | None, driver: tuple[int, int] | None, visible: str | None, reason: str
) -> None:
    assert re.search(reason, why_no_gpu(built_for, driver, visible))


@pytest.mark.parametrize(("status", "known"), [(0, (12, 4)), (100, None)])
def test_the_driver_is_asked_for_its_version(
    status: int, known: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(found: "ctypes._Pointer[ctypes.c_int]") -> int:
        ctypes.cast(found, ctypes.POINTER(ctypes.c_int))[0] = 12040
        return status

    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(cuDriverGetVersion=version))
    assert driver_version() == known


def test_a_machine_without_a_driver_knows_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert driver_version() is None


@pytest.mark.parametrize(
    ("changes", "page_size", "field"),
    [
        ({"head_dim": 24}, 16, "head_dim must be a multiple of 16 up to 256, got 24"),
        ({"head_dim": 512}, 16, "head_dim must be a multiple of 16 up to 256, got 512"),
        ({}, 48, "page_size must be one of"),
        ({"num_attention_heads": 512}, 16, "num_heads must be 1 to 128 times num_kv_heads, got 512"),
        ({**LATENTS, "kv_lora_rank": 520}, 16, "value_dim must be a multiple of 8 from 16 to 512, got 520"),
        ({**LATENTS, "qk_rope_head_dim": 80, "head_dim": 80}, 16, "head_dim must be 1 to 64 more than value_dim 48"),
    ],
)
def test_shapes_without_a_kernel_are_refused_before_a_weight_is_read(
    tmp_path: Path, changes: dict[str, object], page_size: int, field: str
) -> None:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 64}
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 30, **heads, **changes}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"], **shape}))
    config = config_of(model=str(tmp_path), device="interpreter", page_size=page_size, load_format="dummy")
    read: list[float] = []
    with pytest.raises(ConfigError, match=f"^device: interpreter does not serve this model: {field}"):
        build_engine(config, open_model(config), b"secret", read.append)
    assert not read


@pytest.mark.parametrize("mover", ["nixl", "collective"])
def test_a_gpu_is_refused_for_no_movers_sake(mover: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert engine_device(config_of(device="cuda", mover=mover)) == torch.device("cuda", 1)


def test_memory_that_holds_no_page_is_refused() -> None:
    layout = KvLayout("w", 2, 2, 8, 16, "float32")
    cpu = torch.device("cpu")
    assert pages_asked_for(config_of(kv_cache_memory_bytes=layout.page_bytes), layout, cpu) == 1
    with pytest.raises(ConfigError, match=r"^kv_cache_memory_bytes: 4095 have no room for a page of 4096 bytes"):
        pages_asked_for(config_of(kv_cache_memory_bytes=4095), layout, cpu)
