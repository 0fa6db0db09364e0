"""Every kernel with the arguments it ships with, on torch's meta device: what compile reports and tests go through."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from pdserve.kernels import experts, pageio, products, sample, states
from pdserve.kernels.attention import AttentionSpec, PagedAttention, StepSize
from pdserve.kernels.attention_plan import Ints
from pdserve.kernels.code_blocks import BLOCK, CodeBlocks, Kind
from pdserve.kernels.cpu.states import Gating, Heads, Recurrence
from pdserve.kernels.tuning import Device
from pdserve.protocol.kvlayout import KvCode

CHIPS = {
    80: Device((8, 0), 108),  # A100
    90: Device((9, 0), 132),  # H200
    100: Device((10, 0), 148),  # B200
}
SHARED_BYTES = {80: 166_912, 90: 232_448, 100: 232_448}  # most that one program may use
META = torch.device("meta")
LLAMA = AttentionSpec(64, 8, 128, 64, 4096, 128**-0.5)  # Llama 3.1 70B's attention
LATENTS = AttentionSpec(128, 1, 576, 64, 4096, 192**-0.5, value_dim=512)  # DeepSeek-V3's
ROWS = 64
VOCAB = 128256


@dataclass(frozen=True, slots=True)
class Case:
    """One shipping use of the kernels."""

    name: str
    run: Callable[[Device], object]
    hot: bool = False  # a step's time goes here: no spills allowed


def cases() -> list[Case]:
    """List every kernel in its shipping forms."""
    return [*attention_cases(), *page_cases(), *state_cases(), *row_cases(), *expert_cases(), *product_cases()]


def attention_cases() -> list[Case]:
    """List prefill and decode of all specs."""
    found = [Case("prefill d128 float32", prefill_of(replace(LLAMA, dtype=torch.float32)))]
    for name, spec in attention_specs().items():
        found.append(Case(f"prefill {name}", prefill_of(spec), hot=True))
        found.append(Case(f"decode {name}", decode_of(spec), hot=True))
    return found


def attention_specs() -> dict[str, AttentionSpec]:
    """Return specs over head dims, groups, page sizes and windows."""
    return {
        **{f"d{dim}": replace(LLAMA, head_dim=dim) for dim in (64, 80, 96, 128, 256)},
        "d128 two heads a group": replace(LLAMA, num_heads=16),  # Qwen3 0.6B
        "d64 three heads a group": replace(LLAMA, num_heads=9, num_kv_heads=3, head_dim=64),  # SmolLM2 135M
        "d128 16-slot pages": replace(LLAMA, page_size=16),
        "d128 window": replace(LLAMA, window=4096),
        "d256 window and cap": replace(LLAMA, head_dim=256, num_heads=8, num_kv_heads=4, window=4096, soft_cap=50.0),
        **{f"latents, {heads} heads": replace(LATENTS, num_heads=heads) for heads in (16, 20, 128)},
        "d64 window and sinks": replace(LLAMA, head_dim=64, window=128, has_sinks=True),  # GPT-OSS
        "d128 int8": replace(LLAMA, code="int8"),
        **{f"d{dim} fp8_e4m3": replace(LLAMA, head_dim=dim, code="fp8_e4m3") for dim in (64, 128, 256)},
    }


def page_cases() -> list[Case]:
    """List the kernels that write and move pages."""
    return [
        Case("rope and write", lambda chip: _rope_write(normed=False), hot=True),
        Case("rope and write int8", lambda chip: _rope_write(normed=False, code="int8"), hot=True),
        Case("rope and write fp8_e4m3", lambda chip: _rope_write(normed=False, code="fp8_e4m3"), hot=True),
        Case("norm, rope and write", lambda chip: _rope_write(normed=True), hot=True),
        Case("rope and write latents", lambda chip: _latents_write(), hot=True),
        Case("digest pages", lambda chip: pageio.page_digests(_kv(LLAMA), _ids(ROWS)), hot=True),
    ]


def state_cases() -> list[Case]:
    """List recurrences over states, of tokens one by one and of blocks, with what keeps states."""
    layers = {"delta net": delta_net(META), "state space": state_space(META), "short convolution": short_conv(META)}
    few, many = np.array([1, ROWS // 2]), np.array([ROWS])
    found = [Case(name, partial(_recur, of, few), hot=True) for name, of in layers.items()]
    with_heads = [(name, of) for name, of in layers.items() if of.heads is not None]
    return [*found, *(Case(f"{name} in blocks", partial(_recur, of, many)) for name, of in with_heads)]


def delta_net(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Recurrence:
    """Return a layer of Qwen3-Next 80B-A3B."""
    count, groups, dim = 32, 16, 128
    channels, values = (2 * groups + count) * dim, count * dim
    gating = Gating(norm=torch.ones(dim, dtype=dtype, device=device), part=dim, eps=1e-6, rounds=True)
    at = channels + values
    heads = Heads(
        count=count, groups=groups, key_dim=dim, value_dim=dim, order="qkv", rates_at=at + count, betas_at=at,
        rate=-_floats(device, count), rate_bias=_floats(device, count), gating=gating,
    )  # fmt: skip
    return Recurrence(weight=_floats(device, 4, channels), inputs_at=0, gates_at=channels, heads=heads)


def state_space(device: torch.device) -> Recurrence:
    """Return a layer of Falcon-H1 7B."""
    count, dim, state = 24, 128, 256
    values = count * dim
    channels = values + 2 * state
    heads = Heads(
        count=count, groups=1, key_dim=state, value_dim=dim, order="vkq", rates_at=values + channels,
        rate=-_floats(device, count), rate_bias=_floats(device, count), direct=_floats(device, count), gating=Gating(),
    )  # fmt: skip
    weight, bias = _floats(device, 4, channels), _floats(device, channels)
    return Recurrence(weight=weight, bias=bias, inputs_at=values, gates_at=0, heads=heads)


def short_conv(device: torch.device) -> Recurrence:
    """Return a layer of LFM2 1.2B."""
    return Recurrence(weight=_floats(device, 3, 2048), inputs_at=2 * 2048, gates_at=2048)


def num_taken(of: Recurrence) -> int:
    """Return the features of a layer's input."""
    channels = of.weight.shape[1]
    if of.heads is None:
        return 3 * channels
    return of.width + channels + of.heads.count * (1 if of.heads.betas_at is None else 2)


