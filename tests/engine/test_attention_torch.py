"""Attention over pages gives what the plain formula gives over each sequence's own keys, in float64.

What nobody wrote, and what other sequences left in a page, may be NaN or infinite and does not show.
"""

import math
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor
from wider_pools import by_head

from pdserve.base.ids import PageId
from pdserve.engine.attention_compiled import CompiledAttention
from pdserve.engine.attention_torch import TorchAttention
from pdserve.engine.batch import Batch, PoolShape
from pdserve.engine.layer_kinds import LayerKind
from pdserve.engine.step import Chunk, StepPlan
from pdserve.kernels.cpu.attention import serves_chunks
from pdserve.kernels.cpu.build import Missing
from pdserve.kernels.cpu.calls import Immediate
from pdserve.kernels.cpu.library import library
from pdserve.kernels.kv_rows import KvRows
from pdserve.model.config import ModelConfig
from pdserve.model.rope import Rope, rotate_
from pdserve.protocol.kvlayout import KvCode

PAGE_SIZE = 4
NUM_PAGES = 400
HF_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 10,
    "hidden_size": 96,
    "intermediate_size": 8,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
LAYER = 1
CASES = {  # (start, length) of each chunk
    "one fresh prompt": [(0, 13)],
    "equal fresh prompts": [(0, 8), (0, 8), (0, 8)],
    "ragged prompts, fresh and continued": [(0, 5), (9, 5), (30, 12), (0, 1)],
    "decodes of one length": [(17, 1), (17, 1)],
    "decodes near and far": [(0, 1), (3, 1), (4, 1), (40, 1), (170, 1), (400, 1)],
    "decodes beside a prompt": [(0, 40), (7, 1), (21, 1)],
    "a short context beside one of many pages": [(1, 1), (100, 1)],
    "continued prompts of unequal contexts": [(1, 3), (6, 3), (50, 3)],
}
LEFT_BEHIND = [30.0, math.nan, math.inf, -math.inf]


def expected_rows(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """Return the last len(q) positions' attention over k and v: [positions, heads, head_dim], in float64."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) / math.sqrt(q.shape[-1])
    positions = torch.arange(len(k) - len(q), len(k))[:, None]
    keys = torch.arange(len(k))
    hidden = keys > positions
    if window is not None:
        hidden |= keys <= positions - window
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, 1)).flatten(1)


def compiled(config: ModelConfig, kind: LayerKind) -> CompiledAttention:
    loaded = library()
    assert not isinstance(loaded, Missing), loaded
    with_chunks = kind.rows.dtype == torch.bfloat16
    if with_chunks and not serves_chunks(loaded, kind.rows.head_dim, 3, kind.rows.dtype):
        pytest.skip("this processor has matrix units: torch attends")
    return CompiledAttention(Immediate(loaded), config, kind, with_chunks=with_chunks)


KINDS = {  # the attention, the type, the width of a head, and how close it comes
    "torch": (TorchAttention, torch.float32, 16, 1e-5),
    "compiled": (compiled, torch.float32, 16, 1e-5),
    "compiled with chunks": (compiled, torch.bfloat16, 32, 2**-6),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("case", "window", "left_behind"), list(product(CASES, [None, 1, 6], LEFT_BEHIND)))
def test_every_query_sees_its_own_sequence_and_no_more(
    case: str, window: int | None, left_behind: float, kind: str
) -> None:
    check(case, window, left_behind, kind)


@pytest.mark.parametrize("code", ["int8", "fp8_e4m3"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("case", "window"), list(product(CASES, [None, 6])))
def test_every_query_sees_rows_as_their_codes_keep_them(case: str, window: int | None, kind: str, code: KvCode) -> None:
    # The library turns keys in float32, torch in bfloat16: a key between two codes may get the other one.
    check(case, window, 255, kind, code, slack=1 if KINDS[kind][1] == torch.float32 else 3)


def check(
    case: str, window: int | None, left_behind: float, kind: str, code: KvCode | None = None, slack: int = 1
) -> None:
    attention_of, dtype, dim, close = KINDS[kind]
    kept = KvRows(dim, dtype, code)
    windowed = {"architectures": ["MistralForCausalLM"], "hidden_size": 6 * dim, "sliding_window": window}
    config = ModelConfig.from_hf(HF_CONFIG | windowed)
    random = np.random.default_rng(5)
    generator = torch.Generator().manual_seed(5)
    kv = torch.full((NUM_PAGES, 3, 2, 2, PAGE_SIZE, kept.width), left_behind, dtype=kept.pool_dtype)
    supply = random.permutation(NUM_PAGES).tolist()
    rope = Rope(config.head_dim, config.design.layers[0].attention.rope, torch.device("cpu"))
    chunks, expected = [], []
    for start, length in CASES[case]:
        end = start + length
        pages = [PageId(supply.pop()) for _ in range(-(-end // PAGE_SIZE))]
        qkv = torch.randn(end, 10, dim, generator=generator).to(dtype)
        rotated = qkv.clone()
        rotate_(rotated[:, :8], rope.angles(torch.arange(end), dtype))
        for position in range(start):
            page = kv[pages[position // PAGE_SIZE], LAYER]
            page[:, :, position % PAGE_SIZE] = kept.packed(rotated[position, 6:]).view(2, 2, -1)
        rotated[:, 6:] = kept.expanded(kept.packed(rotated[:, 6:]))
        rows = expected_rows(rotated[start:, :6], rotated[:, 6:8], rotated[:, 8:], window)
        chunks.append((Chunk([0] * length, start, pages, ()), qkv[start:]))
        expected.append(rows)
    scores = config.design.layers[LAYER].attention.scores
    batch = Batch.of(StepPlan(tuple(chunk for chunk, _ in chunks)), PoolShape(NUM_PAGES, PAGE_SIZE, 10))
    wanted = torch.cat([expected[index] for index in batch.order])
    for pool in (by_head(kv), kv):
        attention = attention_of(config, LayerKind(0, scores, pool, (rope,) * config.num_layers, kept))
        attention.plan(batch)
        out = attention.run(LAYER, torch.cat([chunks[index][1] for index in batch.order]), None)
        torch.testing.assert_close(out.double(), wanted, atol=slack * close, rtol=slack * close)
