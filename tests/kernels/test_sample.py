"""The sampling kernel draws what the reference draws, token for token, and at the right frequencies."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import reference_kernels as reference
import torch
from long_cases import long
from reference_kernels import RowParams
from torch import Tensor
from triton.runtime.jit import JITFunction

from pdserve.kernels import rng, sample
from pdserve.kernels.device import sample as device_sample

VOCAB = 5000


def draw_of(rows: Sequence[RowParams], indices: Sequence[int]) -> sample.Params:
    def column(name: str) -> Tensor:
        return torch.tensor([getattr(row, name) for row in rows], dtype=torch.float32)

    keys = reference.as_tensor(rng.keys(list(range(len(rows))), list(indices)))
    top_k = torch.tensor([row.top_k for row in rows], dtype=torch.int32)
    return sample.Params(keys, column("temperature"), top_k, column("top_p"), column("min_p"))


def ragged(lists: Sequence[Sequence[float]], dtype: torch.dtype) -> sample.Ragged:
    offsets = np.cumsum([0, *(len(values) for values in lists)])
    values = torch.tensor(list(itertools.chain.from_iterable(lists)), dtype=dtype)
    return sample.Ragged(values, torch.tensor(offsets, dtype=torch.int32))


def penalties_of(rows: Sequence[RowParams], vocab: int) -> sample.Penalties:
    columns = [
        torch.tensor([getattr(row, name) for row in rows], dtype=torch.float32)
        for name in ("repetition", "frequency", "presence")
    ]
    counts = torch.zeros((len(rows), vocab), dtype=torch.int32)
    slots = list(reversed(range(len(rows))))
    lists = [ids for row in rows for ids in (row.prompt_ids, row.output_ids)]
    to = torch.tensor([slot for slot in slots for _ in range(2)], dtype=torch.int32)
    sample.count(counts, to, torch.tensor([0, 1] * len(rows), dtype=torch.int32), ragged(lists, torch.int32))
    return sample.Penalties(*columns, torch.tensor(slots, dtype=torch.int32), counts)


def bias_of(rows: Sequence[RowParams]) -> sample.Bias:
    ids = ragged([list(row.bias) for row in rows], torch.int32)
    return sample.Bias(ids.values, ragged([list(row.bias.values()) for row in rows], torch.float32).values, ids.offsets)


def reference_tokens(logits: Tensor, rows: Sequence[RowParams], draw: sample.Params) -> list[int]:
    drawn = zip(logits.double(), rows, draw.keys.numpy().view(np.uint32), strict=True)
    return [reference.sample(row_logits, row, key) for row_logits, row, key in drawn]


FILTERS = [
    RowParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    for temperature, top_k, top_p, min_p in itertools.product((0.0, 0.7, 1.5), (0, 1, 50), (1.0, 0.4), (0.0, 0.1))
]


@pytest.mark.parametrize("dtype", [*long(torch.float32), torch.bfloat16])
def test_mixed_rows_draw_the_references_tokens(dtype: torch.dtype) -> None:
    logits = (torch.randn((len(FILTERS), VOCAB), generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    draw = draw_of(FILTERS, [3] * len(FILTERS))
    assert sample.sample(logits, draw).tolist() == reference_tokens(logits, FILTERS, draw)


def test_penalties_and_biases_act_in_their_order() -> None:
    random = np.random.default_rng(0)
    rows = [
        RowParams(
            temperature=float(random.choice([0.0, 1.0])),
            top_p=float(random.choice([1.0, 0.9])),
            repetition=1.3,
            frequency=0.4,
            presence=0.6,
            prompt_ids=tuple(random.integers(0, 300, 20).tolist()),
            output_ids=tuple(random.integers(0, 300, 40).tolist()),
            bias={int(token): float(random.choice([5.0, -math.inf])) for token in random.integers(0, 300, 3)},
        )
        for _ in range(12)
    ]
    logits = torch.randn((len(rows), 300), generator=torch.Generator().manual_seed(2)) * 2
    draw = draw_of(rows, range(12))
    penalties = penalties_of(rows, 300)
    drawn = sample.sample(logits, draw, penalties=penalties, bias=bias_of(rows)).tolist()
    assert drawn == reference_tokens(logits, rows, draw)
    after = [replace(row, output_ids=(*row.output_ids, token)) for row, token in zip(rows, drawn, strict=True)]
    assert torch.equal(penalties.counts, penalties_of(after, 300).counts), "what was drawn is counted"


def mask_of(rows: Sequence[RowParams], vocab: int) -> sample.Mask:
    words, places = [], []
    for row in rows:
        places.append(sample.EVERYTHING if row.allowed is None else len(words))
        if row.allowed is not None:
            bits = np.isin(np.arange(-(-vocab // 32) * 32), row.allowed)
            words.append(np.packbits(bits, bitorder="little").view(np.int32))
    return sample.Mask(torch.from_numpy(np.stack(words)), torch.tensor(places, dtype=torch.int32))


def test_masked_rows_draw_of_their_own_tokens_alone() -> None:
    """Words of a mask whose sign bit is set are read as bits, too."""
    shapes = [(0.0, 0, None), (1.5, 0, (31, 32, 63, 64)), (1.0, 3, None), (1.5, 2, (0, 95, 99)), (9.0, 0, (7,))]
    rows = [RowParams(temperature=t, top_k=k, top_p=0.9, bias={32: -9.0}, allowed=ids) for t, k, ids in shapes] * 8
    logits, draw = torch.randn((40, 100), generator=torch.Generator().manual_seed(3)), draw_of(rows, range(40))
    drawn = sample.sample(logits, draw, bias=bias_of(rows), mask=mask_of(rows, 100)).tolist()
    assert drawn == reference_tokens(logits, rows, draw)
    assert all(row.allowed is None or token in row.allowed for row, token in zip(rows, drawn, strict=True))


@pytest.mark.parametrize(
    ("row", "token"),
    [
        (RowParams(temperature=0.0, repetition=1.3, prompt_ids=(0,)), 1),
        (RowParams(temperature=0.0, repetition=1.3, output_ids=(0,)), 1),
        (RowParams(temperature=0.0, frequency=0.2, output_ids=(0, 1, 0)), 2),
        (RowParams(temperature=0.0, presence=0.2, output_ids=(0,)), 1),
        (RowParams(temperature=0.0, frequency=0.2, presence=0.2, prompt_ids=(0,)), 0),
        (RowParams(temperature=0.0, bias={2: 0.5}), 2),
    ],
)
def test_each_penalty_looks_at_the_ids_it_should(row: RowParams, token: int) -> None:
    logits = torch.tensor([[2.0, 1.9, 1.75, -3.0]])
    drawn = sample.sample(logits, draw_of([row], [0]), penalties=penalties_of([row], 4), bias=bias_of([row]))
    assert drawn.tolist() == [token] == [reference.sample(logits[0], row, draw_of([row], [0]).keys[0])]


def test_a_token_biased_to_minus_infinity_is_never_drawn() -> None:
    row = RowParams(bias={1: -math.inf})
    logits = torch.tensor([[0.0, 30.0, 0.0]] * 20)
    drawn = sample.sample(logits, draw_of([row] * 20, range(20)), bias=bias_of([row] * 20))
    assert 1 not in drawn.tolist()


@pytest.mark.parametrize("token", [3, 4, -1])
def test_a_bias_outside_the_vocabulary_leaves_the_neighbours_alone(token: int) -> None:
    rows = [RowParams(temperature=0.0, bias={token: bias}) for bias in (-math.inf, math.inf, -math.inf)]
    logits = torch.tensor([[9.0, 5.0, 7.0]] * 3)
    drawn = sample.sample(logits, draw_of(rows, range(3)), bias=bias_of(rows))
    assert drawn.tolist() == [0, 0, 0]


@pytest.mark.parametrize("temperature", [9e-6, 1e-38, 1e-45])
@pytest.mark.parametrize("filters", [{}, {"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_a_temperature_too_low_to_divide_by_takes_the_likeliest(temperature: float, filters: dict[str, float]) -> None:
    row = RowParams(temperature=temperature, **filters)  # type: ignore[arg-type]
    logits = torch.tensor([[-30.0, 20.0, 30.0, 20.0], [-9.0, -5.0, -7.0, -6.0]])
    assert sample.sample(logits, draw_of([row] * 2, range(2))).tolist() == [2, 1]


def test_a_row_without_counts_beside_one_with_counts_is_left_alone() -> None:
    rows = [RowParams(temperature=0.0), RowParams(temperature=0.0, presence=2.0, output_ids=(0,))]
    penalties = penalties_of(rows, 3)
    penalties.slots[0] = sample.NO_COUNTS
    unused = penalties.counts[1].clone()
    drawn = sample.sample(torch.tensor([[2.0, 1.0, 0.5]] * 2), draw_of(rows, range(2)), penalties=penalties)
    assert drawn.tolist() == [0, 1]
    assert penalties.counts.tolist() == [[2, 2, 0], unused.tolist()]


@pytest.mark.parametrize(
    "row",
    [RowParams(temperature=0.0), RowParams(), RowParams(top_k=7), RowParams(top_p=0.5), RowParams(top_k=7, top_p=0.5)],
)
def test_a_row_of_nothing_but_broken_logits_draws_the_first_token(row: RowParams) -> None:
    logits = torch.full((2, VOCAB), math.nan)
    logits[1] = -math.inf
    assert sample.sample(logits, draw_of([row] * 2, range(2))).tolist() == [0, 0]


class Launched:
    """A kernel that notes the grids of its launches."""

    def __init__(self, kernel: JITFunction[Any]) -> None:
        self.grids: list[tuple[int, ...]] = []
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        self.grids.append(grid)
        return self._kernel[grid]


def test_a_row_is_split_over_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    scan, choose = Launched(device_sample.scan), Launched(device_sample.choose)
    monkeypatch.setattr(device_sample, "scan", scan)
    monkeypatch.setattr(device_sample, "choose", choose)
    vocab = 3 * sample.MAX_BLOCK + 1
    logits = torch.zeros((2, vocab))
    logits[0, vocab - 1], logits[1, [sample.MAX_BLOCK, 2 * sample.MAX_BLOCK]] = 1.0, 1.0
    drawn = sample.sample(logits, draw_of([RowParams(temperature=0.0)] * 2, range(2)))
    assert drawn.tolist() == [vocab - 1, sample.MAX_BLOCK]
    assert (scan.grids, choose.grids) == ([(2, 4)], [(2,)])


def test_rows_longer_than_a_part_draw_the_references_tokens_whatever_is_asked_for() -> None:
    vocab, edges = 2 * sample.MAX_BLOCK + 40, (0, sample.MAX_BLOCK - 1, sample.MAX_BLOCK, 2 * sample.MAX_BLOCK + 39)
    kept = tuple(range(sample.MAX_BLOCK - 99, sample.MAX_BLOCK + 99))
    rows = [
        RowParams(temperature=0.0, bias=dict.fromkeys(edges, 9.0)),
        *(RowParams(temperature=0.0, bias={edge: 30.0}) for edge in edges),
        RowParams(temperature=0.0, presence=9.0, output_ids=edges, bias={edges[0]: 12.0, edges[2]: 12.5}),
        RowParams(top_k=40, repetition=1.3, prompt_ids=edges, allowed=kept),
        RowParams(top_k=900, top_p=0.6, bias=dict.fromkeys(edges, 3.0)),
        RowParams(top_p=0.3, min_p=0.01, frequency=0.5, output_ids=edges * 2),
        RowParams(top_p=0.2, allowed=edges[1:3]),
        RowParams(top_p=0.9, allowed=edges[3:]),
        RowParams(temperature=0.5, min_p=0.2, allowed=edges),
        RowParams(temperature=3.0),
    ]
    logits = torch.randn((len(rows), vocab), generator=torch.Generator().manual_seed(5)) * 2
    draw = draw_of(rows, range(len(rows)))
    changes = {"penalties": penalties_of(rows, vocab), "bias": bias_of(rows), "mask": mask_of(rows, vocab)}
    assert sample.sample(logits, draw, **changes).tolist() == reference_tokens(logits, rows, draw)


def test_parts_without_a_score_that_could_be_kept_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    load = device_sample._load_scores.fn

    def noting(row_ptr: object, part: int, *rest: object) -> object:
        read.append(int(part))
        return load(row_ptr, part, *rest)

    monkeypatch.setattr(device_sample, "_load_scores", noting)
    logits = torch.randn((3, 9 * sample.MAX_BLOCK), generator=torch.Generator().manual_seed(6))
    logits[:, :: 2 * sample.MAX_BLOCK] += 30.0  # in parts 0, 2, 4, 6 and 8
    rows = [RowParams(top_k=3), RowParams(top_p=0.9), RowParams(top_k=4, top_p=0.7, min_p=0.01)]
    draw = draw_of(rows, range(3))
    assert sample.sample(logits, draw).tolist() == reference_tokens(logits, rows, draw)
    assert {*read} <= {0, 2, 4, 6, 8}


def test_noise_is_computed_for_rows_that_draw_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def gumbel(*_: object) -> None:
        raise ArithmeticError("noise")

    monkeypatch.setattr(device_sample, "_gumbel", gumbel)
    logits = torch.zeros((1, 8))
    assert sample.sample(logits, draw_of([RowParams(temperature=0.0, top_k=2)], [0])).tolist() == [0]
    with pytest.raises(Exception, match="noise"):
        sample.sample(logits, draw_of([RowParams()], [0]))


def test_greedy_ties_go_to_the_lowest_id() -> None:
    logits = torch.zeros((1, VOCAB))
    logits[0, [4200, 77, 3000]] = 1.0
    assert sample.sample(logits, draw_of([RowParams(temperature=0.0)], [0])).tolist() == [77]


def test_tokens_of_equal_logit_stand_or_fall_together_in_top_k() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]] * 20)
    drawn = sample.sample(logits, draw_of([RowParams(top_k=2)] * 20, range(20)))
    assert set(drawn.tolist()) == {1, 2, 3}


def test_a_tiny_top_p_still_keeps_one_token() -> None:
    logits = torch.randn((4, 100), generator=torch.Generator().manual_seed(0))
    drawn = sample.sample(logits, draw_of([RowParams(top_p=1e-6)] * 4, range(4)))
    assert drawn.tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    "row", [RowParams(), *long(RowParams(temperature=0.6, top_k=6, top_p=0.9), RowParams(top_p=0.8, min_p=0.15))]
)
def test_frequencies_pass_a_chi_square_test(row: RowParams) -> None:
    draws, logits = 125, torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5])
    drawn = sample.sample(logits.expand(draws, -1).contiguous(), draw_of([row] * draws, range(draws)))
    scores = logits.double() / row.temperature
    keep = reference.kept(scores, row)
    expected = scores.masked_fill(~keep, -math.inf).softmax(0)[keep] * draws
    counts = torch.bincount(drawn, minlength=8)
    assert counts[~keep].sum() == 0
    freedom = len(expected) - 1
    chi_square = float(((counts[keep] - expected) ** 2 / expected).sum())
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom) + 4  # beyond the 99.9th percentile


def test_a_draw_does_not_depend_on_the_rest_of_the_batch() -> None:
    logits = torch.randn((3, 200), generator=torch.Generator().manual_seed(4))
    rows = [RowParams(), RowParams(top_k=5), RowParams(temperature=0.5, top_p=0.7)]
    draw = draw_of(rows, [9, 9, 9])
    alone = sample.Params(*(getattr(draw, name)[2:] for name in ("keys", "temperature", "top_k", "top_p", "min_p")))
    assert sample.sample(logits, draw).tolist()[2] == sample.sample(logits[2:], alone).item()