def of_tokens(of: Recurrence) -> tuple[int, int]:
    """Return by how many values a token changes a memory, and its products with each token of a block."""
    heads = of.heads
    if heads is None:
        return 0, 0
    changes = heads.groups * heads.key_dim + heads.count * (heads.value_dim + 1)
    return changes, heads.count * (1 if heads.betas_at is None else 2)


def states_spec_of(of: Recurrence, num_layers: int, max_tokens: int, max_seqs: int) -> states.StatesSpec:
    """Return what the kernels are to know of some such layers."""
    changes, products = of_tokens(of)
    counts = num_layers, of.kept_inputs, of.memory, changes, 1024, max_tokens, max_seqs
    return states.StatesSpec(*counts, products=products)


def _floats(device: torch.device, *shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.float32, device=device)


def _recur(of: Recurrence, lens: Ints, chip: Device) -> None:
    del chip
    spec = states_spec_of(of, 2, 2 * ROWS, ROWS)
    pool = _empty(64, 2 * (of.kept_inputs + of.memory), dtype=torch.float32)
    paged = states.PagedStates(pool, spec)
    paged.plan(np.zeros((len(lens), 4), dtype=np.int64), lens, 70 + lens)
    paged.recur(of, 1, _empty(int(lens.sum()), num_taken(of)))
    paged.keep()


def row_cases() -> list[Case]:
    """List the row-wise kernels and sampling."""
    return [
        Case("rms norm 4096", lambda chip: _norm(4096), hot=True),
        Case("rms norm 8192", lambda chip: _norm(8192), hot=True),
        Case("silu mul", lambda chip: pageio.silu_mul(_empty(ROWS, 28672)), hot=True),
        Case("sample", lambda chip: _sample(), hot=True),
        Case("count a prompt for penalties", lambda chip: _count(), hot=True),
    ]


