"""Launch parameters per device, as data. `python -m pdserve.kernels.gpu tune` prints rows to put here."""

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
    shared_bytes: int  # most that one program may use


@dataclass(frozen=True, slots=True)
class Demand:
    """What of an attention decides its tile."""

    block_d: int  # head_dim rounded up to a power of two
    kv_bytes: int  # per element
    page_size: int
    has_softcap: bool


INTERPRETER = Device((9, 0), 4, 232_448)  # stands in for a chip when kernels run on the CPU

# Chosen from the compiler's reports, with 64-slot pages: no spills, wgmma not serialized, and on Hopper two items
# per multiprocessor, so that one's softmax runs beside the other's matrix products.
# (capability major, head_dim rounded up to a power of two, bytes per K/V element) -> tile.
PREFILL = {
    (9, 64, 2): Tile(128, 64, 8, 3, 2, 128),
    (9, 128, 2): Tile(128, 32, 8, 3, 2, 128),
    (9, 256, 2): Tile(128, 32, 8, 2),
    (9, 64, 1): Tile(128, 64, 8, 3),
    (9, 128, 1): Tile(128, 64, 8, 3),
    (9, 256, 1): Tile(64, 32, 8, 2),
    (10, 64, 2): Tile(128, 64, 4, 3, 2),
    (10, 128, 2): Tile(128, 64, 8, 3),
    (10, 256, 2): Tile(128, 32, 8, 2),
    (10, 64, 1): Tile(128, 64, 8, 3),
    (10, 128, 1): Tile(128, 64, 8, 3),
    (10, 256, 1): Tile(64, 32, 8, 2),
    (8, 64, 2): Tile(128, 32, 4, 3, 2),
    (8, 128, 2): Tile(128, 32, 8, 3),
    (8, 256, 2): Tile(64, 32, 8, 2),
    (8, 64, 1): Tile(128, 32, 4, 2, 2),
    (8, 128, 1): Tile(128, 32, 8, 2),
    (8, 256, 1): Tile(64, 32, 8, 2),
}
# Where a tile of PREFILL would spill: a soft cap, or pages smaller than the tile's keys, take registers of their own.
CROWDED_PREFILL = {
    (9, 128, 2): Tile(128, 64, 8, 3),
}
# (capability major, head_dim rounded up, bytes per K/V element, rows) -> tile; a row is a query of one head.
DECODE = {
    (9, 64, 2, 16): Tile(16, 64, 4, 4, 2),
    (9, 128, 2, 16): Tile(16, 64, 8, 3, 2),
    (9, 256, 2, 16): Tile(16, 32, 4, 3, 2),
    (10, 256, 2, 16): Tile(16, 32, 4, 3, 2),
}


def prefill_tile(device: Device, demand: Demand) -> Tile:
    """Return the tile for many queries."""
    if demand.kv_bytes == 4:  # float32 is served for exactness, not speed
        return Tile(16, 16, 4, 1, 2)
    key = _family(device), max(64, demand.block_d), demand.kv_bytes
    tile = PREFILL[key]
    is_crowded = demand.has_softcap or demand.page_size < tile.block_n
    return CROWDED_PREFILL.get(key, tile) if is_crowded else tile


def decode_tile(device: Device, demand: Demand, rows: int) -> Tile:
    """Return the tile for `rows` rows (a power of two, 16 to 128), the packed queries of one sequence."""
    if demand.kv_bytes == 4:
        return Tile(rows, 16, 4, 1, 2)
    found = DECODE.get((_family(device), max(64, demand.block_d), demand.kv_bytes, rows))
    if found is not None:
        return found
    if rows == 128:
        return prefill_tile(device, demand)
    block_n = 64 if demand.block_d <= 128 else 32
    num_stages = 3 if _family(device) >= 9 else 2
    return Tile(rows, block_n, 8 if rows == 16 or demand.block_d > 128 else 4, num_stages, 2)


@cache
def device_of(name: str) -> Device:
    """Return the facts of a torch device, `cuda:0` say; a CPU device means Triton's interpreter."""
    if not name.startswith("cuda"):
        return INTERPRETER
    properties = torch.cuda.get_device_properties(torch.device(name))
    shared = getattr(properties, "shared_memory_per_block_optin", 101_376)
    return Device((properties.major, properties.minor), properties.multi_processor_count, shared)


def _family(device: Device) -> int:
    return min(max(device.capability[0], 8), 10)
