"""Each family's logits over the kernels of a GPU, interpreted, are those of plain torch."""

import json
from pathlib import Path

import pytest
import torch
from greedy_runs import spec
from model_zoo import MORE_FAMILIES, VOCAB, prompt, write_model
from torch import Tensor

from pdserve.base.ids import PageId
from pdserve.checkpoint.hf_directory import read_weights
from pdserve.engine.attention_torch import TorchAttention
from pdserve.engine.attention_triton import TritonAttention
from pdserve.engine.batch import Batch, PoolShape
from pdserve.engine.runner_cuda import step_inputs
from pdserve.engine.step import Chunk, StepPlan
from pdserve.kernels.staging import Staging
from pdserve.model.config import ModelConfig
from pdserve.model.decoder import Decoder
from pdserve.model.family import Tensors
from pdserve.model.ops import DeviceOps, TorchOps
from pdserve.model.ops_cuda import CudaOps

POOL = PoolShape(num_pages=8, page_size=16, vocab_size=VOCAB)
CPU = torch.device("cpu")
STEPS = (
    StepPlan((Chunk(prompt(19), 0, (PageId(3), PageId(5)), (spec(),)),)),
    StepPlan(
        (
            Chunk(prompt(1), 19, (PageId(3), PageId(5)), (spec(),)),
            Chunk(prompt(3), 0, (PageId(6),), (spec(),)),
        )
    ),
)


def built(folder: Path, ops: DeviceOps) -> Decoder:
    config = ModelConfig.from_hf(json.loads((folder / "config.json").read_text()))
    return Decoder.build(config, Tensors(read_weights(folder), torch.float32, CPU), ops)


@torch.inference_mode()
def logits_of(model: Decoder, *, with_triton: bool) -> list[Tensor]:
    config = model.config
    kv = torch.zeros(POOL.num_pages, config.num_layers, 2, config.num_kv_heads, POOL.page_size, config.head_dim)
    found = []
    for plan in STEPS:
        batch = Batch.of(plan, POOL)
        if with_triton:
            attention = TritonAttention(config, kv, model.ropes, 64, (1, 2))
            token_ids, positions, slots = Staging(CPU).send(*step_inputs(batch, POOL, batch.num_tokens))
            attention.plan(batch, positions, slots)
            found.append(model.forward(token_ids, attention, None))
        else:
            plain = TorchAttention(config, kv, model.ropes)
            plain.plan(batch)
            found.append(model.forward(torch.from_numpy(batch.token_ids), plain, None))
    return found


# Those whose kernels get something that no other test gives them.
ALWAYS = ("glm4", "granite", "hunyuan", "smollm3")


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=() if each in ALWAYS else pytest.mark.long) for each in MORE_FAMILIES]
)
def test_logits_over_kernels_are_those_of_plain_torch(family: str, tmp_path: Path) -> None:
    folder = write_model(family, tmp_path, num_hidden_layers=2 if family == "smollm3" else 1)
    expected = logits_of(built(folder, TorchOps()), with_triton=False)
    for ours, plain in zip(logits_of(built(folder, CudaOps()), with_triton=True), expected, strict=True):
        torch.testing.assert_close(ours, plain, atol=5e-4, rtol=5e-4)
