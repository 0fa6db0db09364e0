"""Engines of several ranks with K and V in a byte a value answer as one engine with such rows, from the same pages.

No token that counts has a lead that another order of sums may take away.
"""

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_runs import Asked, answers, engine_of, worker_config
from greedy_runs import spec
from model_zoo import UNEVEN, prompt, write_model
from rank_pages import pages_of, ranks
from unlike_engines import UnlikeEngines

from pdserve.base.ids import PageId
from pdserve.checkpoint.checkpoint import in_form
from pdserve.checkpoint.hf_directory import open_directory
from pdserve.engine.runner import Runner
from pdserve.engine.step import Chunk, StepPlan
from pdserve.executor.layouts import describe_layout
from pdserve.executor.rank_frames import Setup, step_of
from pdserve.executor.rank_loading import load_follower
from pdserve.executor.rank_memory import mapped_pages, new_pages, own_layout, own_pages
from pdserve.executor.rank_sums import ranks_of, slots_bytes
from pdserve.kernels.cpu.build import Missing
from pdserve.kernels.cpu.library import library
from pdserve.kernels.kv_rows import KvRows
from pdserve.kvtransfer.routes import Share
from pdserve.model.loading import load_model
from pdserve.model.stages import Stages
from pdserve.model.weights import Rank
from pdserve.net.frames import Channel
from pdserve.protocol.kvlayout import KvCode
from pdserve.protocol.sampling import SamplingParams
from pdserve.worker.boot import Engine

LONG = pytest.mark.long
TENSOR, PIPELINE = "tensor_parallel_size", "pipeline_parallel_size"
SIZES = {"num_pages": 200, "max_model_len": 400}
NUM_TOKENS, NUM_GUESSED = 20, 60
FEW = (9, 10, 11)  # tokens of answers that repeat themselves
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
TWICE = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, n=2)  # a page is copied
SEEDED = SamplingParams(seed=3, temperature=1.2, n=2, max_tokens=4, ignore_eos=True)
ASKED: list[Asked] = [(prompt(150), TWICE), (prompt(5), SEEDED), (prompt(47), GREEDY)]
AGAIN: list[Asked] = [([*prompt(150), 7, 8], SEEDED)]  # behind pages that are cached


@pytest.mark.parametrize("memory", ["shared", "own"])
@pytest.mark.parametrize("code", ["int8", "fp8_e4m3"])
def test_a_follower_writes_the_bytes_of_one_rank_in_its_layers(tmp_path: Path, code: KvCode, memory: str) -> None:
    checkpoint = open_directory(write_model("qwen3", tmp_path))
    # Products of these weights have the same bits in each run; what torch computes of floats has not always.
    own_settings = {PIPELINE: 2, "num_pages": 4, "quantization": "int8", "rank_memory": memory}
    config = worker_config(tmp_path, **own_settings, kv_cache_dtype=code)
    model = load_model(checkpoint.config, in_form(checkpoint.weights(), "int8"), torch.float32)
    whole = Runner(model, 4, 16, code=code)
    rank, degrees, has_library = Rank.at(1, config.degrees), config.degrees, not isinstance(library(), Missing)
    pages, slots = new_pages(whole.kv.nbytes), new_pages(slots_bytes(degrees))
    common, kept, (own, theirs) = mapped_pages(os.dup(pages)), os.dup(slots), socket.socketpair()
    layout = describe_layout(checkpoint.config, "", 16, code, "cpu")
    held = pages if memory == "shared" else own_pages(rank, own_layout(checkpoint.config, layout, degrees))
    setup = Setup(config.model_dump_json(exclude_unset=True), str(tmp_path), "", 1, 2, slots, held, 4, has_library)
    with own, theirs:
        follow, region = load_follower(config, setup, Channel(theirs))
        plan = StepPlan((Chunk(prompt(21), 0, (PageId(3), PageId(1)), (spec(),)),))
        last = ranks_of(Rank.at(0, degrees), mapped_pages(kept), [], 60.0)
        assert isinstance(last, Stages)
        with ThreadPoolExecutor(1) as thread:
            taken = thread.submit(last.receive, 21, checkpoint.config.hidden_size, torch.float32)
            follow(step_of(plan))
            assert taken.result(60).isfinite().all()
        whole.run(plan)
    layers, found = rank.layers(checkpoint.config.num_layers), common.view(whole.kv.shape)
    if region is not None:
        own_rows = torch.from_numpy(region.view).view(4, whole.kv.shape[3], len(layers), 2, *whole.kv.shape[4:])
        assert not found.any(), "nothing of it is in memory that others see"
        found[:, layers] = own_rows.permute(0, 2, 3, 1, 4, 5)
    assert (region is not None) == (memory == "own")
    assert torch.equal(found[:, layers], whole.kv[:, layers])
    assert found[:, layers].any()
    assert not found[:, layers.stop :].any(), "another rank's"


