"""Pages whose digests a kernel takes where they lie: those of a GPU, or of a CPU on which Triton interprets."""

import torch
from torch import Tensor

from pdserve.base.ids import PageId
from pdserve.kvtransfer.region import Region, TakeDigests, num_probe_rows
from pdserve.protocol.page_tables import Pages

_UNSIGNED = (1 << 64) - 1


def device_region(view: Tensor) -> Region:
    """Return pages that the page-digest kernel can read. view: uint8 [num_pages, page_bytes], contiguous."""
    page_bytes = view.shape[1]
    probe = torch.zeros((num_probe_rows(page_bytes), page_bytes), dtype=torch.uint8, device=view.device)
    gpu = view.get_device() if view.device.type == "cuda" else None
    digests = _kernel_digests(view)
    digests((PageId(0),))  # compiled before anybody waits for it
    return Region(view, probe, view.data_ptr(), probe.data_ptr(), digests, gpu)


def _kernel_digests(view: Tensor) -> TakeDigests:
    """Return what computes splitmix64 digests of pages where they lie.

    On a stream of its own, of high priority: it waits for no step, and not behind the programs of a large one.
    """
    from pdserve.kernels.pageio import page_digests  # noqa: PLC0415 - a CPU worker has no need of Triton

    stream = torch.cuda.Stream(view.device, priority=-1) if view.device.type == "cuda" else None

    def digests(pages: Pages) -> tuple[int, ...]:
        with torch.cuda.stream(stream):
            ids = torch.tensor(pages, dtype=torch.int64, device=view.device)
            found = page_digests(view, ids).tolist()
        return tuple(digest & _UNSIGNED for digest in found)

    return digests
