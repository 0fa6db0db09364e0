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


INTERPRETER = Device((9, 0), 4, 232_448)  # stands in for a chip when kernels run on the CPU

# Chosen from the compiler's reports, with 64-slot pages: no spills, wgmma not serialized, and on Hopper two items
# per multiprocessor, so that one's softmax runs beside the other's matrix products.
# (capability major, head_dim rounded up to a power of two) -> tile.
PREFILL = {
    (9, 64): Tile(128, 64, 8, 3, 2, 128),
    (9, 128): Tile(128, 32, 8, 3, 2, 128),
    (9, 256): Tile(128, 32, 8, 2),
    (8, 64): Tile(128, 32, 8, 3, 2),
    (8, 128): Tile(128, 32, 8, 3),
    (8, 256): Tile(128, 32, 8, 2),
}
# (capability major, head_dim rounded up, rows) -> tile; a row is a query of one head.
DECODE = {
    (9, 64, 16): Tile(16, 128, 4, 3, 2),
    (9, 128, 16): Tile(16, 64, 4, 3, 2),
    (9, 256, 16): Tile(16, 32, 4, 3, 2),
}


def prefill_tile(device: Device, head_dim: int, kv_bytes: int) -> Tile:
    """Return the tile for many queries; head_dim is rounded up to a power of two."""
    if kv_bytes == 4:  # float32 is served for exactness, not speed
        return Tile(32, 32 if head_dim <= 128 else 16, 4, 1)
    return PREFILL[_family(device), max(64, head_dim)]


def decode_tile(device: Device, head_dim: int, kv_bytes: int, rows: int) -> Tile:
    """Return the tile for `rows` rows (a power of two, 16 to 128), the packed queries of one sequence."""
    if kv_bytes == 4:
        return Tile(rows, 32 if head_dim <= 128 else 16, 4, 1, 2)
    found = DECODE.get((_family(device), max(64, head_dim), rows))
    if found is not None:
        return found
    per_stage = 32 * 1024 if device.shared_bytes > 200_000 else 16 * 1024
    block_n = max(16, min(128, per_stage // (2 * 2 * max(64, head_dim))))
    warps = 8 if rows * head_dim > 64 * 128 else 4
    return Tile(rows, block_n, warps, 2 if rows > 64 else 3, 1 if rows > 64 else 2)


@cache
def device_of(name: str) -> Device:
    """Return the facts of a torch device, `cuda:0` say; a CPU device means Triton's interpreter."""
    if not name.startswith("cuda"):
        return INTERPRETER
    properties = torch.cuda.get_device_properties(torch.device(name))
    shared = getattr(properties, "shared_memory_per_block_optin", 101_376)
    return Device((properties.major, properties.minor), properties.multi_processor_count, shared)


def _family(device: Device) -> int:
    return 8 if device.capability[0] < 9 else 9
