"""Time prefill and decode attention, in the shapes the project has goals for, beside other attention; and tune tiles.

Peers are torch's cuDNN and flash SDPA, which read contiguous K and V, and FlashInfer where it is installed, which reads
the pages that ours reads. A peer that cannot do a shape is left out, with the reason: cuDNN where a prompt has fewer
queries than keys, for torch makes a mask for it in each call. All rotate over several sets of keys and values, so that
no caches are timed.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import product
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from gpu_device import Device
from gpu_problem import layer_views
from gpu_report import Case, Row, timed
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from pdserve.kernels.attention import AttentionSpec, PagedAttention, StepSize
from pdserve.kernels.attention_plan import Ints
from pdserve.kernels.tuning import Tile
from pdserve.protocol.kvlayout import KvCode

CODES: tuple[KvCode, ...] = ("int8", "fp8_e4m3")
PREFILL_LAYERS = 4  # pages of several layers, as an engine has: strides matter, and calls rotate over them
DECODE_LAYERS = 32  # as many as an 8B model has: the tiles of a layer then lie megabytes apart
PEER_SETS = 4  # of contiguous keys and values
SHOWN_ERROR = 80


@dataclass(frozen=True, slots=True)
class Shape:
    """A batch of equal sequences."""

    batch: int
    queries: int
    keys: int

    @property
    def size(self) -> StepSize | None:
        """Return the captured size that it is a step of, if it decodes."""
        return StepSize(self.batch, self.keys) if self.queries == 1 else None


@dataclass(frozen=True, slots=True)
class Load:
    """What is timed: some shape of some heads."""

    name: str
    spec: AttentionSpec
    shape: Shape
    tile: Tile | None = None  # None: the tuning table's

    @property
    def tera_operations(self) -> float:
        """Return those of the causal half."""
        shape = self.shape
        pairs = shape.queries * shape.keys - shape.queries * (shape.queries - 1) / 2
        return 2e-12 * shape.batch * pairs * self.spec.num_heads * (self.spec.head_dim + self.spec.width)

    @property
    def gigabytes(self) -> float:
        """Return those of the keys and values that it reads."""
        per_key = _parts(self.spec) * self.spec.num_kv_heads * self.spec.rows.row_bytes
        return 1e-9 * self.shape.batch * self.shape.keys * per_key


LLAMA = AttentionSpec(64, 8, 128, 64, 1, 128**-0.5)
SHARD = replace(LLAMA, num_heads=8, num_kv_heads=1)
QWEN = replace(LLAMA, num_heads=16)
EIGHT_B = replace(LLAMA, num_heads=32)
SMALL_HEADS = replace(EIGHT_B, head_dim=64, scale=0.125)
SMALL_PAGES = replace(LLAMA, page_size=16)
LATENTS = AttentionSpec(16, 1, 576, 64, 1, 192**-0.5, value_dim=512)  # DeepSeek-V2-Lite's
DRY = AttentionSpec(4, 2, 16, 16, 1, 0.25, torch.float32)
DRY_LATENTS = AttentionSpec(4, 1, 48, 16, 1, 0.25, torch.float32, value_dim=32)

WIDE_TILES = (Tile(128, 64, 8, 3), Tile(128, 128, 8, 2))
SHOWN_TILES = 4
PREFILL_TILES = [
    *(Tile(128, block_n, 8, stages) for block_n, stages in product((32, 64, 128), (2, 3))),
    *(Tile(128, 32, 8, stages, 2, 128) for stages in (2, 3, 4)),
    *(Tile(64, 64, 4, stages, 2) for stages in (2, 3)),
    *(Tile(64, 32, 4, stages, 3, 168) for stages in (2, 3)),
    Tile(128, 64, 8, 3, 2, 128),
]
DECODE_TILES = [
    Tile(16, block_n, warps, stages, per_sm)
    for block_n, warps, stages, per_sm in product((32, 64, 128), (4, 8), (2, 3, 4), (1, 2, 3))
    if per_sm * (2 * (stages - 1) * block_n + 16) * 256 <= 227 * 1024
]


_GOALS = [Shape(1, 8192, 8192), Shape(1, 2048, 2048), Shape(1, 16384, 16384), Shape(1, 512, 131072)]
PREFILLS = [
    *(Load("64/8 d128", LLAMA, shape) for shape in _GOALS),
    # A tile of 128 keys goes through tensor descriptors only if it fits a page.
    *(
        Load(f"64/8 d128, tiles of {tile.block_n}", replace(LLAMA, page_size=128), shape, tile)
        for shape, tile in product((_GOALS[0], _GOALS[1], _GOALS[3]), WIDE_TILES)
    ),
    Load("64/8 d128", LLAMA, Shape(1, 2048, 8192)),
    Load("64/8 d128", LLAMA, Shape(8, 1024, 1024)),
    Load("64/8 d128 16-slot pages", SMALL_PAGES, _GOALS[0]),
    Load("8/1 d128", SHARD, Shape(1, 256, 131072)),
    Load("16/8 d128", QWEN, Shape(4, 1024, 1024)),
    Load("32/8 d64", SMALL_HEADS, _GOALS[0]),
    *(Load(f"64/8 d128 {code}", replace(LLAMA, code=code), _GOALS[0]) for code in CODES),
]
DECODES = [
    Load("32/8 d128", EIGHT_B, Shape(32, 1, 8192)),
    Load("32/8 d128", EIGHT_B, Shape(1, 1, 131072)),
    Load("32/8 d128", EIGHT_B, Shape(8, 1, 2048)),
    Load("32/8 d128", EIGHT_B, Shape(256, 1, 1024)),
    Load("16/8 d128", QWEN, Shape(256, 1, 1024)),
    Load("8/1 d128", SHARD, Shape(1, 1, 131072)),
    Load("64/8 d128", LLAMA, Shape(32, 1, 8192)),
    Load("64/8 d128 16-slot pages", SMALL_PAGES, Shape(32, 1, 8192)),
    *(Load(f"32/8 d128 {code}", replace(EIGHT_B, code=code), Shape(32, 1, 8192)) for code in CODES),
    *(Load(f"32/8 d128 {code}", replace(EIGHT_B, code=code), Shape(256, 1, 1024)) for code in CODES),
]
OF_LATENTS = [
    Load("latents, 16 heads", LATENTS, Shape(32, 1, 8192)),
    Load("latents, 16 heads", LATENTS, Shape(1, 1, 131072)),
    Load("latents, 16 heads", LATENTS, Shape(256, 1, 1024)),
    Load("latents, 128 heads", replace(LATENTS, num_heads=128), Shape(32, 1, 8192)),
    Load("latents, 16 heads", LATENTS, Shape(1, 8192, 8192)),
    Load("latents, 16 heads", LATENTS, Shape(1, 512, 131072)),
    Load("latents, 128 heads", replace(LATENTS, num_heads=128), Shape(1, 2048, 2048)),
]
LATENT_TILES = [Tile(rows, keys, 8, stages) for rows, keys, stages in product((16, 32, 64), (32, 64), (2, 3))]
DRY_PREFILLS = [
    Load("dry", DRY, Shape(1, 20, 20)),
    Load("dry", DRY, Shape(1, 3, 20)),
    Load("dry, a tile", DRY, Shape(1, 3, 20), Tile(16, 16, 4, 2)),
]
DRY_DECODES = [Load("dry", DRY, Shape(2, 1, 20)), Load("dry int8", replace(DRY, code="int8"), Shape(2, 1, 20))]


def prefill_loads(device: Device) -> list[Load]:
    """List prompts, the goals' first; then some of them with tiles of 64 and 128 keys."""
    return device.sized(PREFILLS, DRY_PREFILLS)


