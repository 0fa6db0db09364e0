"""Copies pages of a GPU through the host's memory: a section of `make gpu`."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch
from gpu_report import Case, Row

from pdserve.kvtransfer.backends.staging import HostRows

if TYPE_CHECKING:
    from gpu_device import Device

NUM_PAGES, PAGE_BYTES = 40, 1 << 20
ROWS = (7, 39, 0, 12, 3)


def cases(device: "Device") -> Iterator[Case]:
    """Copy pages out and in, and out beside a kernel that runs for long."""
    checks: tuple[tuple[str, Callable[[], int]], ...] = (
        ("pages out of a GPU and in again", lambda: num_wrong_rows(device.torch)),
        ("pages out beside a long kernel", lambda: _num_kernels_waited_for(device)),
    )
    for name, check in checks:
        yield name, partial(_row, name, check)


def _row(name: str, check: Callable[[], int]) -> list[Row]:
    wrong = check()
    return [Row(name, note=f"{wrong} wrong", failed=bool(wrong))]


def num_wrong_rows(device: torch.device) -> int:
    """Return how many rows differ after a copy through the host's memory."""
    shape = NUM_PAGES, PAGE_BYTES
    source = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # a copy waits for nothing that was launched before it
    host = HostRows(source, source[:0]).read(ROWS)
    HostRows(target, target[:0]).write(ROWS, host)
    sent, wanted = source[list(ROWS)], torch.zeros_like(source)
    wanted[list(ROWS)] = sent
    wrong = (target != wanted).any(dim=1).sum() + (torch.stack(list(host)).to(device) != sent).any(dim=1).sum()
    return int(wrong)


def _num_kernels_waited_for(device: "Device") -> int:
    """Return 1 if a copy returns only after a kernel that was launched before it on another stream."""
    pages = torch.ones((NUM_PAGES, PAGE_BYTES), dtype=torch.uint8, device=device.torch)
    rows = HostRows(pages, pages[:0])
    rows.read(ROWS)  # memory is pinned now, which may wait for anything
    device.synchronize()
    over = device.long_work()
    rows.read(ROWS)
    waited = over.query()
    device.synchronize()
    return int(waited)
