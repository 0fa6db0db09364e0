"""Memory of KV pages on the CPU: whether there is enough, and how it comes before pages are written to.

A page's memory would come with the first write to it, which takes longer than the copy of a page. To wait for all of it
would put off when a worker serves, most of all one that takes the place of another in a hurry. So a thread asks the
kernel for it beside the work that there is already.
"""

import ctypes
import logging
import mmap
import os
import threading
from contextlib import suppress
from pathlib import Path

import psutil
from torch import Tensor

logger = logging.getLogger(__name__)

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14 and later: as if written to, and nothing is changed
_AT_ONCE = 256 << 10  # bytes: while one call runs, no thread of the process may map or unmap memory
_NICE = 10  # whatever computes or carries messages goes first
_GROUPS, _OWN_GROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def take_in_background(pages: Tensor) -> threading.Thread:
    """Take all memory of a contiguous CPU tensor in a thread of its own; others may write to it meanwhile."""
    thread = threading.Thread(target=_take, args=(pages,), name="page-memory", daemon=True)
    thread.start()
    return thread


def _take(pages: Tensor) -> None:
    with suppress(OSError):
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


def available_bytes() -> int:
    """Return how much memory this process can still get: of the machine, swap included, or of its control groups."""
    own = _OWN_GROUP.read_text().rpartition("0::/")[2].strip()
    groups = _GROUPS / own, *(_GROUPS / parent for parent in Path(own).parents)
    return min([psutil.virtual_memory().available + psutil.swap_memory().free, *filter(None, map(_left, groups))])


def _left(group: Path) -> int | None:
    """Return what a control group's limit leaves, with the cache of files, which gives way; None: it has no limit."""
    try:
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):
        return None  # "max", or version 1 of control groups
    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return max(1, limit - used + int(stat["inactive_file"]) + int(stat["active_file"]))
