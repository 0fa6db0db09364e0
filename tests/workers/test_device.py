"""Where a worker's engine runs, and what is said when it cannot."""

from pathlib import Path

import pytest
import torch

from pdserve.config import WorkerConfig
from pdserve.errors import ConfigError
from pdserve.kvlayout import KvLayout
from pdserve.processor import allocator_problem
from pdserve.worker.boot import engine_device, pages_asked_for


def config_of(**settings: object) -> WorkerConfig:
    given = {
        "model": "m",
        "role": "prefill",
        "worker_id": "w",
        "routers": ("host:1",),
        "secret_file": Path("secret"),
        **settings,
    }
    return WorkerConfig.model_validate(given)


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
    with pytest.raises(ConfigError, match=r"^device: cuda is asked for, and torch sees no CUDA device"):
        engine_device(config_of(device="cuda"))


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
