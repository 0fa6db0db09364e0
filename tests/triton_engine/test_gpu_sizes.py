"""What `make gpu` asks for in its real sizes can be planned: a dry run has tiny ones. No step is computed."""

from collections import deque
from dataclasses import replace

import gpu_attention
import gpu_engine
import gpu_memory
import gpu_steps
import gpu_throughput
import numpy as np
import pytest
import torch
from gpu_device import Call, Interpreter
from gpu_models import Engine, limits_of, step_of
from kernel_catalog import CHIPS

from pdserve.engine.batch import Batch, PoolShape
from pdserve.engine.scheduler import Limits
from pdserve.engine.step import StepPlan, StepResult
from pdserve.kernels.attention import PagedAttention
from pdserve.protocol.sampling import SampledToken

PAGE_SIZE, VOCAB = 64, 151_936
PAGES_OF_8B = 5_500  # that an H100 has room for, about


class Planner:
    """Lays out each step as a runner does, and samples a token without computing anything."""

    def __init__(self, num_pages: int) -> None:
        self._pool = PoolShape(num_pages, PAGE_SIZE, VOCAB)
        self._plans: deque[StepPlan] = deque()
        self.largest = 0

    def start(self, plan: StepPlan) -> None:
        Batch.of(plan, self._pool)
        self._plans.append(plan)
        self.largest = max(self.largest, plan.num_tokens)

    def finish(self) -> StepResult:
        chunks = self._plans.popleft().chunks
        return StepResult(tuple(tuple((SampledToken(1),) for _ in chunk.samples) for chunk in chunks), 0.0)

    def run(self, plan: StepPlan) -> StepResult:
        self.start(plan)
        return self.finish()


class RealSizes(Interpreter):
    """Chooses sizes as for a GPU."""

    is_dry = False

    def kernel_us(self, call: Call) -> dict[str, float]:
        call()
        return {"attend": 1.0}


def engine_of(limits: Limits, num_pages: int) -> tuple[Engine, Planner]:
    planner = Planner(num_pages)
    return Engine(planner, limits, num_pages, PAGE_SIZE), planner  # type: ignore[arg-type]


@pytest.mark.parametrize("num_seqs", [1, 64, 256])
def test_all_sequences_of_a_timed_step_decode(num_seqs: int) -> None:
    engine, planner = engine_of(gpu_steps.LIMITS, PAGES_OF_8B)
    row, _ = gpu_steps._decode(RealSizes(), engine, "8B", num_seqs)
    assert planner.largest <= gpu_steps.LIMITS.max_num_batched_tokens
    assert row.figures["ms host"] > 0


def test_prompts_come_one_a_step_one_by_one_and_ahead() -> None:
    engine, _ = engine_of(gpu_steps.LIMITS, PAGES_OF_8B)
    assert [row.name for row in gpu_steps._prefill(RealSizes(), engine, "8B")] == [
        "8B prefill 2000, one by one",
        "8B prefill 2000, planned ahead",
        "8B prefill 2000: kernels",
    ]


def test_the_loads_of_an_8b_model_fit_its_pages() -> None:
    engine, planner = engine_of(gpu_throughput.LARGE_LIMITS, PAGES_OF_8B)
    (row,) = gpu_throughput._run(engine, "8B", gpu_throughput.equal_work(256, 1000, 256, VOCAB))
    assert not row.failed
    assert planner.largest <= gpu_throughput.LARGE_LIMITS.max_num_batched_tokens


def test_steps_that_are_made_by_hand_keep_to_their_pages() -> None:
    largest = gpu_memory._plan(gpu_memory.LONG, gpu_memory.CHUNK, gpu_memory.SEQS, PAGE_SIZE, PAGES_OF_8B)
    batch = Batch.of(largest, PoolShape(PAGES_OF_8B, PAGE_SIZE, VOCAB))
    assert (batch.num_tokens, int(batch.kv_lens.max())) == (2048 + 255, gpu_memory.LONG)
    decode = Batch.of(gpu_engine._decode_plan(256, 500, 9, PAGE_SIZE), PoolShape(256 * 9, PAGE_SIZE, VOCAB))
    assert int(decode.kv_lens.min()) > 400
    engine, _ = engine_of(limits_of(4, 256, 2_048), 128)
    mixed = Batch.of(step_of(engine, [1, 1, 200], context=300), PoolShape(128, PAGE_SIZE, VOCAB))
    assert mixed.num_tokens == 202


def test_each_shape_and_tile_of_attention_can_be_planned() -> None:
    for load in (*gpu_attention.PREFILLS, *gpu_attention.DECODES):
        spec, shape = replace(load.spec, num_pages=64), load.shape
        attention = PagedAttention(spec, torch.device("meta"), shape.size, chip=CHIPS[90], tile=load.tile)
        table = np.zeros((shape.batch, -(-shape.keys // spec.page_size)), dtype=np.int32)
        attention.plan(np.full(shape.batch, shape.queries), np.full(shape.batch, shape.keys), table)
        assert attention.use_tma == (spec.code is None and spec.page_size >= attention.tile.block_n)
        assert load.tera_operations > 0
        assert load.gigabytes > 0
