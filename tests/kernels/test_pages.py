"""Writing and digesting pages does what the reference does, and touches nothing else."""

import pytest
import reference_kernels as reference
import torch
from coded_rows import hard_rows
from gpu_problem import layer_views, write_pages
from long_cases import long

from pdserve.kernels import pageio
from pdserve.kernels.kv_rows import KvRows
from pdserve.kernels.pageio import Rotation, Target
from pdserve.protocol.kvlayout import KvCode

# The interpreter cuts off what the hardware rounds: allow a whole step of the format, not half of one.
STEP = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7}


OTHER_ROWS = [(torch.bfloat16, 80), (torch.float16, 128)]


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    step = STEP[got.dtype]
    torch.testing.assert_close(got.double(), want.double(), rtol=step, atol=1e-5 if step < 1e-4 else step / 64)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("head_dim", [64, 80, 96])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_new_keys_and_values_land_rotated_in_their_slots_and_nowhere_else(head_dim: int, dtype: torch.dtype) -> None:
    kv = torch.zeros((6, 2, 2, 3, 16, head_dim)).to(dtype)
    k_pages, v_pages = layer_views(kv, 1)
    q, k, v = normal(7, 15, head_dim).split([9, 3, 3], dim=1)
    angles = torch.linspace(0, 3, 50)[:, None] * torch.rand(head_dim // 2)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    positions, slots = torch.tensor([3, 0, 9, 9, 49, 17, 2]), torch.tensor([0, 95, 17, 96, 50, 31, 16])
    weights = torch.rand(2, head_dim)
    rotation = Rotation(cos_sin, weights[0], weights[1], 1e-6)
    out = pageio.rope_write((q, k, v), positions, rotation, Target(k_pages, v_pages, slots))

    assert torch.equal(pageio.rope(q, positions, rotation), out)

    def finished(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        normed = reference.rms_norm(x.double(), weight.double(), 1e-6)
        return reference.rope(normed, cos_sin[positions].double())

    assert_close(out, finished(q, weights[0]))
    want_k, want_v = finished(k, weights[1]), v.double()
    want = torch.zeros((6, 2, 2, 3, 16, head_dim), dtype=torch.float64)
    stays = slots < 96  # the fourth token is padding
    for pages, rows in zip(layer_views(want, 1), (want_k, want_v), strict=True):
        write_pages(pages, rows[stays], slots[stays])
    assert_close(kv, want)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # infinity times zero, turned
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
@pytest.mark.parametrize("code", ["int8", "fp8_e4m3"])
@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float32, 64), *long(*OTHER_ROWS)])
def test_coded_rows_have_the_bytes_that_torch_writes(code: KvCode, dtype: torch.dtype, head_dim: int) -> None:
    rows, given = KvRows(head_dim, dtype, code), hard_rows(head_dim, dtype)[240:]
    k = (given + 0.0).view(-1, 2, head_dim)  # turning may change the sign of zero
    v = given.flip(0).view(-1, 2, head_dim)
    num_tokens, num_pages = len(k), -(-len(k) // 16) + 1
    kv = torch.full((num_pages, 2, 2, 2, 16, rows.width), 0x55, dtype=torch.uint8)
    want = kv.clone()
    slots = torch.randperm(num_pages * 16, generator=torch.Generator().manual_seed(1))[:num_tokens]
    slots[3] = num_pages * 16  # padding
    unturned = torch.cat((torch.ones(1, head_dim // 2), torch.zeros(1, head_dim // 2)), 1)
    target = Target(*layer_views(kv, 1), slots, code)
    pageio.rope_write((torch.zeros_like(k), k, v), torch.zeros(num_tokens).int(), Rotation(unturned), target)
    stays = slots < num_pages * 16
    for pages, values in zip(layer_views(want, 1), (k, v), strict=True):
        write_pages(pages, rows.packed(values)[stays], slots[stays])
    assert torch.equal(kv, want)


def test_rope_without_norm_may_run_in_place() -> None:
    q, k, v = normal(4, 6, 64).split([4, 1, 1], dim=1)
    kv = torch.zeros((2, 1, 2, 1, 16, 64))
    cos_sin = torch.cat((torch.full((5, 32), 0.6), torch.full((5, 32), 0.8)), dim=1)
    positions = torch.arange(4)
    want = reference.rope(q.clone(), cos_sin[positions])
    target = Target(*layer_views(kv, 0), torch.arange(4))
    out = pageio.rope_write((q, k, v), positions, Rotation(cos_sin), target, out=q)
    assert out is q
    assert_close(q, want)


def test_digests_are_the_references_and_see_any_single_change() -> None:
    pool = normal(5, 2, 2, 2, 16, 64).bfloat16()
    before = pageio.page_digests(pool, torch.arange(5))
    assert torch.equal(before, reference.page_digests(pool))
    pool[1, 0, 0, 0, 0, 0] += 1.0
    pool[3] = pool[3].flip(0)
    changed = pageio.page_digests(pool, torch.arange(5)) != before
    assert changed.tolist() == [False, True, False, True, False]
