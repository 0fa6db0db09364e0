"""What attention launches and sends is what a step needs, not what its largest could."""

import gpu_problem as problem
import numpy as np
import pytest
import torch
from gpu_problem import Lens
from kernel_catalog import attention_specs
from launch_grids import Grids

from pdserve.kernels import attention as paged
from pdserve.kernels import staging
from pdserve.kernels.attention import PARTIALS_BYTES, PagedAttention, StepSize, room_for_partials
from pdserve.kernels.device import attention as device_attention
from pdserve.kernels.tuning import Device, Tile

H200 = Device((9, 0), 132)
META = torch.device("meta")


@pytest.fixture
def combines(monkeypatch: pytest.MonkeyPatch) -> Grids:
    return Grids.of(monkeypatch, device_attention, "combine")


def test_results_are_combined_by_a_program_for_each_query_and_head_that_an_item_may_have(combines: Grids) -> None:
    lens = Lens((1, 1), (900, 70))
    case = problem.make(problem.spec_of((8, 2), 32, 64, lens), lens)
    attention = PagedAttention(case.spec, "cpu", StepSize(2, 1000))
    attention.plan(*case.lens.arrays, case.page_table)
    assert case.error(attention.run(case.q, *case.pages)) <= 7.5e-3
    chunk = Lens((7, 2), (1500, 70))
    case = problem.make(problem.spec_of((9, 3), 32, 64, chunk), chunk)
    attention = PagedAttention(case.spec, "cpu", tile=Tile(32, 32, 4, 2))
    attention.plan(*case.lens.arrays, case.page_table)
    assert case.error(attention.run(case.q, *case.pages)) <= 7.5e-3
    assert combines.seen == [(2, 2, 4), (1, 3, 30)]


def test_a_decode_step_sends_the_pages_in_use_not_the_longest_table(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    copy = staging.Staging._copy
    monkeypatch.setattr(staging.Staging, "_copy", lambda self, image: sent.append(len(image)) or copy(self, image))
    spec = problem.spec_of((8, 8), 128, 64, Lens((1,), (600,)))
    attention = PagedAttention(spec, META, StepSize(256, 40960), chip=H200)
    sent.clear()
    attention.plan(np.ones(256, np.int64), np.full(256, 600), np.zeros((256, 640), np.int64))
    (words,) = sent
    items = 256 + 2 * 264 // 8
    assert words <= 8 * items + 4 * 256 + 10 * 256 + 3 * staging.ALIGNMENT


@pytest.mark.parametrize("spec", attention_specs().values(), ids=attention_specs())
@pytest.mark.parametrize(("num_queries", "kv_len"), [(2048, 131072), (512, 131072), (64, 131072), (8192, 8192)])
def test_every_catalogued_shape_keeps_to_its_room_for_partial_results(
    spec: paged.AttentionSpec, num_queries: int, kv_len: int
) -> None:
    room = room_for_partials(META)
    assert room.numel() * room.itemsize == PARTIALS_BYTES
    attention = PagedAttention(spec, META, chip=H200, room=room)
    work = paged.split_work(np.array([num_queries]), np.array([kv_len]), attention._cutting)
    rows = work.num_partials * spec.num_kv_heads * attention.tile.block_m
    assert rows * (spec.head_dim + 1) * 4 <= PARTIALS_BYTES
