"""Copies pages of a GPU through the host's memory: a section of `make gpu`."""

from collections.abc import Callable

import torch
from gpu_report import Row

from pdserve.kvtransfer.backends.staging import HostRows

NUM_PAGES, PAGE_BYTES = 40, 1 << 20
ROWS = (7, 39, 0, 12, 3)
LONG_CYCLES = 2_000_000_000  # about a second


def run(only: str) -> list[Row]:
    """Copy pages out and in, and out beside a kernel that runs for long."""
    checks: tuple[tuple[str, Callable[[], int]], ...] = (
        ("pages out of a GPU and in again", lambda: num_wrong_rows(torch.device("cuda"))),
        ("pages out beside a long kernel", _num_kernels_waited_for),
    )
    rows = []
    for name, check in checks:
        if only in name:
            wrong = check()
            rows.append(Row(name, note=f"{wrong} wrong", failed=bool(wrong)))
    return rows


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


def _num_kernels_waited_for() -> int:
    """Return 1 if a copy returns only after a kernel that was launched before it on another stream."""
    pages = torch.ones((NUM_PAGES, PAGE_BYTES), dtype=torch.uint8, device="cuda")
    rows = HostRows(pages, pages[:0])
    rows.read(ROWS)  # memory is pinned now, which may wait for anything
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG_CYCLES)
    over = torch.cuda.Event()
    over.record()
    rows.read(ROWS)
    waited = over.query()
    torch.cuda.synchronize()
    return int(waited)
