"""A worker of ranks with a device each draws the tokens of the CPU's engine, and ends with any of its ranks.

Ranks are processes over gloo, on a CPU on which Triton interprets their kernels.
"""

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from engine_runs import Asked, answers, engine_of, tokens_of, worker_config
from greedy_runs import spec
from looking import until
from model_zoo import prompt, write_model
from published_formats import write_in_mxfp4
from rank_pages import pages_of, ranks, whole_page
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from pdserve.base.errors import ConfigError, DeviceError
from pdserve.base.ids import PageId
from pdserve.base.processes import DEVICE_EXIT_STATUS
from pdserve.engine.runner import EngineRunner
from pdserve.engine.runner_cuda import CudaRunner
from pdserve.engine.step import Bits, Chunk, StepPlan, StepResult, Targets
from pdserve.executor import followers, rank_group
from pdserve.executor.followers import Followers
from pdserve.executor.rank_group import GroupRanks, device_of_rank, within
from pdserve.executor.ranked import STUCK_S, Leading
from pdserve.kvtransfer.routes import Share
from pdserve.model.weights import Rank
from pdserve.protocol.sampling import SamplingParams
from pdserve.settings.config import WorkerConfig

RANKS: Mapping[str, object] = {"device": "interpreter", "tensor_parallel_size": 2}

ALONE: Mapping[str, object] = {"device": "interpreter", "rank_memory": "own"}

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
SEEDED = SamplingParams(seed=4, temperature=0.8, top_p=0.9, repetition_penalty=1.3, max_tokens=4, ignore_eos=True)
WORDS = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, bad_word_ids=((1, 2), (3, 4)))  # the host waits
ASKED: list[Asked] = [
    (prompt(45, 1), GREEDY),  # in chunks, while others decode
    (prompt(5, 2), SamplingParams(seed=3, temperature=1.2, n=2, max_tokens=4, ignore_eos=True)),  # a page is copied
    (prompt(16, 3), SEEDED),
    (prompt(7, 4), WORDS),
]
AGAIN: list[Asked] = [([*prompt(45, 1), 7, 8], GREEDY)]  # behind pages that are cached
NINE_HEADS = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 144, "vocab_size": 511}
WINDOWS = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 24,
}
PLAN = StepPlan((Chunk((1, 2, 3), 0, (PageId(3),), (spec(),)), Chunk((7, 8), 0, (PageId(1),), (spec(),))))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("llama3", tmp_path_factory.mktemp("model"), num_hidden_layers=1)


class Broken:
    """A grammar that fails where tokens are sampled, behind the last sum."""

    is_ready = True

    def fill(self, output_ids: Sequence[int], bits: Bits) -> None:
        raise ZeroDivisionError(len(output_ids))


def config_of(folder: Path, **settings: object) -> WorkerConfig:
    return worker_config(folder, **{**RANKS, **settings})


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "shape"),
    [
        ("llama3", NINE_HEADS),  # one KV head, and two; 255 tokens, and 256
        ("gpt-oss", {"num_hidden_layers": 2, "sliding_window": 24}),
        ("gemma3", WINDOWS),
        ("deepseek-v3", {"num_hidden_layers": 2}),
        ("qwen3-moe", {}),
        ("llama3", {}),
        ("qwen2", {}),
        ("qwen3", {}),
    ],
)
def test_two_ranks_with_devices_draw_the_tokens_of_one_and_of_the_cpus_engine(
    family: str, shape: dict[str, object], tmp_path: Path
) -> None:
    folder, found = write_model(family, tmp_path, **{"num_hidden_layers": 1, **shape}), []
    for settings, depth in (({}, 1), (ALONE, 2), (RANKS, 2)):
        with engine_of(worker_config(folder, **settings)) as engine:
            assert len(ranks()) == (settings == RANKS)
            first, second = answers(engine, ASKED, depth), answers(engine, AGAIN, depth)
            assert second.num_cached == 32
            assert (first.num_ahead > 3) == (depth == 2)
            found.append((first.texts, second.texts))
    assert found[1] == found[0]
    assert found[2] == found[0]


@pytest.mark.long
def test_two_ranks_with_devices_keep_mxfp4_and_draw_the_tokens_of_one(tmp_path: Path) -> None:
    folder, found = write_in_mxfp4(tmp_path, num_hidden_layers=2, sliding_window=24, intermediate_size=160)[1], []
    for settings in (ALONE, RANKS):
        with engine_of(worker_config(folder, quantization="mxfp4", **settings)) as engine:
            found.append((answers(engine, ASKED).texts, answers(engine, AGAIN).texts))
    assert found[0] == found[1]


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "shape"),
    [
        ("llama3", {**NINE_HEADS, "num_hidden_layers": 1}),
        ("gpt-oss", {"num_hidden_layers": 2, "sliding_window": 24}),
    ],
)
@pytest.mark.parametrize("code", ["int8", "fp8_e4m3"])
def test_two_ranks_with_devices_keep_coded_rows_and_draw_the_tokens_of_one(
    family: str, shape: dict[str, object], code: str, tmp_path: Path
) -> None:
    folder, found = write_model(family, tmp_path, **shape), []
    for settings in ({}, ALONE, RANKS):
        with engine_of(worker_config(folder, kv_cache_dtype=code, **settings)) as engine:
            assert engine.layout.dtype == code
            found.append((answers(engine, ASKED).texts, answers(engine, AGAIN).texts))
    assert found[1] == found[0]
    assert found[2] == found[0]


