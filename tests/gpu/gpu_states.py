"""Layers with a state: blocks of tokens checked against float64, and timed beside the same prompt token by token.

One prompt is a step. A layer's time is that of its convolution, heads and gates; what writes states is timed by itself.
"""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from gpu_device import Device
from gpu_report import Case, Row
from kernel_catalog import delta_net, num_taken, of_tokens, state_space
from recurrences import GATES, drawn, expected, gated_by, layer, num_inputs
from torch import Tensor

from pdserve.kernels.cpu.states import Recurrence
from pdserve.kernels.states import MIN_BLOCKED, PagedStates, StatesSpec

T = TypeVar("T")

SPAN = 1024
NEVER = 1 << 30
ALLOWED = 1e-4  # of values of about 1, in float32
CHECKED = ("delta of 64", "delta of 128", "space of 64", "space of 128")
CHECKED_TOKENS, DRY_TOKENS = 1000, 66
TIMED: dict[str, Callable[[torch.device], Recurrence]] = {"delta net": delta_net, "state space": state_space}
LENGTHS, DRY_LENGTHS = (16, 32, 64, 128, 512, 2048, 8192), (MIN_BLOCKED,)


def cases(device: Device) -> Iterator[Case]:
    for kind in device.sized(CHECKED, ("space",)):
        yield f"{kind}: blocks", partial(_checked, device, kind)
    for name in device.sized(tuple(TIMED), ()):
        yield f"{name}: times", partial(_timed, device, name, TIMED[name](device.torch))
    if device.is_dry:
        yield "space: times", partial(_timed, device, "space", layer("space", device.half))


def jobs(device: Device) -> dict[str, Callable[[Device], None]]:
    """Return what compiles the kernels of layers that are timed."""
    return device.sized({name: partial(_launch, make) for name, make in TIMED.items()}, {})


def _launch(make: Callable[[torch.device], Recurrence], device: Device) -> None:
    of = make(device.torch)
    for min_blocked in (1, NEVER):
        _Prompt(device, of, MIN_BLOCKED, min_blocked).whole()
    device.synchronize()


def _checked(device: Device, kind: str) -> Iterator[Row]:
    """Compare a prompt's results with the formulas in float64, with gates of any strength."""
    length = device.sized(CHECKED_TOKENS, DRY_TOKENS)
    plain = layer(kind, torch.float32)
    for gates in device.sized(GATES, ("both",)):
        of, taken = gated_by(gates, plain, drawn(length, num_inputs(plain)))
        prompt = _Prompt(device, moved(of, device.torch), length, MIN_BLOCKED, taken)
        gap = (prompt.whole().cpu().double() - expected(of, taken)).abs()
        error = float((gap / expected(of, taken).abs().clamp(min=1)).nan_to_num(nan=torch.inf).max())
        yield Row(f"{kind}, {gates}", {"error": error, "allowed": ALLOWED}, failed=not error <= ALLOWED)


def _timed(device: Device, name: str, of: Recurrence) -> Iterator[Row]:
    for length in device.sized(LENGTHS, DRY_LENGTHS):
        blocks, tokens = (_Prompt(device, of, length, least) for least in (1, NEVER))
        figures = {
            "us in blocks": device.time_us([blocks.layer]),
            "us token by token": device.time_us([tokens.layer]),
            "us to keep blocks": device.time_us([blocks.paged.keep]),
            "us to keep tokens": device.time_us([tokens.paged.keep]),
        }
        yield Row(f"{name}, {length} tokens", figures, f"blocks serve {MIN_BLOCKED} tokens and more")
        del blocks, tokens
        device.empty()


class _Prompt:
    """A layer, and the inputs of a prompt that is planned."""

    def __init__(
        self, device: Device, of: Recurrence, length: int, min_blocked: int, taken: Tensor | None = None
    ) -> None:
        changes, products = of_tokens(of)
        num_pages = -(-length // SPAN)
        pool = torch.zeros((num_pages, of.kept_inputs + of.memory), device=device.torch)
        sizes = 1, of.kept_inputs, of.memory, changes, SPAN, length, 1
        self.of = of
        self.paged = PagedStates(pool, StatesSpec(*sizes, products=products, min_blocked=min_blocked))
        self.paged.plan(np.arange(num_pages)[None, :], np.array([length]), np.array([length]))
        if taken is None:
            taken = torch.randn((length, num_taken(of)), device=device.torch).to(device.half)
        self.taken = taken.to(device.torch)

    def layer(self) -> Tensor:
        return self.paged.recur(self.of, 0, self.taken)

    def whole(self) -> Tensor:
        made = self.layer()
        self.paged.keep()
        return made


def moved(of: T, device: torch.device) -> T:
    """Return a layer whose tensors are on a device."""
    changed: dict[str, object] = {}
    for field in fields(of):  # type: ignore[arg-type]
        value = getattr(of, field.name)
        if isinstance(value, Tensor):
            changed[field.name] = value.to(device)
        elif is_dataclass(value):
            changed[field.name] = moved(value, device)
    return replace(of, **changed)  # type: ignore[type-var]
