"""Products with matrices of codes: checked against float64, and timed beside the same product in 16 bits.

A rate counts the bytes of codes and scales. Matrices rotate, so that no cache holds them.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from coded_matrices import coded_matrix
from gpu_device import Device
from gpu_report import Case, Row
from torch import Tensor

from pdserve.kernels import tuning
from pdserve.kernels.code_blocks import CodeBlocks, Kind
from pdserve.kernels.experts import Grouped, grouped_product
from pdserve.kernels.products import product, rounds_inputs
from pdserve.model.device_codes import joined_blocks

SIZE, DRY_SIZE = 8192, 128  # outputs and inputs
ROWS, DRY_ROWS = (1, 16, 64, 512, 4096), (2, 70)
COPIES = 4
EXACT, ROUNDED = 7.5e-3, 0.04  # errors that rounding to 16 bits, and inputs to 8 bits, may leave
FORMS: tuple[tuple[str, Kind, int, bool], ...] = (  # name, codes, inputs that share a scale (0: all), minimums
    ("int4 of 128, zeros", "int4", 128, True),
    ("int4 of 32", "int4", 32, False),
    ("int8 of outputs", "int8", 0, False),
    ("fp8 of blocks", "fp8", 128, False),
    ("fp8 of outputs", "fp8", 0, False),
)
# Of GPT-OSS 20B: experts, of which each row takes four; gates and ups, and hidden features.
EXPERTS, DRY_EXPERTS = (32, 5760, 2880), (4, 72, 64)
EXPERT_ROWS, TAKEN = (1, 16, 64, 1024), 4


def cases(device: Device) -> Iterator[Case]:
    for name, kind, group, minimums in FORMS:
        yield name, partial(_form, device, name, kind, group, minimums=minimums)
    yield "experts in MXFP4", partial(_experts, device)


def jobs(device: Device) -> dict[str, Callable[[Device], None]]:
    """Return what compiles the kernels of `cases`, a job for each form."""
    found = {name: partial(_launch, kind, group, minimums) for name, kind, group, minimums in FORMS}
    return device.sized({**found, "experts in MXFP4": _launch_experts}, {"experts in MXFP4": _launch_experts})


def _launch(kind: Kind, group: int, minimums: bool, device: Device) -> None:
    size = device.sized(SIZE, DRY_SIZE)
    weight, _ = coded_matrix(kind, (size, size), group or size, minimums=minimums, device=device.name)
    rounds = rounds_inputs(weight, tuning.device_of(device.name))
    for num_rows in device.sized(ROWS, DRY_ROWS):
        x = torch.zeros((num_rows, size), dtype=device.half, device=device.torch)
        for rounded in (False, True)[: 1 + rounds]:
            product(x, weight, rounded=rounded)
    device.synchronize()


def _launch_experts(device: Device) -> None:
    count, width, inputs = device.sized(EXPERTS, DRY_EXPERTS)
    weight, _ = coded_matrix("fp4", (width, inputs), 32, device=device.name)
    weight = joined_blocks([weight] * count)
    floats = torch.zeros((count, width, inputs), dtype=device.half, device=device.torch)
    for num_rows in device.sized(EXPERT_ROWS, DRY_ROWS):
        x = torch.zeros((num_rows, inputs), dtype=device.half, device=device.torch)
        shares, chosen = torch.ones((num_rows, count), device=device.torch).topk(TAKEN)
        of = Grouped.of(shares, chosen, count)
        for each in (weight, floats):
            grouped_product(x, each, None, of.rows, of, device.half)
    device.synchronize()


def _form(device: Device, name: str, kind: Kind, group: int, *, minimums: bool) -> Iterator[Row]:
    size = device.sized(SIZE, DRY_SIZE)
    weight, values = coded_matrix(kind, (size, size), group or size, minimums=minimums, device=device.name)
    copies = [weight, *(_copied(weight) for _ in range(device.sized(COPIES, 1) - 1))]
    floats = [values.to(device.half) for _ in copies]
    rounds = rounds_inputs(weight, tuning.device_of(device.name))
    for num_rows in device.sized(ROWS, DRY_ROWS):
        x = torch.randn((num_rows, size), device=device.torch).to(device.half)
        expected = x.double() @ values.t()
        floats_us = device.time_us([partial(torch.matmul, x, each.t()) for each in floats])
        for rounded in (False, True)[: 1 + rounds]:
            calls = [partial(product, x, each, rounded=rounded) for each in copies]
            figures = {"us": device.time_us(calls), "us in 16 bits": floats_us}
            shown = f"{name}, {num_rows} rows" + ", rounded" * rounded
            yield _row(shown, figures, weight, _error(calls[0](), expected), ROUNDED if rounded else EXACT)
    del copies, floats, values, expected
    device.empty()


def _experts(device: Device) -> Iterator[Row]:
    count, width, inputs = device.sized(EXPERTS, DRY_EXPERTS)
    weight, values = coded_matrix("fp4", (count * width, inputs), 32, device=device.name)
    floats = values.to(device.half).view(count, width, inputs)
    del values
    for num_rows in device.sized(EXPERT_ROWS, DRY_ROWS):
        x = torch.randn((num_rows, inputs), device=device.torch).to(device.half)
        shares, chosen = torch.randn((num_rows, count), device=device.torch).softmax(-1).topk(TAKEN)
        of = Grouped.of(shares, chosen, count)
        coded, in_floats = (
            partial(grouped_product, x, each, None, of.rows, of, device.half) for each in (weight, floats)
        )
        figures = {"us": device.time_us([coded]), "us in 16 bits": device.time_us([in_floats])}
        expected = _expected(x, floats, chosen, of)
        name = f"experts in MXFP4, {num_rows} rows"
        yield _row(name, figures, None, _error(coded(), expected), EXACT)
    del floats
    device.empty()


def _expected(x: Tensor, floats: Tensor, chosen: Tensor, of: Grouped) -> Tensor:
    """Return what each slot makes, expert by expert: bfloat16 holds the values of MXFP4 exactly."""
    experts = chosen.flatten().sort().values
    of_each = ((x[of.rows[experts == each]], floats[each]) for each in experts.unique())
    return torch.cat([rows.double() @ matrix.double().t() for rows, matrix in of_each])


def _row(name: str, figures: dict[str, float], weight: CodeBlocks | None, error: float, allowed: float) -> Row:
    rate = {} if weight is None else {"GB/s": 1e-3 * weight.nbytes / figures["us"]}
    return Row(name, {**figures, **rate, "error": error, "allowed": allowed}, failed=not error <= allowed)


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def _copied(weight: CodeBlocks) -> CodeBlocks:
    minimums = None if weight.minimums is None else weight.minimums.clone()
    parts = weight.codes.clone(), weight.scales.clone(), minimums
    return CodeBlocks(weight.kind, *parts, weight.inputs, weight.group)
