"""Compiled recurrences over states in pages are the formulas in float64, token by token.

A token's bits, and those of the state behind it, depend on its own sequence alone: not on other sequences, on how its
prompt was cut, or on threads. Pages are written when states are kept, and not before.
"""

import ctypes
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from pdserve.kernels.cpu.calls import Immediate, Program
from pdserve.kernels.cpu.states import Gating, Heads, PagedStates, Recurrence, scale

SPAN, FIRST = 8, 5  # tokens of a page; values before a layer's in a page
CLOSE = {torch.float32: 2e-5, torch.bfloat16: 2**-6}
Cut = tuple[int, int, int]  # sequence, first token, end
KINDS = ("conv", "delta", "delta of two widths", "delta of wide heads", "space", "space without norm", "norm first")
LENGTHS = (1, 2, 7, 8, 9, 16, 33)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + 7 * sum(shape)))


def layer(kind: str, dtype: torch.dtype) -> Recurrence:
    """Return a random layer, and the features of its inputs."""
    if kind == "conv":
        return Recurrence(weight=drawn(3, 21), bias=drawn(21), inputs_at=42, gates_at=21)
    is_space = kind not in ("delta", "delta of two widths", "delta of wide heads")
    count, groups, key_dim, value_dim = {
        "delta": (6, 2, 16, 24), "delta of two widths": (2, 1, 9, 70), "delta of wide heads": (2, 2, 128, 128),
    }.get(kind, (4, 2, 24, 20))  # fmt: skip
    keys, values = groups * key_dim, count * value_dim
    channels = 2 * keys + values
    gating = Gating(norm=(1 + 0.1 * drawn(value_dim)).to(dtype), part=value_dim, eps=1e-6, rounds=True)
    if is_space:
        norm = (1 + 0.1 * drawn(values)).to(dtype)
        gating = Gating(norm=norm, part=values // groups, eps=1e-5, gates_first=kind == "space", scale=0.5)
        gating = Gating(scale=0.5) if kind == "space without norm" else gating
    heads = Heads(
        count=count, groups=groups, key_dim=key_dim, value_dim=value_dim, order="vkq" if is_space else "qkv",
        rates_at=values + channels, betas_at=None if is_space else values + channels + count,
        rate=-drawn(count).abs(), rate_bias=drawn(count, seed=1), direct=drawn(count) if is_space else None,
        gating=gating,
    )  # fmt: skip
    bias = drawn(channels) if is_space else None
    return Recurrence(weight=drawn(4, channels) / 2, bias=bias, inputs_at=values, gates_at=0, heads=heads)


def num_inputs(of: Recurrence) -> int:
    channels = of.weight.shape[1]
    return 3 * channels if of.heads is None else of.width + channels + 2 * of.heads.count


def expected(of: Recurrence, taken: Tensor) -> Tensor:
    """Compute a sequence of inputs from its beginning, as the formulas say."""
    x, (kernel, channels) = taken.double(), of.weight.shape
    inputs, gates = x[:, of.inputs_at : of.inputs_at + channels], x[:, of.gates_at : of.gates_at + of.width]
    if of.heads is None:
        inputs = (x[:, :channels] * inputs).to(taken.dtype).double()
    padded = torch.cat((inputs.new_zeros(kernel - 1, channels), inputs))
    sums = sum(padded[i : i + len(x)] * of.weight[i].double() for i in range(kernel))
    sums = sums + (0.0 if of.bias is None else of.bias.double())
    if of.heads is None:
        return gates * sums
    heads, made = of.heads, []
    keys, values = heads.groups * heads.key_dim, of.width
    widths = [values if name == "v" else keys for name in heads.order]
    parts = dict(zip(heads.order, silu(sums).split(widths, 1), strict=True))
    steps = softplus(x[:, heads.rates_at : heads.rates_at + heads.count] + heads.rate_bias.double())
    memory = x.new_zeros(heads.count, heads.key_dim, heads.value_dim)
    for t in range(len(x)):
        q, k = (parts[each][t].view(heads.groups, -1) for each in "qk")
        v = parts["v"][t].view(heads.count, -1)
        if heads.betas_at is not None:
            q, k = (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (q, k))
            q = q * heads.key_dim**-0.5
        q, k = (each.repeat_interleave(heads.count // heads.groups, 0) for each in (q, k))
        memory = memory * (heads.rate.double() * steps[t]).exp()[:, None, None]
        if heads.betas_at is None:
            learnt = v * steps[t][:, None]
        else:
            beta = x[t, heads.betas_at : heads.betas_at + heads.count].sigmoid()
            learnt = (v - torch.einsum("hkv,hk->hv", memory, k)) * beta[:, None]
        memory = memory + k[:, :, None] * learnt[:, None]
        direct = 0.0 if heads.direct is None else heads.direct.double()[:, None] * v
        made.append((torch.einsum("hkv,hk->hv", memory, q) + direct).flatten())
    return gated(heads.gating, torch.stack(made), silu(gates))


def gated(of: Gating, made: Tensor, gates: Tensor) -> Tensor:
    if of.norm is None:
        return made * gates * of.scale
    made = made * gates if of.gates_first else made
    parts = made.view(len(made), -1, of.part)
    normed = parts * (parts.square().mean(-1, keepdim=True) + of.eps).rsqrt()
    weights = of.norm.double().repeat(made.shape[1] // len(of.norm))
    return normed.flatten(1) * weights * (1.0 if of.gates_first else gates) * of.scale


class Sequences:
    """Sequences of random inputs, and a pool whose other values are NaN."""

    def __init__(self, of: Recurrence, dtype: torch.dtype, lengths: Sequence[int]) -> None:
        self.of = of
        self.taken = [drawn(length, num_inputs(of), seed=row).to(dtype) for row, length in enumerate(lengths)]
        counts = [-(-length // SPAN) for length in lengths]
        self.pool = torch.full((sum(counts) + 1, FIRST + of.kept_inputs + of.memory + 3), math.nan)
        supply = np.random.default_rng(0).permutation(len(self.pool))
        self.table = np.full((len(lengths), max(counts)), supply[0])
        ends = np.cumsum(counts)
        for row, (count, end) in enumerate(zip(counts, ends, strict=True)):
            self.table[row, :count] = supply[1 + end - count : 1 + end]
        self.paged = PagedStates(self.pool, SPAN)

    def step(self, loaded: ctypes.CDLL, cuts: list[Cut], *, keeps: bool = True) -> dict[int, Tensor]:
        """Compute the chunks of a step, and return what each sequence's tokens become."""
        cuts = sorted(cuts, key=lambda cut: cut[2] - cut[1])
        rows, begins, ends = (np.array(each) for each in zip(*cuts, strict=True))
        calls = Immediate(loaded)
        self.paged.plan(self.table[rows], ends - begins, ends)
        taken = torch.cat([self.taken[row][begin:end] for row, begin, end in cuts])
        out, kept = self.paged.recur(calls, self.of, FIRST, taken)
        if keeps:
            calls.take(1, kept.call)
        parts = out.split([end - begin for _, begin, end in cuts])
        return {row: part for (row, _, _), part in zip(cuts, parts, strict=True)}

    def state(self, row: int, length: int) -> Tensor:
        """Return the state behind so many tokens."""
        return self.pool[self.table[row, (length - 1) // SPAN], FIRST:-3]


def check(loaded: ctypes.CDLL, kind: str, dtype: torch.dtype) -> None:
    sequences = Sequences(of := layer(kind, dtype), dtype, LENGTHS)
    found = sequences.step(loaded, [(row, 0, length) for row, length in enumerate(LENGTHS)])
    for row, taken in enumerate(sequences.taken):
        torch.testing.assert_close(found[row].double(), expected(of, taken), atol=CLOSE[dtype], rtol=CLOSE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_each_token_of_a_sequence_is_the_formula(loaded: ctypes.CDLL, kind: str, dtype: torch.dtype) -> None:
    check(loaded, kind, dtype)


def test_vectors_of_any_width_give_the_formula(narrow: ctypes.CDLL) -> None:
    for kind in KINDS:
        check(narrow, kind, torch.float32)
        check(narrow, kind, torch.bfloat16)


@pytest.mark.parametrize("cuts", [range(34), [0, 1, 2, 9, 33], [0, 8, 16, 33], [0, 7, 8, 17, 32, 33]])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_of_tokens_and_states_depend_neither_on_chunks_nor_on_company_nor_on_threads(
    loaded: ctypes.CDLL, dtype: torch.dtype, kind: str, cuts: Sequence[int]
) -> None:
    lengths, threads = (33, 12, 5), torch.get_num_threads()
    of = layer(kind, dtype)
    whole, parts = (Sequences(of, dtype, lengths) for _ in range(2))
    expected = whole.step(loaded, [(row, 0, length) for row, length in enumerate(lengths)])
    others = [[(1, 0, 4), (2, 0, 4)], [(1, 4, 5), (2, 4, 5)], [(1, 5, 12)]]
    found: dict[int, list[Tensor]] = {0: [], 1: [], 2: []}
    try:
        torch.set_num_threads(3 if threads == 1 else 1)
        for turn, (begin, end) in enumerate(pairwise(cuts)):
            step = parts.step(loaded, [(0, begin, end), *(others[turn] if turn < len(others) else [])])
            for row, part in step.items():
                found[row].append(part)
    finally:
        torch.set_num_threads(threads)
    for row, length in enumerate(lengths):
        assert torch.equal(torch.cat(found[row]), expected[row])
        assert torch.equal(parts.state(row, length), whole.state(row, length))
    for span in range(1, 5):
        assert torch.equal(parts.state(0, span * SPAN), whole.state(0, span * SPAN)), "a snapshot behind a full span"


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_writes_no_page_before_its_states_are_kept_and_then_no_other(loaded: ctypes.CDLL, kind: str) -> None:
    sequences = Sequences(layer(kind, torch.float32), torch.float32, (20, 20))
    first = [(0, 0, 10), (1, 0, 3)]
    sequences.step(loaded, first, keeps=False)
    assert sequences.pool.isnan().all()
    sequences.step(loaded, first)
    is_written = ~sequences.pool[:, FIRST:-3].isnan()
    assert sorted(is_written.all(1).nonzero().flatten().tolist()) == sorted(
        {*sequences.table[0, :2], sequences.table[1, 0]}
    )
    assert is_written.any(1).sum() == 3
    assert sequences.pool[:, :FIRST].isnan().all()
    assert sequences.pool[:, -3:].isnan().all()
    before, second = sequences.pool.clone(), [(0, 10, 20), (1, 3, 4)]
    alone = sequences.step(loaded, second, keeps=False)
    assert torch.equal(sequences.pool.nan_to_num(), before.nan_to_num())
    again = sequences.step(loaded, second)
    assert all(torch.equal(alone[row], again[row]) for row in alone), "it can be computed again"


@pytest.mark.parametrize("kind", KINDS)
def test_a_program_of_more_rows_computes_what_calls_one_by_one_do(loaded: ctypes.CDLL, kind: str) -> None:
    lengths = (9, 8, 1)
    of = layer(kind, torch.float32)
    one, other = (Sequences(of, torch.float32, lengths) for _ in range(2))
    for each in (one, other):
        each.step(loaded, [(0, 0, 8), (1, 0, 7)])
    expected = one.step(loaded, [(0, 8, 9), (1, 7, 8), (2, 0, 1)])
    program, keeping = Program(loaded), Program(loaded)
    taken = torch.zeros(4, num_inputs(of))
    other.paged.plan(other.table[:1], np.array([1]), np.array([1]))
    out, kept = other.paged.recur(program, of, FIRST, taken)
    keeping.take(4, kept.call)
    other.paged.plan(other.table, np.ones(3, dtype=np.int64), np.array(lengths))
    taken[:3] = torch.stack([rows[length - 1] for rows, length in zip(other.taken, lengths, strict=True)])
    program.run(3)
    keeping.run(3)
    assert torch.equal(out[:3], torch.cat([expected[row] for row in range(3)]))
    for row, length in enumerate(lengths):
        assert torch.equal(other.state(row, length), one.state(row, length))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_factors_and_gates_are_torchs(loaded: ctypes.CDLL, dtype: torch.dtype) -> None:
    calls = Immediate(loaded)
    for width in (1, 16, 37):
        x, gates = drawn(3, width).to(dtype), drawn(3, width, seed=1).to(dtype)
        assert torch.equal(scale(calls, x, 0.7), x * 0.7)
        assert torch.equal(scale(calls, x, gates[0]), x * gates[0])
        wide = torch.zeros(3, width + 5, dtype=dtype)
        scale(calls, x, 1.0, wide[:, 5:])
        assert torch.equal(wide[:, 5:], x)
        assert not wide[:, :5].any()
        torch.testing.assert_close(scale(calls, x, 1.0, None, gates), x * gates.sigmoid())


def test_layers_and_steps_of_other_shapes_are_refused_by_name(loaded: ctypes.CDLL) -> None:
    of = layer("delta", torch.float32)
    assert of.heads is not None
    sequences = Sequences(of, torch.float32, (5, 5))
    narrower, wide = (replace(of.heads, key_dim=key_dim) for key_dim in (8, 2049))
    sequences.step(loaded, [(0, 0, 5)])
    calls, paged, taken, two = Immediate(loaded), sequences.paged, sequences.taken[0], np.array([1, 1])
    for bad, message in (
        (lambda: paged.recur(calls, of, FIRST, taken[:4]), "taken must be of 5 tokens"),
        (lambda: paged.recur(calls, replace(of, bias=drawn(3)), FIRST, taken), "bias must have shape"),
        (lambda: paged.recur(calls, replace(of, heads=narrower), FIRST, taken), "channels must be"),
        (lambda: paged.recur(calls, replace(of, heads=wide), FIRST, taken), "key_dim must be at most 2048"),
        (lambda: paged.recur(calls, of, FIRST, taken.half()), "taken must be one of"),
        (lambda: paged.plan(sequences.table, np.array([2, 1]), np.array([2, 1])), "query_lens must not fall"),
        (lambda: paged.plan(sequences.table + 99, two, two), "page_table names pages that are not there"),
        (lambda: PagedStates(sequences.pool.double(), SPAN), "pool must be one of"),
    ):
        with pytest.raises(ValueError, match=message):
            bad()
