"""What a kernel does not serve is refused before launch, by a ValueError that names the argument."""

from collections.abc import Callable
from dataclasses import replace

import gpu_problem as problem
import numpy as np
import pytest
import torch
from gpu_problem import Lens
from torch import Tensor

from pdserve.kernels import pageio, sample
from pdserve.kernels.attention import AttentionSpec, PagedAttention, StepSize

SPEC = AttentionSpec(4, 2, 64, 16, 8, 0.125)
LATENTS = AttentionSpec(4, 1, 48, 16, 8, 0.125, value_dim=32)
LENS = Lens((2, 1), (20, 5))
TABLE = np.array([[0, 1], [2, 0]])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_heads", 5),
        ("num_heads", 0),
        ("num_kv_heads", 0),
        ("head_dim", 40),
        ("head_dim", 272),
        ("page_size", 24),
        ("num_pages", 0),
        ("scale", 0.0),
        ("scale", float("nan")),
        ("dtype", torch.float64),
        ("window", 0),
    ],
)
def test_a_spec_names_the_field_it_does_not_serve(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        replace(SPEC, **{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_kv_heads", 2),
        ("value_dim", 20),
        ("value_dim", 520),
        ("head_dim", 32),
        ("head_dim", 112),
        ("head_dim", 40),
        ("value_dim", {"window": 5}),
        ("value_dim", {"soft_cap": 5.0}),
        ("value_dim", {"has_sinks": True}),
        ("value_dim", {"code": "int8"}),
    ],
)
def test_a_spec_of_latent_rows_names_what_it_does_not_serve(field: str, value: object) -> None:
    changes = value if isinstance(value, dict) else {field: value}
    with pytest.raises(ValueError, match=rf"^{field}"):
        replace(LATENTS, **changes)


def test_latent_rows_are_given_once() -> None:
    attention, rows = PagedAttention(LATENTS, "cpu"), torch.zeros((8, 1, 16, 48), dtype=torch.bfloat16)
    attention.plan(*LENS.arrays, TABLE)
    with pytest.raises(ValueError, match=r"^v must be k"):
        attention.run(torch.zeros((3, 4, 48), dtype=torch.bfloat16), rows, rows.clone())


def test_coded_rows_are_bytes_that_begin_at_words() -> None:
    attention = PagedAttention(replace(SPEC, code="int8"), "cpu")
    attention.plan(*LENS.arrays, TABLE)
    q, rows = torch.zeros((3, SPEC.num_heads, 64), dtype=torch.bfloat16), torch.zeros((8, 2, 2, 16, 68))
    with pytest.raises(ValueError, match=r"^k must be one of \[torch.uint8\]"):
        attention.run(q, *rows.unbind(1))
    shifted = torch.zeros((8, 2, 2, 16, 70), dtype=torch.uint8)[..., :68]
    with pytest.raises(ValueError, match=r"^k must have rows at multiples of 4 bytes"):
        attention.run(q, *shifted.unbind(1))


def planned() -> tuple[PagedAttention, Tensor, Tensor, Tensor]:
    attention = PagedAttention(SPEC, "cpu")
    attention.plan(*LENS.arrays, TABLE)
    kv = torch.zeros((8, 1, 2, 2, 16, 64), dtype=torch.bfloat16)
    return attention, torch.zeros((3, 4, 64), dtype=torch.bfloat16), kv[:, 0, 0], kv[:, 0, 1]


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("q", lambda q, k, v: (q[:, :3], k, v)),
        ("q", lambda q, k, v: (q.float(), k, v)),
        ("q", lambda q, k, v: (q[:2], k, v)),
        ("q", lambda q, k, v: (q.transpose(1, 2).contiguous().transpose(1, 2), k, v)),
        ("k", lambda q, k, v: (q, k[:7], v)),
        ("k", lambda q, k, v: (q, k.float(), v)),
        ("v", lambda q, k, v: (q, k, v.transpose(2, 3))),
        ("v", lambda q, k, v: (q, k, v.contiguous())),
        ("v", lambda q, k, v: (q, k, v.as_strided(v.shape, (4088, 1024, 64, 1)))),
    ],
)
def test_attention_names_the_tensor_that_does_not_fit(name: str, spoil: Callable[..., tuple[Tensor, ...]]) -> None:
    attention, q, k, v = planned()
    with pytest.raises(ValueError, match=rf"^{name} "):
        attention.run(*spoil(q, k, v))


