"""Over the kernels of a GPU, ranks that divide a model of codes draw the tokens of one rank with the same codes."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_models import CASES, random_model, write_gguf
from greedy_runs import greedy_texts, spec
from model_zoo import prompt, write_model
from published_formats import published, write_in_mxfp4
from turned_ranks import turned_ranks

from pdserve.base.ids import PageId
from pdserve.checkpoint.checkpoint import choose_quantization, weights_in_form
from pdserve.checkpoint.open import open_checkpoint
from pdserve.engine.runner_cuda import CudaRunner
from pdserve.engine.scheduler import Limits
from pdserve.engine.step import Chunk, StepPlan, Targets
from pdserve.kernels.code_blocks import CodeBlocks
from pdserve.model.cuts import check_cuts
from pdserve.model.decoder import Decoder
from pdserve.model.family import Tensors
from pdserve.model.loading import needed_weights
from pdserve.model.ops_cuda import CudaOps
from pdserve.model.parallel import own_part
from pdserve.settings.degrees import Degrees

NUM_PAGES, NUM_TOKENS, CHUNK = 20, 3, 16
LIMITS = Limits(4, 64, 128, frozenset())
PROMPTS = [prompt(count, count) for count in (5, 20)]
SCORED = StepPlan((Chunk(tuple(prompt(9, 1)), 0, (PageId(2),), (spec(),), targets=Targets(prompt(9, 1)[1:], 2)),))
ROUNDED = "rounded to "  # when they are read
SHAPES = {  # of which each of two ranks has whole groups
    "fp8 of large blocks": {"head_dim": 64, "intermediate_size": 384},
    "deepseek-v3": {"kv_lora_rank": 56, "v_head_dim": 16, "first_k_dense_replace": 0},
}

pytestmark = pytest.mark.usefixtures("one_thread")


def written(case: str, folder: Path) -> Path:
    """Write a model in codes: those of a GGUF file, of GPT-OSS, or of another published format."""
    if case.startswith(ROUNDED):
        return write_model("llama3", folder, num_hidden_layers=1, intermediate_size=160)
    if case == "mxfp4":
        return write_in_mxfp4(folder, num_hidden_layers=1, intermediate_size=160)[1]
    if case in Kind.__members__:
        of = CASES["gpt-oss" if case == "MXFP4" else "llama"]
        of = replace(of, shape={**of.shape, "num_hidden_layers": 1})
        return write_gguf(of, random_model(of), folder / "model.gguf", Kind[case])
    family, _, form = case.rpartition(": ")
    shape = {"intermediate_size": 160, **SHAPES.get(family or form, {})}
    published(form, write_model(family or "llama3", folder / "plain", num_hidden_layers=1, **shape), folder / "coded")
    return folder / "coded"


def codes_of(model: Decoder) -> Iterator[CodeBlocks]:
    for layer in model.layers:
        yield from (each for each in map(own_part, layer.matrices()) if isinstance(each, CodeBlocks))


@pytest.mark.parametrize(
    "case",
    [
        "int8",
        *(
            pytest.param(case, marks=pytest.mark.long)
            for case in (
                "mxfp4",  # experts in two blocks of 32, and in three
                *("awq", "gptq", "gptq, 8 bits", "words", "words, with zeros"),
                *("fp8 of outputs", "fp8 of large blocks", "fp8 of tensors", f"{ROUNDED}int8", f"{ROUNDED}int4"),
                *("qwen3-moe: awq", "qwen3-moe: fp8 of tensors", "deepseek-v3: int8", "Q4_0", "Q4_1", "Q8_0", "MXFP4"),
            )
        ),
    ],
)
def test_ranks_of_codes_draw_the_tokens_of_one_rank_with_the_same(case: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(written(case, tmp_path))
    asked = case.removeprefix(ROUNDED) if case.startswith(ROUNDED) else "auto"
    form = choose_quantization(asked, checkpoint, "bfloat16", "cuda")  # type: ignore[arg-type]
    weights, config = weights_in_form(checkpoint, form, "cuda"), checkpoint.config
    check_cuts(config, weights, Degrees(2))
    tensors = Tensors(needed_weights(config, weights), torch.float32, torch.device("cpu"))
    one = CudaRunner(whole := Decoder.build(config, tensors, CudaOps()), NUM_PAGES, 16, LIMITS)
    expected, (scores,) = greedy_texts(one, PROMPTS, NUM_TOKENS, CHUNK), one.run(SCORED).prompts.values()
    assert len({token for text in expected for token in text}) > 1
    with turned_ranks(2, config, weights, NUM_PAGES, LIMITS) as ranks:
        assert greedy_texts(ranks, PROMPTS, NUM_TOKENS, CHUNK) == expected
        (found,) = ranks.run(SCORED).prompts.values()
        models = [runner._model for runner in ranks.runners]  # type: ignore[attr-defined]
    assert found.top_ids == scores.top_ids
    np.testing.assert_allclose(np.frombuffer(found.top, "<f4"), np.frombuffer(scores.top, "<f4"), atol=1e-4)
    held = [list(codes_of(model)) for model in models]
    for each, *of_ranks in zip(codes_of(whole), *held, strict=True):
        assert {of.kind for of in of_ranks} == {each.kind}
        whole_size, sizes = each.inputs * each.outputs, [of.inputs * of.outputs for of in of_ranks]
        assert sum(sizes) == whole_size or (case.startswith("deepseek") and sizes == [whole_size] * 2), (
            "latents are whole"
        )
