"""Pages whose digests a kernel takes where they lie: those of a GPU, or of a CPU on which Triton interprets."""

import torch
from torch import Tensor

from pdserve.base.errors import InvariantError
from pdserve.base.ids import PageId
from pdserve.kvtransfer.region import Region, TakeDigests, num_probe_rows
from pdserve.kvtransfer.routes import Share
from pdserve.protocol.page_tables import Pages

WORD_BYTES = 8  # that the kernel hashes at a time
_UNSIGNED = (1 << 64) - 1


def device_region(view: Tensor, share: Share | None = None, whole: Share | None = None) -> Region:
    """Return pages that the page-digest kernel can read. view: uint8 [num_pages, page_bytes], contiguous.

    share: of a rank with memory of its own: some KV heads of all layers, which follow one another in the whole page, or
    a copy of one head.
    """
    page_bytes, first_byte, of_sent = view.shape[1], 0, None
    if share is not None and whole is not None:
        if share.layers != whole.layers or share.num_copies > 1 < share.num_heads:
            raise InvariantError(f"{share} of {whole}: its runs do not follow one another")
        run_bytes = page_bytes // share.num_runs
        first_byte = run_bytes * share.num_layers * share.heads[0]
        if share.num_copies > 1:
            first, end = (run_bytes * layer for layer in share.sent.layers)
            of_sent = _kernel_digests(view[:, first:end], (first_byte + first) // WORD_BYTES)
    probe = torch.zeros((num_probe_rows(page_bytes), page_bytes), dtype=torch.uint8, device=view.device)
    gpu = view.get_device() if view.device.type == "cuda" else None
    digests = _kernel_digests(view, first_byte // WORD_BYTES)
    return Region(view, probe, view.data_ptr(), probe.data_ptr(), digests, gpu, share, of_sent)


def _kernel_digests(view: Tensor, first_word: int) -> TakeDigests:
    """Return what computes splitmix64 digests of pages where they lie, which begin with this word of a whole page.

    On a stream of its own, of high priority: it waits for no step, and not behind the programs of a large one.
    """
    from pdserve.kernels.pageio import page_digests  # noqa: PLC0415 - a CPU worker has no need of Triton

    stream = torch.cuda.Stream(view.device, priority=-1) if view.device.type == "cuda" else None

    def digests(pages: Pages) -> tuple[int, ...]:
        if stream is not None:
            torch.cuda.set_device(view.device)  # else leaving its stream makes a context on the first GPU
        with torch.cuda.stream(stream):
            ids = torch.tensor(pages, dtype=torch.int64, device=view.device)
            found = page_digests(view, ids, first_word).tolist()
        return tuple(digest & _UNSIGNED for digest in found)

    digests((PageId(0),))  # compiled before anybody waits for it
    return digests
