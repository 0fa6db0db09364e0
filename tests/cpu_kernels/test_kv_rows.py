"""Rows of K and V in a byte a value: the library writes torch's bytes, and attends to what these bytes stand for.

What rows mean is written here again, in float64 and from a table of all codes.
"""

import ctypes
import math
from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
import reference_kernels as reference
import torch
from coded_rows import hard_rows
from torch import Tensor
from wider_pools import among_others

from pdserve.kernels.cpu.attention import SPLIT, Chunks, HeadWeights, PagedAttention, Rows, Scoring
from pdserve.kernels.cpu.calls import Immediate
from pdserve.kernels.kv_rows import KvRows
from pdserve.protocol.kvlayout import KvCode

CODES: tuple[KvCode, ...] = ("int8", "fp8_e4m3")
LAYER, NUM_LAYERS = 1, 2
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2**-6}
CONTEXTS = [1, 2, 15, 17, 100, SPLIT - 1, SPLIT + 1, 2 * SPLIT + 5]
SPANS = [(0, 2), (0, 33), (0, 200), (1, 3), (17, 50), (63, 65), (100, 230)]


def e4m3_values() -> list[float]:
    """Return what each byte stands for, by the OCP's definition: 4 bits of exponent with bias 7, no infinities."""
    found = []
    for byte in range(256):
        exponent, part = byte >> 3 & 15, byte & 7
        size = math.ldexp(part, -9) if exponent == 0 else math.ldexp(8 + part, exponent - 10)
        found.append((-1 if byte & 128 else 1) * (math.nan if byte & 127 == 127 else size))
    return found


def values_of(rows: Tensor, code: KvCode) -> Tensor:
    """Return what rows [.., head_dim + 4] stand for, in float64."""
    codes, scale = rows[..., :-4].numpy(), rows[..., -4:].contiguous().numpy().view(np.float32)
    table = np.arange(256).astype(np.int8).astype(np.float64) if code == "int8" else np.array(e4m3_values())
    return torch.from_numpy(table[codes] * scale.astype(np.float64))


