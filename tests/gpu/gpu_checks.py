"""Compare every kernel with its reference in float64, on the GPU, on random data and poisoned outputs."""

from collections.abc import Callable, Iterator

import gpu_problem as problem
import reference_kernels as reference
import torch
from gpu_problem import Lens
from gpu_report import Row
from torch import Tensor

from pdserve.kernels import pageio, rng, sample
from pdserve.kernels.attention import PagedAttention, StepSize

HALF = 7.5e-3
NEAR_TIES = 1.0  # rows of 100 that may differ: logarithms are not rounded alike everywhere
DEVICE = "cuda"

Check = tuple[str, Callable[[], float], float]  # name, largest error, what is allowed


def run(only: str) -> list[Row]:
    """Run every check; a kernel that cannot be launched has failed too."""
    found = []
    for name, check, allowed in [*_attention(), *_rows(), *_pages(), ("sampled tokens", _sampling, NEAR_TIES)]:
        if only not in name:
            continue
        try:
            error, note = check(), ""
        except Exception as problem:  # noqa: BLE001 - one broken kernel must not hide the others
            error, note = float("inf"), f"{type(problem).__name__}: {problem}"[:200]
        failed = not error <= allowed
        found.append(Row(name, note=note or f"error {error:.2e} of {allowed:.2e}", failed=failed))
    return found


def _attention() -> Iterator[Check]:
    for heads in ((4, 4), (32, 8), (8, 1), (9, 3)):
        for dim in (64, 80, 96, 128, 256):
            for page_size in (16, 64, 128):
                kv = (1, page_size - 1, page_size, page_size + 1, 2500)
                name = f"{heads[0]}/{heads[1]} d{dim} pages of {page_size}"
                yield (
                    f"prefill {name}",
                    _prefill_check(heads, dim, page_size, Lens((1, 3, 2, page_size, 700), kv)),
                    HALF,
                )
                yield f"decode {name}", _decode_check(heads, dim, page_size, Lens((1,) * 5, kv)), HALF
    chunks, singles = (Lens(query, (4000, 70, 33)) for query in ((300, 5, 1), (1, 1, 1)))
    yield "prefill window", _prefill_check((8, 2), 128, 64, chunks, window=50), HALF
    yield "decode window", _decode_check((8, 2), 128, 64, singles, window=50), HALF
    float32 = Lens((40, 5), (500, 70))
    yield "prefill float32", _prefill_check((8, 2), 128, 64, float32, dtype=torch.float32), 1e-5
    yield "prefill few heads, long", _prefill_check((8, 1), 128, 64, Lens((256,), (65536,))), HALF


def _prefill_check(
    heads: tuple[int, int], dim: int, page_size: int, lens: Lens, **fields: object
) -> Callable[[], float]:
    def check() -> float:
        case = problem.make(problem.spec_of(heads, dim, page_size, lens, **fields), lens, device=DEVICE)
        attention = PagedAttention(case.spec, DEVICE)
        attention.plan(*lens.arrays, case.page_table)
        out = torch.full_like(case.q, torch.nan)
        return case.error(attention.run(case.q, *case.pages, out=out))

    return check


def _decode_check(
    heads: tuple[int, int], dim: int, page_size: int, lens: Lens, **fields: object
) -> Callable[[], float]:
    def check() -> float:
        """Capture the step, then plan and replay it, as an engine would."""
        case = problem.make(problem.spec_of(heads, dim, page_size, lens, **fields), lens, device=DEVICE)
        query_lens, kv_lens = lens.arrays
        size = StepSize(len(kv_lens) + 2, int(kv_lens.max()) + 100)
        attention = PagedAttention(case.spec, DEVICE, size)
        q = torch.zeros((size.max_seqs, *case.q.shape[1:]), dtype=case.q.dtype, device=DEVICE)
        out = torch.full_like(q, torch.nan)
        attention.run(q, *case.pages, out=out)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            attention.run(q, *case.pages, out=out)
        q[: len(case.q)] = case.q
        attention.plan(query_lens, kv_lens, case.page_table)
        graph.replay()
        torch.cuda.synchronize()
        return case.error(out)

    return check


def _gap(got: Tensor, want: Tensor) -> float:
    """Return the largest difference over the larger of one and the wanted value; NaN counts as infinite."""
    gap = (got.double() - want.double()).abs() / want.double().abs().clamp(min=1)
    return float(gap.nan_to_num(nan=torch.inf).max())


def _rows() -> Iterator[Check]:
    def norm() -> float:
        x, weight = (torch.randn(shape, device=DEVICE).bfloat16() for shape in ((333, 5120), (5120,)))
        return _gap(pageio.rms_norm(x, weight, 1e-5), reference.rms_norm(x.double(), weight.double(), 1e-5))

    def silu() -> float:
        x = torch.randn((333, 2 * 1500), device=DEVICE).bfloat16()
        return _gap(pageio.silu_mul(x), reference.silu_mul(x.double()))

    return iter([("rms norm", norm, 2.0**-8), ("silu mul", silu, 2.0**-8)])


def _pages() -> Iterator[Check]:
    def write() -> float:
        got, want = torch.zeros((2, 40, 2, 2, 8, 64, 128), dtype=torch.bfloat16, device=DEVICE)
        q, k, v = torch.randn((333, 48, 128), device=DEVICE).bfloat16().split([32, 8, 8], dim=1)
        cos_sin, weight = torch.rand((400, 128), device=DEVICE), torch.rand((2, 128), device=DEVICE)
        positions, slots = (torch.randperm(400, device=DEVICE)[:333] for _ in range(2))
        rotation = pageio.Rotation(cos_sin, q_norm=weight[0], k_norm=weight[1])
        pageio.rope_write((q, k, v), positions, rotation, pageio.Target(*problem.layer_views(got, 1), slots))
        normed = reference.rms_norm(k.double(), weight[1].double(), 1e-6)
        turned = reference.rope(normed, cos_sin[positions].double())
        for pages, values in zip(problem.layer_views(want, 1), (turned.float(), v.float()), strict=True):
            problem.write_pages(pages, values, slots)
        return _gap(got.float(), want.float())

    def digests() -> float:
        pool = torch.randn((9, 3, 2, 8, 16, 128), device=DEVICE).bfloat16()
        ids = torch.arange(9, device=DEVICE)
        return float((pageio.page_digests(pool, ids).cpu() != reference.page_digests(pool.cpu())).sum())

    yield "norm, rope and write bf16", write, 2.0**-7
    yield "page digests", digests, 0.0


def _sampling() -> float:
    """Count rows whose token differs from the reference's on the CPU."""
    kinds = [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.7, 20, 0.95, 0.0), (1.2, 0, 0.9, 0.05), (0.8, 50, 1.0, 0.0)]
    params = [reference.RowParams(*kinds[row % len(kinds)]) for row in range(100)]
    logits, words = torch.randn((100, 32000)) * 4, rng.keys(list(range(100)), [7] * 100)

    def column(name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor([getattr(row, name) for row in params], dtype=dtype, device=DEVICE)

    sampled_by = sample.Params(
        reference.as_tensor(words, DEVICE),
        column("temperature"),
        column("top_k", torch.int32),
        column("top_p"),
        column("min_p"),
    )
    got = sample.sample(logits.to(DEVICE), sampled_by).tolist()
    want = [reference.sample(logits[row].double(), params[row], words[row]) for row in range(100)]
    return float(sum(ours != theirs for ours, theirs in zip(got, want, strict=True)))
