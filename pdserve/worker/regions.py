"""The KV pages of an engine as memory that movers write to and digests are taken of."""

import torch
from torch import Tensor

from pdserve.ids import PageId
from pdserve.kvtransfer.mover import Region, num_probe_rows
from pdserve.kvtransfer.session import Pages
from pdserve.worker.boot import Engine

_UNSIGNED = (1 << 64) - 1


def kv_region(engine: Engine) -> Region:
    """Return an engine's pages: page i is row i of the view."""
    kv = engine.runner.kv
    view = kv.view(torch.uint8).view(len(kv), -1)
    return Region.of(view.numpy(), engine.layout.page_digest) if view.device.type == "cpu" else device_region(view)


def device_region(view: Tensor) -> Region:
    """Return pages that the page-digest kernel can read. view: uint8 [num_pages, page_bytes], contiguous."""
    page_bytes = view.shape[1]
    probe = torch.zeros((num_probe_rows(page_bytes), page_bytes), dtype=torch.uint8, device=view.device)
    gpu = view.get_device() if view.device.type == "cuda" else None
    digests = KernelDigests(view)
    digests((PageId(0),))  # compiled before anybody waits for it
    return Region(view, probe, view.data_ptr(), probe.data_ptr(), digests, gpu)


class KernelDigests:
    """Computes splitmix64 digests of pages where they lie. On a stream of its own: it waits for no step."""

    def __init__(self, view: Tensor) -> None:
        from pdserve.kernels.pageio import page_digests  # noqa: PLC0415 - a CPU worker has no need of Triton

        self._page_digests = page_digests
        self._view = view
        self._stream = torch.cuda.Stream(view.device) if view.device.type == "cuda" else None

    def __call__(self, pages: Pages) -> tuple[int, ...]:
        with torch.cuda.stream(self._stream):
            ids = torch.tensor(pages, dtype=torch.int64, device=self._view.device)
            found = self._page_digests(self._view, ids).tolist()
        return tuple(digest & _UNSIGNED for digest in found)
