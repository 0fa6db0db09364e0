"""Ranks with memory of their own have a region each; what was not compared with one rank is refused by name."""

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
import torch
from long_cases import long
from model_zoo import write_model
from worker_settings import built, settings_of

from pdserve.base.clock import new_incarnation
from pdserve.base.errors import ConfigError
from pdserve.base.ids import PageId, Peer, WorkerId
from pdserve.checkpoint.open import open_checkpoint
from pdserve.executor import rank_memory
from pdserve.executor.layouts import describe_layout, page_digest
from pdserve.executor.rank_memory import own_layout, own_pages, region_of
from pdserve.kvtransfer.region import decode_ranks
from pdserve.kvtransfer.routes import Share
from pdserve.model.weights import Rank
from pdserve.protocol.kvlayout import KvLayout
from pdserve.settings.config import WorkerConfig, load_config
from pdserve.settings.degrees import Degrees
from pdserve.worker.boot import build_mover

TWO = {"tensor_parallel_size": 2}


def worker(folder: Path, **settings: object) -> WorkerConfig:
    return settings_of(folder, **{"num_pages": 64, "dtype": "float32", "rank_memory": "own", **settings})


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"mover": "collective"}, "rank_memory: own is not served with this mover yet: collective"),
        ({"device": "cuda", **TWO, "mover": "collective"}, "2 on cuda is not served with this mover yet: collective"),
        (
            {"device": "cuda", "attention_backend": "flashinfer"},
            "rank_memory: own is not served with this attention_backend yet: flashinfer",
        ),
        ({"device": "interpreter", **TWO, "rank_memory": "shared"}, "shared is served on CPUs; each of 2 ranks on"),
        ({"kv_cache_dtype": "int8", "mover": "collective"}, "own is not served with this mover yet: collective"),
    ],
)
def test_settings_that_were_not_tried_with_memory_of_ranks_are_refused(
    tmp_path: Path, settings: dict[str, object], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        worker(tmp_path, **settings)


@pytest.mark.parametrize(
    ("family", "settings", "problem"),
    [
        ("gemma3", {"pipeline_parallel_size": 2}, "2 pipeline stages of a model with layers in several groups"),
        ("llama4", {}, "a model with attention that torch computes"),
        ("deepseek-v2", {"tensor_parallel_size": 4}, "4 ranks that hold the same 3 runs of a page"),
    ],
)
def test_models_that_were_not_tried_with_memory_of_ranks_are_refused(
    tmp_path: Path, family: str, settings: dict[str, object], problem: str
) -> None:
    write_model(family, tmp_path)
    config = worker(tmp_path, **settings)
    with pytest.raises(ConfigError, match=f"rank_memory: own is not served for {problem}"):
        built(config)


@pytest.mark.parametrize(
    ("family", "settings", "shares"),
    [
        ("deepseek-v3", TWO, [Share((0, 3), (0, 1), copy, 2) for copy in (0, 1)]),
        *long(
            ("llama3", {}, [Share((0, 3), (0, 2))]),
            ("llama3", TWO, [Share((0, 3), (0, 1)), Share((0, 3), (1, 2))]),
            ("llama3", {"pipeline_parallel_size": 2}, [Share((1, 3), (0, 2)), Share((0, 1), (0, 2))]),
            ("gemma3", TWO, [Share((0, 2), (0, 1)), Share((0, 2), (1, 2))]),
            (
                "llama3",
                {"tensor_parallel_size": 4},
                [Share((0, 3), head, copy, 2) for head in ((0, 1), (1, 2)) for copy in (0, 1)],
            ),
        ),
    ],
)
def test_each_rank_describes_memory_of_its_own_with_its_heads_or_layers(
    tmp_path: Path, family: str, settings: dict[str, object], shares: list[Share]
) -> None:
    write_model(family, tmp_path)
    config = worker(tmp_path, **settings)
    engine = built(config)
    mover = build_mover(config, Peer(WorkerId("w"), new_incarnation()), engine.executor, lambda _: None, b"secret")
    described = decode_ranks(mover.describe())
    assert mover.first_mismatch((PageId(3), PageId(9)), (0, 0)) == 0
    mover.close()
    engine.executor.close()
    assert [share for share, _ in described] == shares
    assert {each.num_pages for _, each in described} == {64}
    assert sum(each.page_bytes for _, each in described) == shares[0].num_copies * engine.layout.page_bytes
    assert engine.layout.page_digest == "xxh3_runs"


@pytest.mark.parametrize("size", [2, "2"])
@pytest.mark.parametrize("device", ["cuda", "interpreter"])
def test_ranks_with_devices_have_memory_of_their_own_unasked(tmp_path: Path, device: str, size: int | str) -> None:
    config = load_config(
        WorkerConfig,
        flags={
            "model": "m",
            "secret_file": tmp_path,
            "role": "prefill",
            "worker_id": "w",
            "routers": ("127.0.0.1:1",),
            "device": device,
            "tensor_parallel_size": size,
        },
    )
    assert (config.rank_memory, config.degrees.tensor) == ("own", 2)


def test_workers_with_shared_and_with_own_memory_are_not_paired(tmp_path: Path) -> None:
    layout = KvLayout("w", 2, 2, 4, 16, "float32")
    on_cpu, on_gpu = (replace(layout, page_digest=page_digest(device)) for device in ("cpu", "cuda"))
    model = open_checkpoint(write_model("llama3", tmp_path)).config
    pairs = [(each, own_layout(model, each, Degrees(2))) for each in (on_cpu, on_gpu)]
    problems = [shared.difference(own) for shared, own in pairs]
    assert problems == ["page_digest: xxh3 != xxh3_runs", "page_digest: splitmix64 != splitmix64_runs"]
    assert pairs[0][1].difference(pairs[1][1]) == "page_digest: xxh3_runs != splitmix64_runs"
    assert not pairs[0][1].is_convertible


def test_pages_in_parts_are_converted_for_nobody(tmp_path: Path) -> None:
    model = open_checkpoint(write_model("llama3", tmp_path)).config
    shared = [describe_layout(model, "w", 16, dtype, "cpu") for dtype in ("float32", "int8", "fp8_e4m3")]
    own = [own_layout(model, each, degrees) for each, degrees in zip(shared, map(Degrees, (1, 2, 4)), strict=True)]
    assert [one.difference(other) for one, other in combinations(shared, 2)] == [None] * 3
    problems = [one.difference(other) for one, other in combinations(own, 2)]
    assert problems == ["dtype: float32 != int8", "dtype: float32 != fp8_e4m3", "dtype: int8 != fp8_e4m3"]
    assert own[1].difference(own_layout(model, shared[1], Degrees(1))) is None, "degrees may differ"


def test_memory_on_a_device_is_a_region_with_the_ranks_share_and_its_place_in_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = worker(write_model("llama3", tmp_path), **TWO)
    config = open_checkpoint(tmp_path).config
    layout = own_layout(config, describe_layout(config, "", 16, "float32", "cuda"), two.degrees)
    own = own_pages(Rank.at(1, two.degrees), layout)
    asked: list[object] = []
    monkeypatch.setattr(rank_memory, "device_region", lambda *given: asked.append(given))
    region_of(torch.zeros(3 * own.page_bytes, dtype=torch.uint8, device="meta"), own)
    ((view, share, whole),) = asked
    assert tuple(view.shape) == (3, own.page_bytes)
    assert (share, whole) == (Share((0, config.num_layers), (1, 2)), Share((0, config.num_layers), (0, 2)))
    assert layout.page_digest == "splitmix64_runs"