def decode_loads(device: Device) -> list[Load]:
    return device.sized(DECODES, DRY_DECODES)


def latent_loads(device: Device) -> list[Load]:
    return device.sized(
        OF_LATENTS, [Load("dry", DRY_LATENTS, Shape(2, 1, 20)), Load("dry", DRY_LATENTS, Shape(1, 3, 20))]
    )


def latents(device: Device) -> Iterator[Case]:
    """Time attention over latent rows: decoding, by what it reads, then prompts, by what they multiply."""
    for load in latent_loads(device):
        name = f"{load.name} {load.shape.queries}@{load.shape.keys} x{load.shape.batch}"
        decodes = load.shape.size is not None
        work, unit = (load.gigabytes, "GB/s") if decodes else (load.tera_operations, "TFLOP/s")
        yield name, partial(_time, device, load, name, work, unit, has_peers=False)


def prefill(device: Device) -> Iterator[Case]:
    """Time prefill; the rate is that of the causal half."""
    for load in prefill_loads(device):
        name = f"{load.name} {load.shape.queries}@{load.shape.keys} x{load.shape.batch}"
        has_peers = load.tile is None and load.spec.code is None
        yield name, partial(_time, device, load, name, load.tera_operations, "TFLOP/s", has_peers=has_peers)


def decode(device: Device) -> Iterator[Case]:
    """Time decode; the rate is that of reading keys and values. Then `combine` alone."""
    loads = decode_loads(device)
    for load in loads:
        name = f"{load.name} {load.shape.batch} x {load.shape.keys}"
        yield name, partial(_time, device, load, name, load.gigabytes, "GB/s", has_peers=load.spec.code is None)
    for load in loads[: device.sized(4, 1)]:
        yield "combine", partial(_kernels, device, load, f"kernels of {load.shape.batch} x {load.shape.keys}")