def test_each_rank_has_pages_of_its_own_heads_and_scores_and_copies_as_one_rank_on_a_cpu_does(tmp_path: Path) -> None:
    model, whole = write_model("llama3", tmp_path, num_hidden_layers=1), Share((0, 1), (0, 2))
    chunk = Chunk((1, 2, 3), 0, (PageId(5),), (spec(),), targets=Targets((2, 3), 2))
    plans = StepPlan((chunk,)), StepPlan((Chunk((9,), 3, (PageId(4),), (spec((1,)),)),), ((PageId(5), PageId(4)),))
    found, pages = [], []
    for settings in ({"rank_memory": "own"}, RANKS, ALONE):
        with engine_of(worker_config(model, **settings)) as engine:
            parts = pages_of(engine.executor, whole)
            assert sum(part.there.page_bytes for part in parts) == engine.layout.page_bytes
            first, second = (engine.executor.start(plan).result(60) for plan in plans)
            (scores,) = first.prompts.values()
            found.append((engine.layout, tokens_of(first), tokens_of(second), scores.top_ids))
            pages.append([whole_page(parts, page) for page in (4, 5)])
    assert found[0] == found[1] == found[2]
    assert np.any(pages[0][0] != pages[0][1]), "a token was written behind the copy"
    for each in pages[1:]:
        np.testing.assert_allclose(each, pages[0], atol=1e-5)


@pytest.mark.long
def test_closing_waits_for_steps_launched_ahead_on_all_ranks(model: Path) -> None:
    with engine_of(config_of(model)) as engine:
        before = tokens_of(engine.executor.start(PLAN).result(60))
        steps = [engine.executor.start(PLAN) for _ in range(2)]
    assert [tokens_of(step.result(0)) for step in steps] == [before, before]


@pytest.mark.long
def test_a_request_that_cannot_be_sampled_fails_alone_beside_steps_launched_ahead(model: Path) -> None:
    wrong = replace(spec(), matcher=Broken())
    plan = StepPlan((PLAN.chunks[0], replace(PLAN.chunks[1], samples=(wrong,))))
    with engine_of(config_of(model)) as engine:
        steps = [engine.executor.start(each) for each in (PLAN, plan, PLAN)]
        good, failed, again = (step.result(60) for step in steps)
    assert list(failed.failed) == [1]
    assert tokens_of(failed)[0] == tokens_of(good)[0]
    assert tokens_of(again) == tokens_of(good)


