"""Quantized matrices as a GPU holds and multiplies them, from what checkpoints hold."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from pdserve.kernels.code_blocks import ZEROS, CodeBlocks, Kind
from pdserve.model.fp8 import Coded, Fp8
from pdserve.model.groups import Floats, Groups, Halves
from pdserve.model.weights import GROUP, SEGMENT

RUNS = (4, 2)  # scales in a row that may be one, beside all of an output's: of 128 and 64 inputs


def code_blocks(coded: Coded, device: torch.device | None, bias: Tensor | None = None) -> CodeBlocks:
    """Put a matrix on a device, with each scale once, and with minimums only where they are not those of ZEROS."""
    return _fp8(coded, device, bias) if isinstance(coded, Fp8) else _integers(coded, device, bias)


def _fp8(matrix: Fp8, device: torch.device | None, bias: Tensor | None) -> CodeBlocks:
    (outputs, inputs), scales = matrix.shape, matrix.scales
    whole = scales.shape[1] == 1 or _repeats(scales.shape[1], scales)
    filled = np.pad(matrix.codes, ((0, 0), (0, -inputs % GROUP))).reshape(outputs, -1, GROUP)
    scales = scales[:, :1] if whole else scales
    group = inputs if whole else SEGMENT
    return CodeBlocks("fp8", _on(device, filled), _on(device, scales), None, inputs, group, bias)


def _integers(groups: Groups, device: torch.device | None, bias: Tensor | None) -> CodeBlocks:
    kind: Kind = "fp4" if groups.fp4 else "int4" if groups.bits == 4 else "int8"
    scales, minimums = groups.scales, groups.minimums
    lows = None if kind == "fp4" or np.array_equal(minimums, _around_zero(kind, scales)) else minimums
    num_groups = scales.shape[1]
    run = next((run for run in (num_groups, *RUNS) if _repeats(run, scales, lows)), 1)
    parts = [None if each is None else _on(device, each[:, ::run]) for each in (scales, lows)]
    assert parts[0] is not None
    codes = _on(device, groups.codes)
    order = None if groups.order is None else torch.tensor(groups.order, device=device)
    return CodeBlocks(kind, codes, parts[0], parts[1], num_groups * GROUP, run * GROUP, bias, order)


def joined_blocks(matrices: Sequence[object]) -> CodeBlocks:
    """Return one matrix with the outputs of all; ValueError if some are not of codes of this kind."""
    parts = [each for each in matrices if isinstance(each, CodeBlocks)]
    kinds = {each.kind for each in parts}
    if len(kinds) != 1 or len(parts) != len(matrices) or any(each.order is not None for each in parts):
        raise ValueError("some have codes, and some have none, or others; --quantization none decodes all")
    group, has_minimums = min(each.group for each in parts), any(each.minimums is not None for each in parts)
    alike = [_finer(each, group, has_minimums=has_minimums) for each in parts]
    codes, scales = (torch.cat(each, 1) for each in zip(*((each.codes, each.scales) for each in alike), strict=True))
    lows = [each.minimums for each in alike if each.minimums is not None]
    biases = [each.bias for each in alike if each.bias is not None]
    minimums, bias = torch.cat(lows, 1) if lows else None, torch.cat(biases) if biases else None
    together = replace(parts[0], codes=codes, scales=scales, minimums=minimums, group=group, bias=bias)
    return replace(together, rounded=False)  # experts take inputs as they are


def _finer(matrix: CodeBlocks, group: int, *, has_minimums: bool) -> CodeBlocks:
    """Return the same matrix with scales of fewer inputs, and with minimums if others have them."""
    scales, minimums = matrix.scales, matrix.minimums
    if has_minimums and minimums is None:
        minimums = scales * -ZEROS[matrix.kind]
    if matrix.group > group:
        times = -(-matrix.group // group)  # all inputs need not be a multiple
        scales = scales.repeat_interleave(times, 0)
        minimums = None if minimums is None else minimums.repeat_interleave(times, 0)
    return replace(matrix, scales=scales, minimums=minimums, group=group)


def _around_zero(kind: Kind, scales: Halves) -> Halves:
    return np.float16(-ZEROS[kind]) * scales


def _repeats(run: int, *parts: Halves | Floats | None) -> bool:
    """Say whether runs of so many columns are of one value each."""
    for each in parts:
        if each is not None and (
            each.shape[1] % run or not (each.reshape(len(each), -1, run) == each[:, ::run, None]).all()
        ):
            return False
    return True


def _on(device: torch.device | None, by_outputs: np.ndarray) -> Tensor:
    """Return an array [outputs, groups, ..] as [groups, outputs, ..] on a device."""
    return torch.tensor(by_outputs, device=device).transpose(0, 1).contiguous()
