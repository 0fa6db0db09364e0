"""Launch parameters per device, as data. `python3 tests/gpu/run_gpu.py --only tune` prints rows to put here."""

from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True, slots=True)
class Tile:
    """How one attention kernel is launched."""

    block_m: int  # rows: queries times the heads that share a K/V head
    block_n: int  # keys per turn
    num_warps: int
    num_stages: int
    items_per_sm: int = 1  # how many run on one multiprocessor at a time
    max_registers: int | None = None  # per thread, to fit items_per_sm


@dataclass(frozen=True, slots=True)
class Device:
    """What the planner must know of a chip."""

    capability: tuple[int, int]
    num_sms: int

    @property
    def multiplies_e4m3(self) -> bool:
        return self.capability >= (8, 9)


INTERPRETER = Device((9, 0), 4)  # stands in for a chip when kernels run on the CPU

# Chosen from the compiler's reports, with 64-slot pages: no spills, wgmma not serialized, and on Hopper two items
# per multiprocessor, so that one's softmax runs beside the other's matrix products.
# (capability major, head_dim rounded up to a power of two) -> tile of 16-bit K and V.
PREFILL = {
    (9, 64): Tile(128, 64, 8, 3, 2, 128),
    (9, 128): Tile(128, 32, 8, 3, 2, 128),
    (9, 256): Tile(128, 32, 8, 2),
    (10, 64): Tile(128, 64, 4, 3, 2),
    (10, 128): Tile(128, 64, 8, 3),
    (10, 256): Tile(128, 32, 8, 2),
    (8, 64): Tile(128, 32, 4, 3, 2),
    (8, 128): Tile(128, 32, 8, 3),
    (8, 256): Tile(64, 32, 8, 2),
}
# For pages smaller than a tile's keys, if PREFILL's tile would spill: their ids take registers.
SMALL_PAGES_PREFILL = {(9, 128): Tile(128, 64, 8, 3)}
# For coded K and V, where PREFILL's tile would spill: numbers of a tile take registers on their way to the products.
CODED_PREFILL = {
    (9, 64): Tile(128, 32, 8, 3, 2, 128),
    (9, 128): Tile(64, 64, 4, 3, 2),
    (10, 64): Tile(128, 64, 8, 3),
    (8, 128): Tile(128, 32, 8, 2),
}
# (capability major, head_dim rounded up, rows) -> tile; a row is a query of one head.
DECODE = {
    (9, 64, 16): Tile(16, 64, 4, 4, 2),
    (9, 128, 16): Tile(16, 64, 8, 3, 2),
    (9, 256, 16): Tile(16, 32, 4, 3, 2),
    (10, 256, 16): Tile(16, 32, 4, 3, 2),
}
# (capability major, rows) -> tile of latent rows of 512 + 64 features; a row of the tile is a query of one head.
LATENT = {
    (9, 16): Tile(16, 32, 8, 3, 2),
    (9, 32): Tile(32, 32, 8, 2),
    (9, 64): Tile(64, 32, 8, 3),
    (10, 16): Tile(16, 32, 8, 3, 2),
    (10, 32): Tile(32, 32, 8, 2),
    (10, 64): Tile(64, 32, 8, 3),
    (8, 16): Tile(16, 32, 8, 2, 2),
    (8, 32): Tile(32, 32, 8, 2),
}


def latent_tile(device: Device, kv_bytes: int, rows: int | None) -> Tile:
    """Return the tile of latent rows, for `rows` queries that see the same ones; None: for many. It may be smaller."""
    if kv_bytes == 4:
        return Tile(16, 16, 4, 1, 2)
    tiles = [tile for (family, _), tile in sorted(LATENT.items()) if family == _family(device)]
    return next((tile for tile in tiles if rows is not None and rows <= tile.block_m), tiles[-1])


def prefill_tile(device: Device, block_d: int, kv_bytes: int, page_size: int, *, is_coded: bool = False) -> Tile:
    """Return the tile for many queries. block_d: head_dim rounded up to a power of two; kv_bytes: of an element.

    is_coded: rows are bytes, and elements what they become.
    """
    if kv_bytes == 4:  # float32 is served for exactness, not speed
        return Tile(16, 16, 4, 1, 2)
    key = _family(device), max(64, block_d)
    tile = PREFILL[key]
    if is_coded:
        return CODED_PREFILL.get(key, tile)
    return SMALL_PAGES_PREFILL.get(key, tile) if page_size < tile.block_n else tile


def decode_tile(device: Device, block_d: int, kv_bytes: int, page_size: int, rows: int) -> Tile:
    """Return the tile for `rows` rows (a power of two, 16 to 128), the packed queries of one sequence."""
    if kv_bytes == 4:
        return Tile(rows, 16, 4, 1, 2)
    found = DECODE.get((_family(device), max(64, block_d), rows))
    if found is not None:
        return found
    if rows == 128:
        return prefill_tile(device, block_d, kv_bytes, page_size)
    block_n = 64 if block_d <= 128 else 32
    num_stages = 3 if _family(device) >= 9 else 2
    return Tile(rows, block_n, 8 if rows == 16 or block_d > 128 else 4, num_stages, 2)


@cache
def device_of(name: str) -> Device:
    """Return the facts of a torch device, `cuda:0` for example; a CPU device means Triton's interpreter."""
    if not name.startswith("cuda"):
        return INTERPRETER
    properties = torch.cuda.get_device_properties(torch.device(name))
    return Device((properties.major, properties.minor), properties.multi_processor_count)


def _family(device: Device) -> int:
    """Return the capability whose tiles a chip takes. 12.x (consumer Blackwell) has the shared memory of 8.x."""
    major = device.capability[0]
    return major if major in (9, 10) else 8
