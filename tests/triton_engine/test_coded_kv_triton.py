"""With K and V in a byte a value, the kernels' engine answers as the CPU's does over rows of the same code."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from greedy_runs import greedy_texts, spec
from loaded_models import loaded_model
from model_zoo import prompt, write_model
from small_models import small_config, small_model

from pdserve.base.errors import ConfigError
from pdserve.base.ids import PageId
from pdserve.checkpoint.hf_directory import open_directory
from pdserve.engine.device_pages import DevicePages
from pdserve.engine.runner import Runner
from pdserve.engine.runner_cuda import CudaRunner
from pdserve.engine.scheduler import Limits
from pdserve.engine.step import Chunk, StepPlan
from pdserve.engine.verification import verifying
from pdserve.executor.kernel_checks import check_kernels
from pdserve.executor.layouts import describe_layout
from pdserve.model.family import Model
from pdserve.protocol.kvlayout import KvCode

VOCAB, END, NUM_PAGES = 90, 5, 30
LIMITS = Limits(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=200, eos_token_ids=frozenset({END}))
PROMPTS = [[(7 * i + 3 * length) % VOCAB for i in range(length)] for length in (5, 16, 33)]
LONG = pytest.mark.long
CODES = pytest.mark.parametrize("code", [pytest.param("int8", marks=LONG), "fp8_e4m3"])
FAMILIES = ("llama3", "qwen3", "mixtral", "olmo3", "cohere2", "gemma2", "gpt-oss")


@pytest.fixture(scope="module")
def model() -> Model:
    return small_model(small_config(VOCAB, eos_token_id=END))


def coded(model: Model, code: KvCode, limits: Limits = LIMITS) -> CudaRunner:
    return CudaRunner(model, NUM_PAGES, 16, limits, pages=DevicePages(code=code))


@CODES
def test_texts_and_pages_are_those_of_the_cpu(model: Model, code: KvCode) -> None:
    runner, ours = Runner(model, NUM_PAGES, 16, code=code), coded(model, code)
    assert greedy_texts(ours, PROMPTS[:2], 3, 13) == greedy_texts(runner, PROMPTS[:2], 3, 13)
    assert ours.kv.dtype == torch.uint8
    assert ours.kv.shape == runner.kv.shape
    (codes, scales), (wanted, their_scales) = (each.kv.split((model.config.head_dim, 4), -1) for each in (ours, runner))
    assert (codes != wanted).sum() <= 0.001 * wanted.count_nonzero(), "a value between two codes may get the other one"
    scales, their_scales = (each.contiguous().view(torch.float32) for each in (scales, their_scales))
    torch.testing.assert_close(scales, their_scales, rtol=1e-4, atol=0)
    assert ours.kv[0].nbytes == describe_layout(model.config, "", 16, code, "cuda").page_bytes


@LONG
@CODES
@pytest.mark.parametrize("family", FAMILIES)
def test_families_with_windows_and_without_answer_so(tmp_path: Path, family: str, code: KvCode) -> None:
    model = loaded_model(write_model(family, tmp_path))
    asked = [prompt(length) for length in (9, 60)]
    expected = greedy_texts(Runner(model, 40, 16, code=code), asked, 3, 25)
    assert greedy_texts(coded(model, code), asked, 3, 25) == expected


@CODES
def test_a_page_of_the_cpus_engine_goes_on_in_the_kernels(model: Model, code: KvCode) -> None:
    writer, reader = Runner(model, 4, 16, code=code), coded(model, code)
    pages, asked = tuple(map(PageId, range(3))), PROMPTS[2]
    (first,) = writer.run(StepPlan((Chunk(asked, 0, pages, (spec(),)),))).tokens[0][0]
    reader.kv[:3] = writer.kv[:3]
    plan = StepPlan((Chunk((first.token_id,), len(asked), pages, (spec((first.token_id,)),)),))
    found, expected = (each.run(plan).tokens[0][0][0].token_id for each in (reader, writer))
    assert found == expected


@CODES
def test_guesses_are_verified_over_the_same_rows(model: Model, code: KvCode) -> None:
    (answer,) = greedy_texts(Runner(model, NUM_PAGES, 16, code=code), [PROMPTS[1]], 5)
    limits = replace(LIMITS, num_speculative_tokens=3)
    runner, pages = coded(model, code, limits), tuple(map(PageId, range(3)))
    runner.run(StepPlan((Chunk(PROMPTS[1], 0, pages, ()),)))
    sample = replace(spec(tuple(answer[:1])), sequence=(0, 0))
    chunk = Chunk((*answer[:3], answer[3] + 1), len(PROMPTS[1]), pages, (sample,), num_drafts=3)
    result = verifying(runner.run)(StepPlan((chunk,)))
    assert [token.token_id for token in result.tokens[0][0]] == answer[1:4]


@CODES
def test_latent_rows_are_refused(tmp_path: Path, code: KvCode) -> None:
    config = open_directory(write_model("deepseek-v3", tmp_path)).config
    with pytest.raises(ConfigError, match="latent rows are served without window, soft_cap, sinks and code"):
        check_kernels("interpreter", config, 16, torch.float32, code)
