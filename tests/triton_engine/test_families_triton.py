"""Each family's logits over the kernels of a GPU, interpreted, are those of plain torch."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from greedy_runs import spec
from long_cases import long_but
from model_zoo import MORE_FAMILIES, STATES, prompt, write_model
from torch import Tensor
from whole_attention import torch_attention
from whole_triton import triton_attention

from pdserve.base.ids import PageId
from pdserve.checkpoint.hf_directory import open_directory
from pdserve.engine.attention_torch import TorchAttention
from pdserve.engine.attention_triton import TritonAttention
from pdserve.engine.batch import Batch
from pdserve.engine.layer_kinds import ByLayer, pool_shape, pool_size
from pdserve.engine.step import Chunk, StepPlan
from pdserve.model.decoder import Decoder
from pdserve.model.family import Tensors
from pdserve.model.layer_groups import layer_groups
from pdserve.model.ops import DeviceOps, TorchOps
from pdserve.model.ops_cuda import CudaOps

NUM_PAGES, PAGE_SIZE = 16, 16
CPU = torch.device("cpu")
STEPS = (
    StepPlan((Chunk(prompt(19), 0, (PageId(3), PageId(5)), (spec(),)),)),
    StepPlan((Chunk(prompt(1), 19, (PageId(3), PageId(5)), (spec(),)), Chunk(prompt(3), 0, (PageId(6),), (spec(),)))),
)


def built(folder: Path, ops: DeviceOps) -> Decoder:
    checkpoint = open_directory(folder)
    return Decoder.build(checkpoint.config, Tensors(checkpoint.weights(), torch.float32, CPU), ops)


@torch.inference_mode()
def logits_of(model: Decoder, *, with_triton: bool) -> list[Tensor]:
    config, groups = model.config, layer_groups(model.config, PAGE_SIZE, powers_of_two=True)
    kv = torch.zeros(pool_size(config, NUM_PAGES, groups, config.head_dim))
    found = []
    for step in STEPS:
        plan = step if len(groups) == 1 else in_two_groups(step)
        attention: ByLayer[TritonAttention] | ByLayer[TorchAttention]
        if with_triton:
            token_ids, attention = triton_attention(model, kv, plan, (64, (1, 2)), 0, groups)
        else:
            token_ids = torch.from_numpy(Batch.of(plan, pool_shape(config, NUM_PAGES, groups)).token_ids)
            attention = torch_attention(model, kv, plan, groups)
        found.append(model.forward(token_ids, attention, None))
        if attention.states is not None:
            attention.states.commit()
    return found


def in_two_groups(step: StepPlan) -> StepPlan:
    """Return a step with a second group of pages, of other pages of the pool."""
    return StepPlan(
        tuple(
            replace(chunk, other_pages=(tuple(PageId(NUM_PAGES - 1 - page) for page in chunk.pages),))
            for chunk in step.chunks
        )
    )


# With layers of each kind, whose windows the steps pass; the others have one layer.
WITH_WINDOWS = (
    *("cohere2", "exaone4", "gemma2", "gemma3", "gemma4", "gemma4-moe", "gpt-oss", "ministral", "olmo3"),
    "gemma4-shared",
    "qwen2-windows",
)
AS_IN_THE_ZOO = tuple(each for each in (*STATES, "granite-4-attention") if each not in ("bamba", "falcon-h1"))
SHAPES: dict[str, dict[str, int]] = {
    **{each: {} for each in AS_IN_THE_ZOO},
    **{each: {"num_hidden_layers": 2} for each in ("bamba", "deepseek-v3", "ernie-moe", "glm4-moe", "smollm3")},
    "qwen3-next": {"num_hidden_layers": 2, "full_attention_interval": 2},
    **{each: {"sliding_window": 8} for each in WITH_WINDOWS},
}

# Those whose kernels get something that no other test gives them; the kernels do not have Llama 4.
ALWAYS = ("deepseek-v3", "gemma4-shared", "glm4", "gpt-oss", "granite", "hunyuan", "smollm3")


@pytest.mark.parametrize("family", long_but(ALWAYS, [each for each in MORE_FAMILIES if each != "llama4"]))
def test_logits_over_kernels_are_those_of_plain_torch(family: str, tmp_path: Path) -> None:
    folder = write_model(family, tmp_path, **SHAPES.get(family, {"num_hidden_layers": 1}))
    expected = logits_of(built(folder, TorchOps()), with_triton=False)
    for ours, plain in zip(logits_of(built(folder, CudaOps()), with_triton=True), expected, strict=True):
        torch.testing.assert_close(ours, plain, atol=5e-4, rtol=5e-4)