def expert_cases() -> list[Case]:
    """List products of experts, of few rows and of many, and their sums: of Qwen3 30B-A3B."""
    return [
        Case("experts of 16 rows", lambda chip: _experts(16, torch.bfloat16), hot=True),
        Case("experts of 4096 rows", lambda chip: _experts(4096, torch.bfloat16), hot=True),
        Case("experts of 16 rows float32", lambda chip: _experts(16, torch.float32)),
    ]


# Codes, inputs that share a scale (0: all), whether there are minimums, and how checkpoints come by them.
CODED: tuple[tuple[Kind, int, bool, str], ...] = (
    ("int4", 128, True, "AWQ"),
    ("int4", 32, False, "Q4_0"),
    ("int8", 0, False, "W8A8"),
    ("fp4", 32, False, "MXFP4"),
    ("fp8", 128, False, "FP8 blocks"),
    ("fp8", 0, False, "FP8 outputs"),
)


def product_cases() -> list[Case]:
    """List products with codes, of one row, 64 and 4096; with rounded inputs, where that is possible; of experts."""
    found = []
    for kind, group, minimums, name in CODED:
        for num_rows in (1, 64, 4096):
            run = partial(_product, _coded(kind, (8192, 8192), group, minimums=minimums), num_rows, torch.bfloat16)
            found.append(Case(f"{name} of {num_rows} rows", run, hot=True))
            if kind.endswith("8"):
                found.append(Case(f"{name} of {num_rows} rows, rounded", partial(run, rounded=True), hot=True))
    found += [Case(f"MXFP4 experts of {n} rows", partial(_coded_experts, n), hot=True) for n in (16, 4096)]
    exact = partial(_product, _coded("int4", (8192, 8192), 128, minimums=True), 64, torch.float32)
    return [*found, Case("AWQ of 64 rows float32", exact)]


def prefill_of(spec: AttentionSpec) -> Callable[[Device], object]:
    """Return a 256-token chunk far into a sequence: few enough queries to split keys, so `combine` runs too."""

    def run(chip: Device) -> object:
        attention = PagedAttention(spec, META, chip=chip)
        pages = 65536 // spec.page_size
        attention.plan(np.array([256]), np.array([65536]), np.zeros((1, pages), dtype=np.int32))
        return attention.run(_queries(spec, 256), *_pool(spec), sinks=_sinks(spec))

    return run


def decode_of(spec: AttentionSpec) -> Callable[[Device], object]:
    """Return a decode step."""

    def run(chip: Device) -> object:
        attention = PagedAttention(spec, META, StepSize(32, 8192), chip=chip)
        return attention.run(_queries(spec, 32), *_pool(spec), sinks=_sinks(spec))

    return run


def _queries(spec: AttentionSpec, num_tokens: int) -> Tensor:
    return _empty(num_tokens, spec.num_heads, spec.head_dim, dtype=spec.dtype)


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def _sinks(spec: AttentionSpec) -> Tensor | None:
    return _empty(spec.num_heads, dtype=torch.float32) if spec.has_sinks else None


def _ids(count: int) -> Tensor:
    return _empty(count, dtype=torch.int32)


def _kv(spec: AttentionSpec) -> Tensor:
    parts = 2 if spec.tail == 0 else 1
    shape = (spec.num_pages, 32, parts, spec.num_kv_heads, spec.page_size, spec.rows.width)
    return _empty(*shape, dtype=spec.rows.pool_dtype)