@pytest.mark.long
def test_a_step_that_fails_where_other_ranks_wait_is_a_broken_device(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_of(config_of(model)) as engine:

        def broken(ranks: GroupRanks, x: Tensor, width: int) -> Tensor:
            raise ZeroDivisionError(len(x), width)

        monkeypatch.setattr(GroupRanks, "gather", broken)
        with pytest.raises(DeviceError, match="rank 1: it waits for another one"):
            engine.executor.start(PLAN).result(60)


def test_the_end_of_a_rank_ends_the_worker_with_the_status_of_a_broken_device(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    with engine_of(config_of(model)) as engine:
        monkeypatch.setattr(os, "_exit", ended.append)
        (rank,) = ranks()
        rank.suspend()
        step = engine.executor.start(PLAN)
        rank.kill()
        with pytest.raises(DeviceError):
            step.result(60)
        until(lambda: ended or None)
    assert ended == [DEVICE_EXIT_STATUS]


@pytest.mark.long
def test_a_rank_that_hangs_is_a_broken_device(model: Path) -> None:
    with engine_of(config_of(model, stalled_step_s=3.0)) as engine:
        (rank,) = ranks()
        rank.suspend()
        with pytest.raises(DeviceError, match="rank 1: it waits for another one, or is stopped"):
            engine.executor.start(PLAN).result(60)


@pytest.mark.long
def test_a_rank_that_is_frozen_for_a_while_launches_the_same_step(model: Path) -> None:
    with engine_of(config_of(model)) as engine:
        before = tokens_of(engine.executor.start(PLAN).result(60))
        (rank,) = ranks()
        rank.suspend()
        running = engine.executor.start(PLAN)
        with pytest.raises(TimeoutError):
            running.result(0.5)
        rank.resume()
        assert tokens_of(running.result(60)) == before


def test_what_takes_too_long_before_the_worker_serves_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ended, is_over = list[int](), threading.Event()
    monkeypatch.setattr(os, "_exit", lambda status: (ended.append(status), is_over.set()))
    with within(60.0, "steps"):
        pass
    with within(0.01, "steps"):
        assert is_over.wait(30)
    assert ended == [DEVICE_EXIT_STATUS]


def test_what_fails_once_ranks_have_met_is_a_broken_device(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(runner: CudaRunner, run: object) -> None:
        raise torch.OutOfMemoryError("no room for graphs")

    monkeypatch.setattr(CudaRunner, "capture", full)
    with pytest.raises(DeviceError, match="OutOfMemoryError: no room for graphs"), engine_of(config_of(model)):
        pass


def test_others_have_their_time_to_end_a_failed_step_once_the_first_ranks_device_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[object] = []

    class Rank0:
        kv = SimpleNamespace(device=torch.device("cuda", 0))
        has_broken = False

        def run(self, plan: StepPlan) -> StepResult:
            raise ZeroDivisionError

        def synchronize(self) -> None:
            done.append("computed")
            if self.has_broken:
                raise RuntimeError("CUDA error: an illegal access")

        def end(self, limit_s: float) -> None:
            done.append(limit_s)

    rank = Rank0()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: rank if device == rank.kv.device else None)
    leading = Leading(cast("EngineRunner", rank), cast("Followers", rank), lambda plan: done.append("begun"))
    with pytest.raises(ZeroDivisionError):
        leading.run(PLAN)
    assert done == ["begun", "computed", STUCK_S]
    rank.has_broken = True
    with pytest.raises(DeviceError, match="an illegal access"):
        leading.run(PLAN)


def test_fewer_gpus_than_ranks_are_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    with pytest.raises(ConfigError, match="tensor_parallel_size: 4 ranks need a GPU each, and 3 are visible here"):
        device_of_rank("cuda", 0, 4)
    assert [device_of_rank("cuda", index, 3) for index in range(3)] == [torch.device("cuda", i) for i in range(3)]
    assert chosen == [torch.device("cuda", index) for index in range(3)]
    assert device_of_rank("interpreter", 1, 4) == torch.device("cpu")


def test_ranks_that_meet_have_done_each_operation_that_is_not_captured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    done: list[str] = []

    class Gloo:
        def allreduce(self, xs: list[Tensor], options: object) -> None:
            done.append(f"sum of {xs[0].dtype}")

        def broadcast(self, xs: list[Tensor], options: object) -> None:
            done.append(f"broadcast of {xs[0].dtype}")

    monkeypatch.setattr(rank_group, "_gloo", lambda *given: Gloo())
    with (tmp_path / "store").open("w+") as store:
        GroupRanks(Rank(0, 2), torch.device("cpu")).join(store.fileno(), 60.0)
    assert done == ["sum of torch.float32", "broadcast of torch.int64"]


def test_nccl_leaves_it_to_the_worker_to_end_its_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    watching = ("ASYNC_ERROR_HANDLING", "ENABLE_MONITORING", "RETHROW_CUDA_ERRORS")
    names = ["NCCL_SOCKET_IFNAME", *(f"TORCH_NCCL_{name}" for name in watching)]

    class Nccl:
        class Options:
            _timeout: object = None

        def __init__(self, store: object, rank: int, size: int, options: Options) -> None:
            self.given = rank, size, options._timeout
            self.settings = {name: os.environ.get(name) for name in names}

    monkeypatch.setattr(c10d, "ProcessGroupNCCL", Nccl, raising=False)
    for name in names:
        monkeypatch.setenv(name, "eth0" if name == "NCCL_SOCKET_IFNAME" else "3")
    store = c10d.FileStore(str(tmp_path / "store"), 2)
    made = rank_group._nccl(store, Rank(1, 2), rank_group.FOREVER, rank_group.LOOPBACK)
    assert made.given == (1, 2, rank_group.FOREVER)
    assert made.settings == {**dict.fromkeys(names, "0"), "NCCL_SOCKET_IFNAME": "eth0"}, "the interface set stays"
    for host in (rank_group.LOOPBACK, "127.0.0.3"):
        monkeypatch.delenv("NCCL_SOCKET_IFNAME")
        made = rank_group._nccl(store, Rank(1, 2), rank_group.FOREVER, host)
        assert made.settings["NCCL_SOCKET_IFNAME"] == "=lo", "that of the address"


@pytest.mark.parametrize(
    ("family", "settings", "problem"),
    [
        ("lfm2", {"tensor_parallel_size": 4}, "2 KV heads of a model with states are not divided evenly in memory"),
        ("deepseek-v2", {"tensor_parallel_size": 4}, "4 ranks that hold the same 3 runs of a page"),
        ("llama3", {"quantization": "int8"}, "mlp.gate_proj.weight: 32 in units of 32 cannot be split over 2 ranks"),
        ("llama3", {"quantized_inputs": 8}, "quantized_inputs: 8 is not served by 2 ranks on interpreter; 16 is"),
    ],
)
def test_models_that_were_not_tried_on_ranks_with_devices_are_refused_before_any_starts(
    family: str, settings: dict[str, object], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = {"intermediate_size": 32} if "quantization" in settings else {}
    config = config_of(write_model(family, tmp_path, **shape), **settings)
    monkeypatch.setattr(followers, "start_rank", lambda *_: pytest.fail("a rank was started"))
    with pytest.raises(ConfigError, match=problem), engine_of(config):
        pass
