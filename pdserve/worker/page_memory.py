"""Takes the memory of KV pages from the kernel before they are written to, beside the work that a worker has already.

A page's memory would come with the first write to it, which takes longer than the copy of a page. To wait for all of it
would put off when a worker serves, most of all one that takes the place of another in a hurry.
"""

import ctypes
import logging
import mmap
import os
import threading

from torch import Tensor

logger = logging.getLogger(__name__)

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14 and later: as if written to, and nothing is changed
_AT_ONCE = 2 << 20  # bytes: while one call runs, no thread of the process can map or unmap memory
_NICE = 10  # whatever computes or carries messages goes first


def take_in_background(pages: Tensor) -> threading.Thread:
    """Take all memory of a contiguous CPU tensor in a thread of its own; others may write to it meanwhile."""
    thread = threading.Thread(target=_take, args=(pages,), name="page-memory", daemon=True)
    thread.start()
    return thread


def _take(pages: Tensor) -> None:
    os.setpriority(os.PRIO_PROCESS, 0, _NICE)  # of this thread alone
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    begin = -(-pages.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (pages.data_ptr() + pages.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    for address in range(begin, end, _AT_ONCE):
        if madvise(address, min(_AT_ONCE, end - address), _POPULATE_WRITE):
            reason = os.strerror(ctypes.get_errno())
            logger.info("memory of pages comes when they are written to: %s", reason)
            return