def placed(loaded: ctypes.CDLL, pool: Tensor, rows: KvRows, qkv: Tensor, targets: np.ndarray) -> None:
    """Write K and V of tokens that nobody attends with, unturned."""
    nothing = np.zeros(0, dtype=np.int64)
    paged = PagedAttention(pool, qkv.shape[1] - 2 * pool.shape[3], rows=rows)
    angles = torch.cat((torch.ones(len(qkv), rows.head_dim // 2), torch.zeros(len(qkv), rows.head_dim // 2)), 1)
    paged.plan([angles], targets, Rows(np.zeros((0, 1), dtype=np.int64), nothing, nothing))
    paged.run(Immediate(loaded), LAYER, qkv)


def written(loaded: ctypes.CDLL, rows: KvRows) -> tuple[Tensor, Tensor]:
    """Return hard rows, and what the library writes of them: [tokens, 2, ..]."""
    given, head_dim, dtype = hard_rows(rows.head_dim, rows.dtype), rows.head_dim, rows.dtype
    num_tokens, page_size = len(given) // 2, 16
    num_pages = -(-num_tokens // page_size)
    pool = torch.full((num_pages, NUM_LAYERS, 2, 1, page_size, rows.width), 255, dtype=torch.uint8)
    qkv = torch.cat((torch.zeros(num_tokens, 1, head_dim, dtype=dtype), given.view(num_tokens, 2, head_dim)), 1)
    targets = np.stack(np.divmod(np.arange(num_tokens), page_size), 1)
    placed(loaded, pool, rows, qkv, targets)
    found = pool[:, LAYER, :, 0].transpose(1, 2).reshape(-1, 2, rows.width)[:num_tokens]
    return qkv[:, 1:], found


FORMS = [*product(CODES, [torch.float32, torch.bfloat16], [16, 64, 80, 128])]


@pytest.mark.parametrize(("code", "dtype", "head_dim"), FORMS)
def test_the_library_writes_the_bytes_that_torch_writes(
    loaded: ctypes.CDLL, code: KvCode, dtype: torch.dtype, head_dim: int
) -> None:
    rows = KvRows(head_dim, dtype, code)
    given, found = written(loaded, rows)
    assert torch.equal(found, rows.packed(given))


@pytest.mark.parametrize(("code", "dtype", "head_dim"), FORMS)
def test_vectors_of_any_width_write_these_bytes(
    narrow: ctypes.CDLL, code: KvCode, dtype: torch.dtype, head_dim: int
) -> None:
    rows = KvRows(head_dim, dtype, code)
    given, found = written(narrow, rows)
    assert torch.equal(found, rows.packed(given))


@pytest.mark.parametrize(("code", "dtype", "head_dim"), FORMS)
def test_a_row_stands_for_the_nearest_values_of_its_code(code: KvCode, dtype: torch.dtype, head_dim: int) -> None:
    rows, given = KvRows(head_dim, dtype, code), hard_rows(head_dim, dtype)
    packed, exact = rows.packed(given), given.double()
    values, finite = values_of(packed, code), given.float().isfinite().all(-1)
    assert finite.any()
    assert not finite.all()
    assert values[~finite].isnan().all()
    assert not packed[~finite][:, :-4].any()
    assert not packed[given.abs().amax(-1).double() < 2**-100].any()
    greatest = exact.abs().amax(-1, keepdim=True)
    # Half a unit of int8, or half of e4m3's last bit, and a little for what a scale and a division are rounded by.
    most = greatest / 254 if code == "int8" else torch.maximum(exact.abs() / 16, greatest / 448 * 2**-10)
    assert ((values - exact).abs() <= most * (1 + 1e-5) + greatest * 1e-6 + 2**-100)[finite].all()
    assert torch.equal(rows.expanded(packed)[finite], values[finite].float().to(dtype))


def random_bytes(shape: tuple[int, ...], code: KvCode, generator: torch.Generator) -> Tensor:
    """Return rows whose scales are unlike each other: those of K and V, heads and tokens differ up to 30 times."""
    codes = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    if code == "fp8_e4m3":
        codes[(codes & 127) == 127] = 7  # a subnormal one in place of NaN
    greatest = 127.0 if code == "int8" else 448.0
    scales = torch.exp2(torch.rand(*shape[:-1], 1, generator=generator) * 5 - 2) / greatest
    return torch.cat((codes, scales.view(torch.uint8)), -1)


class CodedCase:
    """Sequences of random codes in a pool of the sequences' pages, whose other slots hold NaN."""

    def __init__(self, code: KvCode, dtype: torch.dtype, heads: tuple[int, int], head_dim: int, page_size: int) -> None:
        self.generator = torch.Generator().manual_seed(head_dim + page_size)
        self.rows, self.heads, self.page_size = KvRows(head_dim, dtype, code), heads, page_size
        self.code = code

    def fill(self, lengths: list[int]) -> None:
        """Lay out sequences of so many tokens."""
        size, (_, num_kv_heads) = self.page_size, self.heads
        counts = [-(-length // size) for length in lengths]
        self.pool = torch.full(
            (sum(counts) + 1, NUM_LAYERS, 2, num_kv_heads, size, self.rows.width), 255, dtype=torch.uint8
        )
        supply = torch.randperm(len(self.pool), generator=self.generator).tolist()
        self.table = np.zeros((len(lengths), max(counts)), dtype=np.int64)
        for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            self.table[row, :count] = [supply.pop() for _ in range(count)]
            shape = (length, 2, num_kv_heads, self.rows.head_dim)
            coded = random_bytes(shape, self.code, self.generator)
            for position in range(length):
                self.pool[self.table[row, position // size], LAYER, :, :, position % size] = coded[position]

    def kept(self, row: int, end: int) -> Tensor:
        """Return K and V of a sequence's first tokens, from the bytes in the pool: [2, kv heads, end, head_dim]."""
        of_pages = self.pool[self.table[row], LAYER].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :end]
        return values_of(of_pages, self.code)

    def qkv(self, num_tokens: int) -> Tensor:
        shape = (num_tokens, sum(self.heads) + self.heads[1], self.rows.head_dim)
        return torch.randn(shape, generator=self.generator).to(self.rows.dtype)

    def paged(self, scoring: Scoring) -> PagedAttention:
        return PagedAttention(self.pool, self.heads[0], scoring, rows=self.rows)

    def angles(self, num_tokens: int) -> Tensor:
        half = self.rows.head_dim // 2
        return torch.cat((torch.ones(num_tokens, half), torch.zeros(num_tokens, half)), 1)


@dataclass(frozen=True)
class Seen:
    """What queries see, and how scores are changed."""

    heads: tuple[int, int]
    head_dim: int
    page_size: int = 16
    window: int | None = None
    soft_cap: float = 0.0
    has_sinks: bool = False


ROWS = [
    *product([torch.float32, torch.bfloat16], [Seen((6, 2), head_dim) for head_dim in (16, 64, 80, 128, 256)]),
    *product(
        [torch.bfloat16], [Seen(heads, 64, 16, 50, has_sinks=True) for heads in ((1, 1), (3, 3), (14, 2), (10, 1))]
    ),
    *product([torch.float32, torch.bfloat16], [Seen((6, 2), 64, size, 100, 2.0) for size in (7, 32)]),
]


@pytest.mark.parametrize(("code", "form"), [*product(CODES, ROWS)])
def test_each_row_attends_to_what_its_bytes_stand_for(
    loaded: ctypes.CDLL, code: KvCode, form: tuple[torch.dtype, Seen]
) -> None:
    check_rows(loaded, code, *form)


@pytest.mark.parametrize(("code", "form"), [*product(CODES, ROWS[1:9:3])])
def test_vectors_of_any_width_attend_to_it(narrow: ctypes.CDLL, code: KvCode, form: tuple[torch.dtype, Seen]) -> None:
    check_rows(narrow, code, *form)


def check_rows(loaded: ctypes.CDLL, code: KvCode, dtype: torch.dtype, seen: Seen) -> None:
    heads, head_dim, page_size, window, soft_cap = seen.heads, seen.head_dim, seen.page_size, seen.window, seen.soft_cap
    case = CodedCase(code, dtype, heads, head_dim, page_size)
    case.fill(CONTEXTS)
    qkv, ends = case.qkv(len(CONTEXTS)), np.array(CONTEXTS)
    sinks = torch.randn(heads[0], generator=case.generator) if seen.has_sinks else None
    targets = np.array(
        [(case.table[row, (end - 1) // page_size], (end - 1) % page_size) for row, end in enumerate(ends)]
    )
    begins = np.zeros_like(ends) if window is None else np.maximum(ends - window, 0)
    paged = case.paged(Scoring(head_dim**-0.5, soft_cap))
    paged.plan([case.angles(len(ends))], targets, Rows(case.table, begins, ends))
    out = paged.run(Immediate(loaded), LAYER, qkv, HeadWeights(sinks=sinks))
    scoring = reference.Scoring(head_dim**-0.5, window, soft_cap or None, sinks)
    expected = [
        reference.attention(qkv[row, None, : heads[0]].double(), *case.kept(row, end), scoring).flatten()
        for row, end in enumerate(CONTEXTS)
    ]
    torch.testing.assert_close(out.double(), torch.stack(expected), atol=CLOSE[dtype], rtol=CLOSE[dtype])


CHUNKS = [Seen((6, 2), 64), Seen((9, 3), 96, 16, 50, has_sinks=True), Seen((3, 1), 128, 7, 100, 2.0)]


@pytest.mark.parametrize(("code", "seen"), [*product(CODES, CHUNKS)])
def test_chunks_attend_to_what_their_bytes_stand_for(loaded: ctypes.CDLL, code: KvCode, seen: Seen) -> None:
    check_chunks(loaded, code, seen)


@pytest.mark.parametrize(("code", "seen"), [*product(CODES, CHUNKS[1:])])
def test_vectors_of_any_width_attend_to_it_in_chunks(narrow: ctypes.CDLL, code: KvCode, seen: Seen) -> None:
    check_chunks(narrow, code, seen)


def check_chunks(loaded: ctypes.CDLL, code: KvCode, seen: Seen) -> None:
    heads, head_dim, page_size, window, soft_cap = seen.heads, seen.head_dim, seen.page_size, seen.window, seen.soft_cap
    case = CodedCase(code, torch.bfloat16, heads, head_dim, page_size)
    case.fill([end for _, end in SPANS])
    case.pool = among_others(case.pool)
    tokens = [(row, position) for row, span in enumerate(SPANS) for position in range(*span)]
    qkv = case.qkv(len(tokens))
    sinks = torch.randn(heads[0], generator=case.generator) if seen.has_sinks else None
    targets = np.array([(case.table[row, position // page_size], position % page_size) for row, position in tokens])
    starts = np.cumsum([0, *(end - begin for begin, end in SPANS)])
    nothing = np.zeros(0, dtype=np.int64)
    chunks = Chunks(case.table, starts, np.array([begin for begin, _ in SPANS]), window)
    paged = case.paged(Scoring(head_dim**-0.5, soft_cap))
    paged.plan([case.angles(len(tokens))], targets, Rows(case.table[:0], nothing, nothing), chunks)
    out = paged.run(Immediate(loaded), LAYER, qkv, HeadWeights(sinks=sinks))
    scoring = reference.Scoring(head_dim**-0.5, window, soft_cap or None, sinks)
    expected = []
    for row, (begin, end) in enumerate(SPANS):
        queries = torch.zeros(end, heads[0], head_dim, dtype=torch.float64)
        queries[begin:] = qkv[starts[row] : starts[row + 1], : heads[0]].double()
        expected.append(reference.attention(queries, *case.kept(row, end), scoring).flatten(1)[begin:])
    close = CLOSE[torch.bfloat16]
    torch.testing.assert_close(out.double(), torch.cat(expected), atol=close, rtol=close)
