"""Compare every kernel with its reference in float64, on the GPU, on random data and poisoned outputs."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import product

import gpu_problem as problem
import reference_kernels as reference
import torch
from gpu_compile import pooled
from gpu_device import Device
from gpu_problem import Lens
from gpu_report import Case, Row
from torch import Tensor

from pdserve.kernels import pageio, rng, sample
from pdserve.kernels.attention import PagedAttention, StepSize
from pdserve.kernels.kv_rows import KvRows
from pdserve.protocol.kvlayout import KvCode

HALF = 7.5e-3
NEAR_TIES = 1.0  # rows of 100 that may differ: logarithms are not rounded alike everywhere
DIMS, PAGE_SIZES = (64, 80, 96, 128, 256), (16, 64, 128)
HEADS = ((4, 4), (32, 8), (8, 1), (9, 3))
# Heads, head dims and page sizes of models that are served much, and the others once each.
TELLING = {
    ((32, 8), 128, 64), ((32, 8), 128, 16), ((8, 1), 128, 64), ((4, 4), 64, 64), ((9, 3), 64, 16),
    ((32, 8), 80, 64), ((32, 8), 96, 128), ((4, 4), 256, 64),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Check:
    """A kernel on one problem: `run` returns the largest error."""

    name: str
    run: Callable[[Device], float]
    allowed: float
    is_telling: bool = True  # if not, it runs only where all are asked for


def cases(device: Device) -> Iterator[Case]:
    """Run the telling checks, or all, in several processes: compiling takes most of the time."""
    wanted = [check for check in _checks() if check.is_telling or device.is_thorough]
    with pooled(device, [check.run for check in device.sized(wanted, _dry())]) as errors:
        for check, error in zip(device.sized(wanted, _dry()), errors, strict=True):
            yield check.name, partial(_row, check, error)


def _row(check: Check, computed: Future[float]) -> list[Row]:
    error = computed.result()
    failed = not error <= check.allowed
    return [Row(check.name, {"error": error, "allowed": check.allowed}, failed=failed)]


def _checks() -> list[Check]:
    return [*_attention(), *_others()]


def _dry() -> list[Check]:
    lens = Lens((2, 1), (9, 5))
    return [
        Check("prefill", partial(_prefill_error, (2, 1), 16, 16, lens), HALF),
        Check("prefill int8", partial(_prefill_error, (2, 1), 16, 16, lens, code="int8"), HALF),
        Check("decode", partial(_decode_error, (2, 1), 16, 16, Lens((1, 1), (9, 5))), HALF),
        *_others(),
    ]


def _attention() -> Iterator[Check]:
    for heads, dim, page_size in product(HEADS, DIMS, PAGE_SIZES):
        kv = (1, page_size - 1, page_size, page_size + 1, 2500)
        name, chosen = f"{heads[0]}/{heads[1]} d{dim} pages of {page_size}", (heads, dim, page_size)
        chunks, singles = Lens((1, 3, 2, page_size, 700), kv), Lens((1,) * 5, kv)
        is_telling = chosen in TELLING
        yield Check(f"prefill {name}", partial(_prefill_error, *chosen, chunks), HALF, is_telling)
        yield Check(f"decode {name}", partial(_decode_error, *chosen, singles), HALF, is_telling)
    chunks, singles = (Lens(query, (4000, 70, 33)) for query in ((300, 5, 1), (1, 1, 1)))
    yield Check("prefill window", partial(_prefill_error, (8, 2), 128, 64, chunks, window=50), HALF)
    yield Check("decode window", partial(_decode_error, (8, 2), 128, 64, singles, window=50), HALF)
    prefill = partial(_prefill_error, (8, 2), 64, 64, chunks, window=128, soft_cap=30.0, has_sinks=True)
    yield Check("prefill window, cap, sinks", prefill, HALF)
    decode = partial(_decode_error, (8, 2), 64, 64, singles, window=128, soft_cap=30.0, has_sinks=True)
    yield Check("decode window, cap, sinks", decode, HALF)
    yield Check("decode sinks", partial(_decode_error, (8, 2), 64, 64, singles, has_sinks=True), HALF)
    for num_heads in (16, 20, 128):
        for_heads = partial(_prefill_error, (num_heads, 1), 576, 64, chunks, value_dim=512)
        yield Check(f"prefill latents, {num_heads} heads", for_heads, HALF)
        for_heads = partial(_decode_error, (num_heads, 1), 576, 64, singles, value_dim=512)
        yield Check(f"decode latents, {num_heads} heads", for_heads, HALF)
    for code in ("int8", "fp8_e4m3"):
        for heads, dim in (((8, 2), 128), ((9, 3), 64), ((4, 4), 256)):
            coded = partial(_prefill_error, heads, dim, 64, chunks, code=code)
            yield Check(f"prefill {code} d{dim}", coded, HALF)
            coded = partial(_decode_error, heads, dim, 64, singles, code=code)
            yield Check(f"decode {code} d{dim}", coded, HALF)
    float32 = Lens((40, 5), (500, 70))
    yield Check("prefill float32", partial(_prefill_error, (8, 2), 128, 64, float32, dtype=torch.float32), 1e-5)
    yield Check("prefill few heads, long", partial(_prefill_error, (8, 1), 128, 64, Lens((256,), (65536,))), HALF)


def _others() -> list[Check]:
    return [
        Check("rms norm", _norm_error, 2.0**-8),
        Check("silu mul", _silu_error, 2.0**-8),
        Check("norm, rope and write bf16", _write_error, 2.0**-7),
        Check("write int8", partial(_num_wrong_bytes, "int8"), 0.0),
        Check("write fp8_e4m3", partial(_num_wrong_bytes, "fp8_e4m3"), 0.0),
        Check("page digests", _num_wrong_digests, 0.0),
        Check("sampled tokens", _num_wrong_tokens, NEAR_TIES),
    ]


def _prefill_error(
    heads: tuple[int, int], dim: int, page_size: int, lens: Lens, device: Device, **fields: object
) -> float:
    case = problem.make(problem.spec_of(heads, dim, page_size, lens, **fields), lens, device=device.name)
    attention = PagedAttention(case.spec, device.torch)
    attention.plan(*lens.arrays, case.page_table)
    out = case.unwritten(len(case.q))
    return case.error(attention.run(case.q, *case.pages, out=out, sinks=case.sinks))


def _decode_error(
    heads: tuple[int, int], dim: int, page_size: int, lens: Lens, device: Device, **fields: object
) -> float:
    """Capture the step, then plan and replay it, as an engine would."""
    case = problem.make(problem.spec_of(heads, dim, page_size, lens, **fields), lens, device=device.name)
    query_lens, kv_lens = lens.arrays
    size = StepSize(len(kv_lens) + 2, int(kv_lens.max()) + 100)
    attention = PagedAttention(case.spec, device.torch, size)
    q = torch.zeros((size.max_seqs, *case.q.shape[1:]), dtype=case.q.dtype, device=device.torch)
    out = case.unwritten(len(q))

    def step() -> Tensor:
        return attention.run(q, *case.pages, out=out, sinks=case.sinks)

    step()
    replay = device.captured(step)
    q[: len(case.q)] = case.q
    attention.plan(query_lens, kv_lens, case.page_table)
    replay()
    device.synchronize()
    return case.error(out)


def _gap(got: Tensor, want: Tensor) -> float:
    """Return the largest difference over the larger of one and the wanted value; NaN counts as infinite."""
    gap = (got.double() - want.double()).abs() / want.double().abs().clamp(min=1)
    return float(gap.nan_to_num(nan=torch.inf).max())


def _norm_error(device: Device) -> float:
    width = device.sized(5120, 64)
    x, weight = (torch.randn(shape, device=device.torch).to(device.half) for shape in ((333, width), (width,)))
    return _gap(pageio.rms_norm(x, weight, 1e-5), reference.rms_norm(x.double(), weight.double(), 1e-5))


def _silu_error(device: Device) -> float:
    x = torch.randn((333, 2 * device.sized(1500, 50)), device=device.torch).to(device.half)
    return _gap(pageio.silu_mul(x), reference.silu_mul(x.double()))


def _write_error(device: Device) -> float:
    count = device.sized(333, 5)
    got, want = torch.zeros((2, 40, 2, 2, 8, 64, 128), dtype=device.half, device=device.torch)
    q, k, v = torch.randn((count, 48, 128), device=device.torch).to(device.half).split([32, 8, 8], dim=1)
    cos_sin, weight = (torch.rand((rows, 128), device=device.torch) for rows in (400, 2))
    positions, slots = (torch.randperm(400, device=device.torch)[:count] for _ in range(2))
    rotation = pageio.Rotation(cos_sin, q_norm=weight[0], k_norm=weight[1])
    pageio.rope_write((q, k, v), positions, rotation, pageio.Target(*problem.layer_views(got, 1), slots))
    normed = reference.rms_norm(k.double(), weight[1].double(), 1e-6)
    turned = reference.rope(normed, cos_sin[positions].double())
    for pages, values in zip(problem.layer_views(want, 1), (turned.float(), v.float()), strict=True):
        problem.write_pages(pages, values, slots)
    return _gap(got.float(), want.float())


def _num_wrong_bytes(code: KvCode, device: Device) -> float:
    """Count bytes of coded rows that are not those that torch makes on the CPU."""
    count, rows = device.sized(333, 5), KvRows(128, device.half, code)
    pool = torch.zeros((40, 2, 2, 8, 64, rows.width), dtype=torch.uint8, device=device.torch)
    wanted, sizes = pool.cpu(), torch.exp2(torch.randint(-20, 20, (count, 48, 1), device=device.torch).float())
    q, k, v = (torch.randn((count, 48, 128), device=device.torch) * sizes).to(device.half).split([32, 8, 8], dim=1)
    unturned = torch.cat((torch.ones((1, 64)), torch.zeros((1, 64))), 1).to(device.torch)
    positions, slots = torch.zeros(count, dtype=torch.int32), torch.randperm(400)[:count]
    target = pageio.Target(*problem.layer_views(pool, 1), slots.to(device.torch), code)
    pageio.rope_write((q, k, v), positions.to(device.torch), pageio.Rotation(unturned), target)
    for pages, values in zip(problem.layer_views(wanted, 1), (k, v), strict=True):
        problem.write_pages(pages, rows.packed(values.cpu()), slots)
    return float((pool.cpu() != wanted).sum())


def _num_wrong_digests(device: Device) -> float:
    pool = torch.randn((9, 3, 2, 8, 16, device.sized(128, 16)), device=device.torch).bfloat16()
    ids = torch.arange(9, device=device.torch)
    return float((pageio.page_digests(pool, ids).cpu() != reference.page_digests(pool.cpu())).sum())


def _num_wrong_tokens(device: Device) -> float:
    """Count rows whose token differs from the reference's on the CPU."""
    kinds = [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.7, 20, 0.95, 0.0), (1.2, 0, 0.9, 0.05), (0.8, 50, 1.0, 0.0)]
    num_rows, vocab_size = device.sized((100, 32_000), (5, 300))
    params = [reference.RowParams(*kinds[row % len(kinds)]) for row in range(num_rows)]
    logits, words = torch.randn((num_rows, vocab_size)) * 4, rng.keys(list(range(num_rows)), [7] * num_rows)

    def column(name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor([getattr(row, name) for row in params], dtype=dtype, device=device.torch)

    sampled_by = sample.Params(
        reference.as_tensor(words, device.torch),
        column("temperature"),
        column("top_k", torch.int32),
        column("top_p"),
        column("min_p"),
    )
    got = sample.sample(logits.to(device.torch), sampled_by).tolist()
    want = [reference.sample(logits[row].double(), params[row], words[row]) for row in range(num_rows)]
    return float(sum(ours != theirs for ours, theirs in zip(got, want, strict=True)))
