"""Engines of several ranks with K and V in a byte a value answer as one engine with such rows, from the same pages.

No token that counts has a lead that another order of sums may take away.
"""

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from engine_runs import Asked, answers, engine_of, worker_config
from greedy_runs import spec
from model_zoo import prompt, write_model
from rank_pages import ranks
from unlike_engines import UnlikeEngines

from pdserve.base.ids import PageId
from pdserve.checkpoint.hf_directory import open_directory
from pdserve.engine.runner import Runner
from pdserve.engine.step import Chunk, StepPlan
from pdserve.executor.rank_frames import Setup, step_of
from pdserve.executor.rank_loading import load_follower
from pdserve.executor.rank_memory import mapped_pages, new_pages
from pdserve.executor.rank_sums import ranks_of, slots_bytes
from pdserve.kernels.cpu.build import Missing
from pdserve.kernels.cpu.library import library
from pdserve.model.loading import load_model
from pdserve.model.stages import Stages
from pdserve.model.weights import Rank
from pdserve.net.frames import Channel
from pdserve.protocol.kvlayout import KvCode
from pdserve.protocol.sampling import SamplingParams

LONG = pytest.mark.long
TENSOR, PIPELINE = "tensor_parallel_size", "pipeline_parallel_size"
SIZES = {"num_pages": 200, "max_model_len": 400}
NUM_TOKENS, NUM_GUESSED = 20, 60
FEW = (9, 10, 11)  # tokens of answers that repeat themselves
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
TWICE = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, n=2)  # a page is copied


@pytest.mark.parametrize("code", ["int8", "fp8_e4m3"])
def test_a_follower_writes_its_layers_into_common_pages_as_one_rank_does(tmp_path: Path, code: KvCode) -> None:
    checkpoint = open_directory(write_model("qwen3", tmp_path))
    config = worker_config(tmp_path, **{PIPELINE: 2}, num_pages=4, kv_cache_dtype=code)
    whole = Runner(load_model(checkpoint.config, checkpoint.weights(), torch.float32), 4, 16, code=code)
    has_library = not isinstance(library(), Missing)
    pages, slots = new_pages(whole.kv.nbytes), new_pages(slots_bytes(config.degrees))
    common, kept, (own, theirs) = mapped_pages(os.dup(pages)), os.dup(slots), socket.socketpair()
    setup = Setup(config.model_dump_json(exclude_unset=True), str(tmp_path), "", 1, 2, slots, pages, 4, has_library)
    with own, theirs:
        follow, region = load_follower(config, setup, Channel(theirs))
        plan = StepPlan((Chunk(prompt(21), 0, (PageId(3), PageId(1)), (spec(),)),))
        last = ranks_of(Rank.at(0, config.degrees), mapped_pages(kept), [], 60.0)
        assert isinstance(last, Stages)
        with ThreadPoolExecutor(1) as thread:
            taken = thread.submit(last.receive, 21, checkpoint.config.hidden_size, torch.float32)
            follow(step_of(plan))
            assert taken.result(60).isfinite().all()
        whole.run(plan)
    assert region is None
    layers = Rank.at(1, config.degrees).layers(checkpoint.config.num_layers)
    found = common.view(whole.kv.shape)
    assert torch.equal(found[:, layers], whole.kv[:, layers])
    assert found[:, layers].any()
    assert not found[:, layers.stop :].any(), "another rank's"


@LONG
@pytest.mark.parametrize(
    ("code", "degrees"),
    [
        ("int8", {TENSOR: 2}),
        ("fp8_e4m3", {TENSOR: 2}),
        ("fp8_e4m3", {TENSOR: 4}),
        ("int8", {PIPELINE: 2}),
    ],
)
def test_a_worker_of_several_ranks_answers_as_one_engine_with_its_rows(
    tmp_path: Path, code: KvCode, degrees: dict[str, int]
) -> None:
    model = write_model("qwen3", tmp_path)
    engines = UnlikeEngines(model, (code, code))
    due = [engines.untied(length, NUM_TOKENS) for length in (150, 5, 47)]
    again, due_again = engines.untied_after(due[0][0], NUM_TOKENS)
    with engine_of(worker_config(model, **SIZES, **degrees, kv_cache_dtype=code)) as engine:
        assert len(ranks()) == max(degrees.values()) - 1
        assert engine.layout.dtype == code
        assert engine.executor.region.page_bytes == engine.layout.page_bytes
        asked: list[Asked] = [(prompt, TWICE) for prompt, _ in due]
        first, second = answers(engine, asked), answers(engine, [(again, GREEDY)])
    assert first.texts == {(number, n): tokens for number, (_, tokens) in enumerate(due) for n in (0, 1)}
    assert second.texts == {(0, 0): due_again}
    assert second.num_cached >= 144


@LONG
@pytest.mark.parametrize("code", ["fp8_e4m3", "int8"])
@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_ranks_verify_looked_up_guesses_over_the_same_rows(tmp_path: Path, method: str, code: KvCode) -> None:
    model = write_model("qwen3", tmp_path)
    asked, due = UnlikeEngines(model, (code, code), FEW).untied(40, NUM_GUESSED)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_GUESSED, ignore_eos=True, allowed_token_ids=FEW)
    guessed = {"method": method, "num_speculative_tokens": 3}
    settings = {**SIZES, TENSOR: 2, "kv_cache_dtype": code, "speculative_config": guessed}
    with engine_of(worker_config(model, **settings)) as engine:
        found = answers(engine, [(asked, params)])
    assert found.texts == {(0, 0): due}
    assert found.num_guesses > found.num_right > 10
