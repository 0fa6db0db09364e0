"""The kernels compile for the chips they ship to, within those chips' means, without a GPU.

Another process compiles: this one runs the kernels in Triton's interpreter.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from long_cases import long_but

from pdserve.kernels.tuning import Device, decode_tile, prefill_tile

SUPPORT = Path(__file__).parents[1] / "support"
TENSOR_COLUMNS = 512  # of a multiprocessor of Blackwell
SHARED_BYTES = {80: 101_376, 90: 232_448, 100: 232_448}  # of 8.x the least: 8.6, 8.9 and 12.x take the same tiles
STATES = "delta net|state space|short convolution"
ROWS = "rope and write|digest|rms norm|silu|sample|count|experts of 16 rows$|AWQ of (1|4096) rows$"
WANTED = {  # one of each kernel; the report has all
    80: f"(prefill|decode) (d128|latents, 16 heads)$|write latents|{STATES}|{ROWS}",
    90: f"d128$|d128 (16-slot|fp8)|window$|latents|float32|{STATES}|{ROWS}|"
    "(FP8 (blocks|outputs)|W8A8) of 64 rows|MXFP4 of 64 rows",
    100: f"(prefill|decode) (d128|latents, 128 heads)$|{STATES}|rope and write|sample|experts of 4096|"
    "FP8 blocks of 4096 rows",
}
PROGRAM = """
import json, re, sys
import kernel_catalog as catalog, kernel_compiler as compiling
capability, wanted = int(sys.argv[1]), re.compile(sys.argv[2])
chip = catalog.CHIPS[capability]
for case in catalog.cases():
    if wanted.search(case.name):
        for made in compiling.compile_all(lambda: case.run(chip), capability):
            fields = {name: getattr(made, name) for name in made.__slots__}
            print(json.dumps({"case": case.name, "hot": case.hot} | fields), flush=True)
"""


@dataclass(frozen=True, slots=True)
class Made:
    """One compiled kernel of the report."""

    case: str
    hot: bool
    kernel: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    tensor_columns: int
    num_warps: int
    matrix_unit: str
    serialized: bool
    narrow_inputs: int


@cache
def made(capability: int) -> list[Made]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(SUPPORT)
    command = [sys.executable, "-c", PROGRAM, str(capability), WANTED[capability]]
    output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    return [Made(**json.loads(line)) for line in output.splitlines()]


def on(*capabilities: int) -> pytest.MarkDecorator:
    """Compile for Hopper in each run, for older and newer chips in `make test-long`."""
    given = long_but((90,), capabilities)
    return pytest.mark.parametrize("capability", given)


@on(80, 90, 100)
def test_every_kernel_fits_the_shared_and_tensor_memory_of_its_chip(capability: int) -> None:
    assert made(capability), "nothing was compiled"
    assert {one.case: one.shared_bytes for one in made(capability) if one.shared_bytes > SHARED_BYTES[capability]} == {}
    assert {one.case: one.tensor_columns for one in made(capability) if one.tensor_columns > TENSOR_COLUMNS} == {}


def test_prefill_multiplies_with_wgmma_where_its_rows_fill_it() -> None:
    wide = [one for one in made(90) if one.kernel == "attend" and one.case.startswith("prefill")]
    wide = [one for one in wide if not one.case.endswith("float32")]
    assert len(wide) >= 2
    assert {one.case: one.matrix_unit for one in wide if one.matrix_unit != "wgmma"} == {}
    assert [one.case for one in wide if one.serialized] == []


@on(80, 90, 100)
def test_hot_kernels_do_not_spill(capability: int) -> None:
    hot = [one for one in made(capability) if one.hot]
    assert {"attend", "rope_write", "recur", "keep", "scan", "choose"} <= {one.kernel for one in hot}
    assert {one.case: one.spill_bytes for one in hot if one.spill_bytes} == {}


def test_products_of_fp8_are_summed_in_float32_from_block_to_block() -> None:
    rounded = [one for one in made(90) if one.kernel == "product" and one.case.endswith("rounded")]
    rounded = [one for one in rounded if one.case.startswith("FP8")]
    assert {one.case: one.narrow_inputs for one in rounded} == {
        "FP8 blocks of 64 rows, rounded": 128,
        "FP8 outputs of 64 rows, rounded": 128,
    }


def test_two_prefill_items_share_a_hopper_multiprocessor() -> None:
    plain = next(one for one in made(90) if one.case == "prefill d128" and one.kernel == "attend")
    assert 2 * plain.registers * plain.num_warps * 32 <= 65_536
    assert 2 * (plain.shared_bytes + 1024) <= 233_472


@pytest.mark.parametrize("capability", [(8, 6), (8, 9), (12, 0)])
def test_a_chip_with_little_shared_memory_takes_the_tiles_that_fit_it(capability: tuple[int, int]) -> None:
    smallest, own = Device((8, 0), 108), Device(capability, 108)
    assert prefill_tile(own, 128, 2, 64) == prefill_tile(smallest, 128, 2, 64)
    assert decode_tile(own, 128, 2, 64, 16) == decode_tile(smallest, 128, 2, 64, 16)