@LONG
@pytest.mark.parametrize(
    ("code", "degrees", "memory"),
    [
        ("int8", {TENSOR: 2}, "shared"),
        ("fp8_e4m3", {TENSOR: 2}, "shared"),
        ("fp8_e4m3", {TENSOR: 4}, "shared"),
        ("int8", {PIPELINE: 2}, "shared"),
        ("int8", {}, "own"),
        ("int8", {TENSOR: 2}, "own"),
        ("fp8_e4m3", {TENSOR: 4}, "own"),  # two ranks have a copy of each KV head
        ("fp8_e4m3", {PIPELINE: 2}, "own"),
    ],
)
def test_a_worker_of_several_ranks_answers_as_one_engine_with_its_rows(
    tmp_path: Path, code: KvCode, degrees: dict[str, int], memory: str
) -> None:
    model, num_ranks = write_model("qwen3", tmp_path), max([1, *degrees.values()])
    engines = UnlikeEngines(model, (code, code))
    due = [engines.untied(length, NUM_TOKENS) for length in (150, 5, 47)]
    again, due_again = engines.untied_after(due[0][0], NUM_TOKENS)
    asked: list[Asked] = [(prompt, TWICE) for prompt, _ in due]
    settings, pages = {**SIZES, **degrees, "kv_cache_dtype": code}, []
    with engine_of(worker_config(model, **settings, rank_memory=memory)) as engine:
        assert len(ranks()) == num_ranks - 1
        assert engine.layout.dtype == code
        first, second = answers(engine, asked, 1), answers(engine, [(again, GREEDY)], 1)
        pages.append(parts_of_pages(engine))
    assert first.texts == {(number, n): tokens for number, (_, tokens) in enumerate(due) for n in (0, 1)}
    assert second.texts == {(0, 0): due_again}
    assert second.num_cached >= 144
    with engine_of(worker_config(model, **SIZES, kv_cache_dtype=code)) as engine:
        assert [answers(engine, each, 1).texts for each in (asked, [(again, GREEDY)])] == [first.texts, second.texts]
        pages.append(parts_of_pages(engine))
        rows = KvRows(engine.layout.head_dim, torch.float32, code)
    for parts, ((_, whole),) in zip(*pages, strict=True):
        assert len(parts) == (num_ranks if memory == "own" else 1)
        for share, part in parts:
            assert_near(part, whole[slice(*share.layers), :, slice(*share.heads)], rows)
    assert sum(any(whole.tobytes()) for ((_, whole),) in pages[1]) > 12


def parts_of_pages(engine: Engine) -> list[list[tuple[Share, np.ndarray]]]:
    """Return of each page what each rank has of it."""
    parts = pages_of(engine.executor, Share((0, engine.layout.num_layers), (0, engine.layout.num_kv_heads)))
    return [[(part.share, part.read(page)) for part in parts] for page in range(SIZES["num_pages"])]


def assert_near(found: np.ndarray, right: np.ndarray, rows: KvRows) -> None:
    """Compare parts of pages. Sums in another order change the last bits of a scale, and few codes, by one."""
    one, other = (torch.from_numpy(np.array(each, order="C")).view(torch.uint8) for each in (found, right))
    assert (one == other).float().mean() > 0.8
    values, due = (rows.expanded(each.view(-1, rows.width)) for each in (one, other))
    step = 1.1 / 127 if rows.code == "int8" else 33 / 448  # of a row's greatest value
    assert ((values - due).abs() <= step * due.abs().amax(1, keepdim=True)).all()


@LONG
@pytest.mark.parametrize("family", ["gemma3", "gpt-oss"])
@pytest.mark.parametrize("code", ["int8", "fp8_e4m3"])
def test_ranks_with_memory_of_their_own_divide_coded_pages_of_several_groups_of_layers(
    tmp_path: Path, family: str, code: KvCode
) -> None:
    model, found = write_model(family, tmp_path, **(UNEVEN if family == "gemma3" else {})), []
    for settings in ({}, {TENSOR: 2}, {"rank_memory": "own"}, {"rank_memory": "own", TENSOR: 2}):
        with engine_of(worker_config(model, **SIZES, **settings, kv_cache_dtype=code)) as engine:
            assert len(engine.layout.page_sizes) > 1
            found.append([answers(engine, each, 1).texts for each in (ASKED, AGAIN)])
    assert all(each == found[0] for each in found)


@LONG
@pytest.mark.parametrize("memory", ["shared", "own"])
@pytest.mark.parametrize("code", ["fp8_e4m3", "int8"])
@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_ranks_verify_looked_up_guesses_over_the_same_rows(
    tmp_path: Path, method: str, code: KvCode, memory: str
) -> None:
    model = write_model("qwen3", tmp_path)
    asked, due = UnlikeEngines(model, (code, code), FEW).untied(40, NUM_GUESSED)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_GUESSED, ignore_eos=True, allowed_token_ids=FEW)
    guessed = {"method": method, "num_speculative_tokens": 3}
    settings = {**SIZES, TENSOR: 2, "kv_cache_dtype": code, "rank_memory": memory, "speculative_config": guessed}
    with engine_of(worker_config(model, **settings)) as engine:
        found = answers(engine, [(asked, params)])
    assert found.texts == {(0, 0): due}
    assert found.num_guesses > found.num_right > 10