def tune(device: Device) -> Iterator[Case]:
    """Time all tiles of a few shapes: the fastest are rows for `kernels/tuning.py`."""
    long_prompt, batch = device.sized((Shape(1, 8192, 8192), Shape(32, 1, 8192)), (Shape(1, 5, 20), Shape(2, 1, 20)))
    cases = [
        ("prefill d128", LLAMA, long_prompt, PREFILL_TILES),
        ("prefill d64", SMALL_HEADS, long_prompt, PREFILL_TILES),
        ("prefill d128 int8", replace(LLAMA, code="int8"), long_prompt, PREFILL_TILES),
        ("prefill d128 16-slot pages", SMALL_PAGES, long_prompt, PREFILL_TILES),
        ("decode d128", LLAMA, batch, DECODE_TILES),
        ("decode d128 int8", replace(LLAMA, code="int8"), batch, DECODE_TILES),
        ("prefill latents", LATENTS, long_prompt, LATENT_TILES),
        ("decode latents", LATENTS, batch, LATENT_TILES),
    ]
    for name, spec, shape, tiles in device.sized(cases, [("dry", DRY, batch, [Tile(16, 16, 4, 2), Tile(1, 16, 4, 2)])]):
        yield name, partial(_best, device, Load(name, spec, shape), tiles)


def _time(device: Device, load: Load, name: str, work: float, unit: str, *, has_peers: bool) -> list[Row]:
    row = timed(name, device.time_us(calls(device, load)), work, unit)
    device.empty()
    if has_peers:
        peers, missing = _peer_times(device, load)
        row.figures.update(peers)
        row = replace(row, note=f"no {missing}" if missing else "")
        device.empty()
    return [row]


def _kernels(device: Device, load: Load, name: str) -> list[Row]:
    """Return what each kernel of a planned step takes."""
    run = calls(device, load)
    found = device.kernel_us(lambda: [call() for call in run])
    return [Row(name, {f"us {kernel[:28]}": time_us / len(run) for kernel, time_us in list(found.items())[:4]})]


def _best(device: Device, load: Load, tiles: Iterable[Tile]) -> list[Row]:
    found, refused = [], 0
    for tile in tiles:
        try:
            found.append((device.time_us(calls(device, replace(load, tile=tile))), tile))
        except Exception:  # noqa: BLE001 - a tile that does not compile or fit is no candidate
            refused += 1
    found.sort(key=lambda pair: pair[0])
    notes = [f"({refused} tiles refused)"] + [""] * SHOWN_TILES
    ranked = enumerate(zip(found[:SHOWN_TILES], notes, strict=False), 1)
    return [Row(f"{load.name} #{rank}", {"us": time}, f"{tile} {note}") for rank, ((time, tile), note) in ranked]


class Planned(Protocol):
    """Attention that is planned once for all layers."""

    def plan(self, query_lens: Ints, kv_lens: Ints, page_table: Ints) -> None: ...
    def run(self, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor) -> object: ...


def ours(device: Device, spec: AttentionSpec, load: Load) -> Planned:
    return PagedAttention(spec, device.torch, load.shape.size, tile=load.tile)


def flashinfers(device: Device, spec: AttentionSpec, load: Load) -> Planned:
    """Return FlashInfer's for prompts; ValueError for a step that decodes."""
    from pdserve.engine.attention_flashinfer import FlashInferPrompts  # noqa: PLC0415 - may not be installed

    if load.shape.size is not None:
        raise ValueError("it is used for prompts")
    return FlashInferPrompts(spec, device.torch)