@pytest.mark.parametrize(
    ("name", "query_lens", "kv_lens", "table"),
    [
        ("query_lens", [], [], np.zeros((0, 1))),
        ("query_lens", [0, 1], [5, 5], TABLE),
        ("kv_lens", [2, 1], [1, 5], TABLE),
        ("kv_lens", [1, 1], [5], TABLE),
        ("page_table", [1, 1], [20, 5], TABLE[:1]),
        ("page_table", [1, 1], [33, 5], TABLE),
    ],
)
def test_a_plan_names_what_does_not_fit(
    name: str, query_lens: list[int], kv_lens: list[int], table: np.ndarray
) -> None:
    with pytest.raises(ValueError, match=name):
        PagedAttention(SPEC, "cpu").plan(np.array(query_lens), np.array(kv_lens), table)
    with pytest.raises(ValueError, match=name):
        PagedAttention(SPEC, "cpu", StepSize(4, 64)).plan(np.array(query_lens), np.array(kv_lens), table)


@pytest.mark.parametrize("sizes", [(0, 64), (4, 0)])
def test_a_decode_step_of_a_size_it_does_not_serve_is_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="max_"):
        StepSize(*sizes)


@pytest.mark.parametrize(("query_lens", "kv_lens"), [([1] * 5, [5] * 5), ([2], [5]), ([1], [65])])
def test_a_step_larger_than_the_captured_one_is_refused(query_lens: list[int], kv_lens: list[int]) -> None:
    with pytest.raises(ValueError, match=r"query_lens|kv_lens"):
        PagedAttention(SPEC, "cpu", StepSize(4, 64)).plan(
            np.array(query_lens), np.array(kv_lens), np.zeros((len(kv_lens), 5), dtype=np.int32)
        )


def test_a_prefill_that_was_not_planned_does_not_run() -> None:
    _, q, k, v = planned()
    with pytest.raises(ValueError, match="plan"):
        PagedAttention(SPEC, "cpu").run(q, k, v)


def test_page_kernels_name_what_does_not_fit() -> None:
    pool, ids = torch.zeros((4, 1, 2, 2, 16, 64)), torch.tensor([0])
    with pytest.raises(ValueError, match="pool"):
        pageio.page_digests(pool.transpose(3, 4), ids)


def test_row_kernels_name_what_does_not_fit() -> None:
    x = torch.zeros(3, 64)
    with pytest.raises(ValueError, match="weight"):
        pageio.rms_norm(x, torch.zeros(63), 1e-5)
    with pytest.raises(ValueError, match="x must have stride 1"):
        pageio.silu_mul(x.t())
    with pytest.raises(ValueError, match="x"):
        pageio.silu_mul(torch.zeros(3, 5))


@pytest.mark.parametrize(
    ("name", "cos_sin", "positions"),
    [
        ("cos_sin", torch.zeros(9, 66), torch.zeros(1, dtype=torch.int32)),
        ("positions", torch.zeros(9, 64), torch.zeros(1)),
    ],
)
def test_rotating_names_what_does_not_fit(name: str, cos_sin: Tensor, positions: Tensor) -> None:
    kv = torch.zeros((2, 1, 2, 1, 16, 64))
    qkv = (torch.zeros(1, 2, 64), torch.zeros(1, 1, 64), torch.zeros(1, 1, 64))
    target = pageio.Target(kv[:, 0, 0], kv[:, 0, 1], torch.tensor([3]))
    with pytest.raises(ValueError, match=name):
        pageio.rope_write(qkv, positions, pageio.Rotation(cos_sin), target)


def test_sampling_names_what_does_not_fit() -> None:
    ones = torch.ones(2)
    draw = sample.Params(torch.zeros(2, 2, dtype=torch.int32), ones, torch.zeros(2, dtype=torch.int32), ones, ones)
    with pytest.raises(ValueError, match="keys"):
        sample.sample(torch.zeros(3, 8), draw)
    with pytest.raises(ValueError, match="logits"):
        sample.sample(torch.zeros(2, 8, dtype=torch.float64), draw)
    with pytest.raises(ValueError, match="top_p"):
        sample.sample(torch.zeros(2, 8), replace(draw, top_p=torch.ones(3)))
    bias = sample.Bias(torch.zeros(1, dtype=torch.int32), torch.zeros(1), torch.zeros(2, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"bias\.offsets"):
        sample.sample(torch.zeros(2, 8), draw, bias=bias)


def test_an_empty_batch_is_served_by_doing_nothing() -> None:
    empty = torch.zeros(0, 64)
    assert pageio.rms_norm(empty, torch.ones(64), 1e-5).shape == (0, 64)
    assert pageio.silu_mul(empty).shape == (0, 32)
    assert len(pageio.page_digests(torch.zeros(1, 1, 2, 1, 16, 64), torch.zeros(0, dtype=torch.int32))) == 0
    assert problem.make(problem.spec_of((2, 1), 64, 16, LENS), LENS).error(torch.zeros(3, 2, 64)) < 1