def _pool(spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    parts = _kv(spec)[:, 0].unbind(1)
    return parts[0], parts[-1]


def _rope_write(*, normed: bool, code: KvCode | None = None) -> Tensor:
    qkv = _empty(ROWS, 80, 128).split([64, 8, 8], dim=1)
    weight = _empty(128) if normed else None
    rotation = pageio.Rotation(_empty(4096, 128, dtype=torch.float32), q_norm=weight, k_norm=weight)
    target = pageio.Target(*_pool(replace(LLAMA, code=code)), _ids(ROWS), code)
    return pageio.rope_write((qkv[0], qkv[1], qkv[2]), _ids(ROWS), rotation, target)


def _latents_write() -> Tensor:
    heads, (rows, _), width = _empty(ROWS, 17, 576), _pool(LATENTS), LATENTS.width
    q, row = heads[:, :16, width:], heads[:, 16:]
    target = pageio.Target(rows[..., width:], rows[..., :width], _ids(ROWS))
    rotation = pageio.Rotation(_empty(4096, LATENTS.tail, dtype=torch.float32))
    return pageio.rope_write((q, row[..., width:], row[..., :width]), _ids(ROWS), rotation, target, out=q)


def _experts(num_rows: int, dtype: torch.dtype) -> Tensor:
    count, num_chosen, hidden, inner = 128, 8, 2048, 768
    chosen = _empty(num_rows, num_chosen, dtype=torch.int64)
    of = experts.Grouped.of(_empty(num_rows, num_chosen, dtype=torch.float32), chosen, count)
    x, weights = _empty(num_rows, hidden, dtype=dtype), _empty(count, 2 * inner, hidden, dtype=dtype)
    experts.grouped_product(x, weights, _empty(count, 2 * inner, dtype=dtype), of.rows, of, dtype)
    added = experts.Added(_empty(num_rows, hidden, dtype=dtype), _empty(num_rows, dtype=torch.float32))
    return experts.summed(_empty(num_rows * num_chosen, hidden, dtype=torch.float32), of, added, dtype)


def _coded(kind: Kind, shape: tuple[int, int], group: int, *, minimums: bool = False) -> CodeBlocks:
    (outputs, inputs), bits = shape, 4 if kind.endswith("4") else 8
    group = group or inputs
    scales = _empty(inputs // group, outputs, dtype=torch.float32 if kind == "fp8" else torch.float16)
    codes = _empty(inputs // BLOCK, outputs, BLOCK * bits // 8, dtype=torch.uint8)
    return CodeBlocks(kind, codes, scales, scales if minimums else None, inputs, group)


def _product(weight: CodeBlocks, num_rows: int, dtype: torch.dtype, chip: Device, *, rounded: bool = False) -> object:
    if rounded and not products.rounds_inputs(weight, chip):
        return None
    return products.product(_empty(num_rows, weight.inputs, dtype=dtype), weight, rounded=rounded, chip=chip)


def _coded_experts(num_rows: int, chip: Device) -> Tensor:
    """Multiply with GPT-OSS 120B's gates and ups."""
    del chip
    count, num_chosen, hidden, inner = 128, 4, 2880, 2880
    chosen = _empty(num_rows, num_chosen, dtype=torch.int64)
    of = experts.Grouped.of(_empty(num_rows, num_chosen, dtype=torch.float32), chosen, count)
    weights, bias = _coded("fp4", (count * 2 * inner, hidden), BLOCK), _empty(count, 2 * inner)
    return experts.grouped_product(_empty(num_rows, hidden), weights, bias, of.rows, of, torch.bfloat16)


def _norm(width: int) -> Tensor:
    return pageio.rms_norm(_empty(ROWS, width), _empty(width), 1e-5)


def _sample() -> Tensor:
    def row() -> Tensor:
        return _empty(ROWS, dtype=torch.float32)

    params = sample.Params(_empty(ROWS, 2, dtype=torch.int32), row(), _ids(ROWS), row(), row())
    penalties = sample.Penalties(row(), row(), row(), _ids(ROWS), _empty(ROWS, VOCAB, dtype=torch.int32))
    bias = sample.Bias(_ids(32), _empty(32, dtype=torch.float32), _ids(ROWS + 1))
    mask = sample.Mask(_empty(ROWS, VOCAB // 32, dtype=torch.int32), _ids(ROWS))
    return sample.sample(_empty(ROWS, VOCAB), params, penalties=penalties, bias=bias, mask=mask)


def _count() -> None:
    ids = sample.Ragged(_ids(4096), _ids(3))
    sample.count(_empty(ROWS, VOCAB, dtype=torch.int32), _ids(2), _ids(2), ids)