def calls(
    device: Device,
    load: Load,
    num_layers: int | None = None,
    attention_of: Callable[[Device, AttentionSpec, Load], Planned] = ours,
) -> list[Callable[[], object]]:
    """Return a planned step on random data for each layer, ready to run."""
    shape = load.shape
    layers = num_layers or device.sized(PREFILL_LAYERS if shape.size is None else DECODE_LAYERS, 2)
    spec, kv, table = _pool(device, load.spec, shape, layers)
    attention = attention_of(device, spec, load)
    attention.plan(np.full(shape.batch, shape.queries), np.full(shape.batch, shape.keys), table)
    q = torch.randn((shape.batch * shape.queries, spec.num_heads, spec.head_dim), device=device.torch).to(spec.dtype)
    out = q.new_empty((len(q), spec.num_heads, spec.width))
    return [partial(attention.run, q, *layer_views(kv, layer), out=out) for layer in range(layers)]


def _pool(
    device: Device, spec: AttentionSpec, shape: Shape, num_layers: int
) -> tuple[AttentionSpec, Tensor, npt.NDArray[np.int32]]:
    """Fill a pool with random keys and values on scattered pages."""
    columns = -(-shape.keys // spec.page_size)
    spec = replace(spec, num_pages=shape.batch * columns)
    sizes = (spec.num_pages, num_layers, _parts(spec), spec.num_kv_heads, spec.page_size)
    rows = spec.rows
    kv = torch.empty((*sizes, rows.width), dtype=rows.pool_dtype, device=device.torch)
    if rows.code is None:
        kv.normal_()
    else:
        for page in kv:  # float32 in between takes room
            page.copy_(rows.packed(torch.randn((*page.shape[:-1], spec.head_dim), device=device.torch)))
    order = np.random.default_rng(0).permutation(spec.num_pages).astype(np.int32)
    return spec, kv, order.reshape(shape.batch, columns)


def _parts(spec: AttentionSpec) -> int:
    """Return how many rows a key is kept in."""
    return 2 if spec.tail == 0 else 1


def _peer_times(device: Device, load: Load) -> tuple[dict[str, float], str]:
    """Time every peer that serves the shape: microseconds by name, and why others are missing."""
    found, missing = {}, []
    for name, calls_of in _peers(device).items():
        try:
            found[f"us {name}"] = device.time_us(calls_of(load))
        except Exception as error:  # noqa: BLE001 - whatever keeps a peer from running, the rest goes on
            device.synchronize()
            missing.append(f"{name}: {type(error).__name__}: {error}"[:SHOWN_ERROR])
        device.empty()
    return found, ", ".join(missing)


def _peers(device: Device) -> dict[str, Callable[[Load], list[Callable[[], object]]]]:
    backends = {
        "cudnn": SDPBackend.CUDNN_ATTENTION,  # a CPU has none: in a dry run it is left out
        "flash": device.sized(SDPBackend.FLASH_ATTENTION, SDPBackend.MATH),
    }
    found = {name: partial(_sdpa_calls, device, backend) for name, backend in backends.items()}
    if find_spec("flashinfer"):
        return {**found, "flashinfer": partial(calls, device, attention_of=flashinfers)}
    return {**found}


def _sdpa_calls(device: Device, backend: SDPBackend, load: Load) -> list[Callable[[], object]]:
    spec, shape = load.spec, load.shape
    if backend is SDPBackend.CUDNN_ATTENTION and 1 < shape.queries < shape.keys:
        raise ValueError("it would take a mask")
    q = torch.randn((shape.batch, spec.num_heads, shape.queries, spec.head_dim), device=device.torch).to(spec.dtype)
    sizes = (PEER_SETS, 2, shape.batch, spec.num_kv_heads, shape.keys, spec.head_dim)
    sets = torch.empty(sizes, dtype=spec.dtype, device=device.torch).normal_()
    return [partial(_sdpa, backend, q, *kv) for kv in sets]


def _sdpa(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    queries, keys = q.shape[2], k.shape[2]
    mask: Any = causal_lower_right(queries, keys) if 1 < queries < keys else None
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(q, k, v, mask, is_causal=queries == keys, enable_gqa=True)
