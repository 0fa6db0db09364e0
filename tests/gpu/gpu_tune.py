"""Time attention over tiles and print, per shape, the rows to put into `tuning.py`."""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

from gpu_attention_bench import LLAMA, SMALL_HEADS, Shape, decode_calls, prefill_calls
from gpu_table import Row
from gpu_timing import time_us

from pdserve.kernels.tuning import Tile

SHOWN = 4
PREFILL_TILES = [
    *(Tile(128, block_n, 8, stages) for block_n, stages in itertools.product((32, 64, 128), (2, 3))),
    *(Tile(128, 32, 8, stages, 2, 128) for stages in (2, 3, 4)),
    *(Tile(64, 64, 4, stages, 2) for stages in (2, 3)),
    *(Tile(64, 32, 4, stages, 3, 168) for stages in (2, 3)),
    Tile(128, 64, 8, 3, 2, 128),
]


def run(only: str) -> list[Row]:
    """Return the best tiles of each shape, fastest first."""
    rows = []
    crowded = replace(LLAMA, page_size=16)
    for name, spec in (("d128", LLAMA), ("d64", SMALL_HEADS), ("d128 16-slot pages", crowded)):
        if only in f"prefill {name}":
            rows += _best(f"prefill {name}", PREFILL_TILES, partial(prefill_calls, spec, Shape(1, 8192, 8192)))
    if only in "decode d128":
        rows += _best("decode d128", decode_tiles(16), partial(decode_calls, LLAMA, Shape(32, 1, 8192)))
    return rows


def decode_tiles(block_m: int) -> list[Tile]:
    """List decode tiles of `block_m` rows worth trying."""
    sizes = itertools.product((32, 64, 128), (4, 8), (2, 3, 4), (1, 2, 3))
    return [
        Tile(block_m, block_n, warps, stages, per_sm)
        for block_n, warps, stages, per_sm in sizes
        if per_sm * (2 * (stages - 1) * block_n + block_m) * 256 <= 227 * 1024
    ]


def _best(name: str, tiles: Iterable[Tile], calls: Callable[[Tile], list[Callable[[], object]]]) -> list[Row]:
    timed, refused = [], 0
    for tile in tiles:
        try:
            timed.append((time_us(calls(tile)), tile))
        except Exception:  # noqa: BLE001 - a tile that does not compile or fit is no candidate
            refused += 1
    timed.sort(key=lambda pair: pair[0])
    notes = [f"({refused} tiles refused)"] + [""] * SHOWN
    return [
        Row(f"{name} #{rank}", time, note=f"{tile} {note}")
        for rank, ((time, tile), note) in enumerate(zip(timed[:SHOWN], notes, strict=False), 1)
    ]
