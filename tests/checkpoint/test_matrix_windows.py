"""A part of a coded matrix is what the whole one has there, and reads no more than its words and groups."""

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from held_weights import held
from published_formats import CASES
from torch import Tensor

from pdserve.checkpoint.published import decoding, read_format
from pdserve.checkpoint.windows import ORDERS
from pdserve.model.weights import Part, Stored

OUTPUTS, INPUTS = 144, 192
CODES = ("qweight", "weight", "weight_packed")
WITHOUT_LOOPS = {name: case for name, case in CASES.items() if not name.startswith("fp8 of")}
IN_BLOCKS = {"fp8 of blocks": 48, "fp8 of large blocks": 128}


def parts_of(case: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config, make = CASES[case]
    if case in WITHOUT_LOOPS:
        return config, make(torch.zeros(OUTPUTS, INPUTS))[0]
    name, shape = "weight_scale_inv", (OUTPUTS, 1)
    if case in IN_BLOCKS:
        shape = -(-OUTPUTS // IN_BLOCKS[case]), -(-INPUTS // IN_BLOCKS[case])
    if case == "fp8 of outputs":
        name = "weight_scale"
    scales = torch.rand(shape, generator=torch.Generator().manual_seed(1)) + 0.5
    codes = torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(2)).to(torch.float8_e4m3fn)
    return config, {"weight": codes, name: scales[0, 0] if case == "fp8 of tensors" else scales}


def watched(parts: dict[str, Tensor], counts: Counter[str]) -> dict[str, Stored]:
    """Return tensors that count their elements that are read."""

    def watching(name: str, stored: Stored) -> Stored:
        def read(part: Part) -> Tensor:
            found = stored.read(part)
            assert isinstance(found, Tensor)
            counts[name.removeprefix("x.")] += found.numel()
            return found

        return replace(stored, read=read)

    return {name: watching(name, each) for name, each in held({f"x.{key}": of for key, of in parts.items()}).items()}


@pytest.mark.parametrize("keep_coded", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_a_part_is_that_of_the_whole_matrix_and_reads_what_it_needs(case: str, *, keep_coded: bool) -> None:
    config, parts = parts_of(case)
    counts = Counter[str]()
    stored = decoding(watched(parts, counts), read_format({"quantization_config": config}), keep_coded=keep_coded)
    matrix, block, is_parted = stored["x.weight"], IN_BLOCKS.get(case, 1), "order" not in case
    nearly = partial(torch.allclose, rtol=0.0, atol=1e-3)  # where inputs are taken from mixed groups, they are decoded
    same = torch.equal if is_parted else nearly

    def read(*part: slice) -> Tensor:
        counts.clear()
        found = matrix.read(part)
        return found if isinstance(found, Tensor) else torch.from_numpy(found.values())

    whole = read()
    sizes = {name: of.numel() for name, of in parts.items()}
    assert {name: counts[name] for name in sizes if name not in ORDERS} == {
        name: size for name, size in sizes.items() if name not in ORDERS
    }
    for rows in (slice(48, 96), slice(7, 50), slice(130, 144)):
        assert same(read(rows), whole[rows])
        step = block if block > 1 else 8
        most = (min(OUTPUTS, -(-rows.stop // step) * step) - rows.start // step * step) / OUTPUTS
        assert all(counts[name] <= sizes[name] * most for name in CODES if name in parts)
    for columns in (slice(64, 128), slice(160, 192), *(() if keep_coded else (slice(33, 70),))):
        assert same(read(slice(None), columns), whole[:, columns])
        step = block if block > 1 else 32
        most = (min(INPUTS, -(-columns.stop // step) * step) - columns.start // step * step) / INPUTS
        assert all(counts[name] <= sizes[name] * (most if is_parted else 1) for name in CODES if name in parts)
    assert same(read(slice(100, 120), slice(64, 128)), whole[100:120, 64:128])
