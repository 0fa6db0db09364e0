"""A worker's memory on the CPU: weights that all workers of a machine hold once, and KV pages.

Weights: workers map the same file. The first one writes its tensors into the file as they lie in memory. A worker maps
a file only if the file has exactly the bytes that the worker itself has read and packed. A file that differs costs
memory, and changes no token. File names contain the machine's name, since the folder may lie on a network disk: a
mapped file that another machine deletes there can no longer be read.

Pages: the kernel gives a page its memory at the first write to it, which takes longer than the copy of a page. If a
worker waited for all of this memory it would serve later, and it may be replacing another worker. So a thread asks the
kernel for the memory while the worker serves.
"""

import ctypes
import errno
import fcntl
import hashlib
import logging
import mmap
import os
import shutil
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import psutil
import torch
from torch import Tensor

from pdserve.base.files import make_own_folder, naming_file, why_unusable
from pdserve.model.family import Model

logger = logging.getLogger(__name__)

LEAST_BYTES = 2**16  # of a tensor that is shared
WORTH_BYTES = 2**24  # of all these tensors; below it every worker keeps its own
ALIGNMENT = 2**12
NUM_KEPT = 4  # files in the folder, those that were mapped last

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14 and later: as if written to, and nothing is changed
_AT_ONCE = 256 << 10  # bytes: while one call runs, no thread of the process may map or unmap memory
_NICE = 10  # whatever computes or carries messages goes first
_GROUPS, _OWN_GROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor, and where it lies in the file."""

    tensor: Tensor
    offset: int

    @property
    def end(self) -> int:
        return self.offset + self.tensor.nbytes

    def bytes_of(self) -> Tensor:
        return self.tensor.view(-1).view(torch.uint8)


def share_weights(model: Model, folder: Path, weights_hash: str) -> None:
    """Put mapped memory under the large tensors of a model on the CPU; where that fails, a warning says why."""
    tensors = {id(tensor): tensor for tensor in _tensors(model)}.values()  # a tied head is the embedding
    places = _places(tensors)
    if not places or places[-1].end < WORTH_BYTES:
        return
    shapes = [(tuple(place.tensor.shape), str(place.tensor.dtype)) for place in places]
    name = hashlib.sha256(repr((weights_hash, shapes)).encode()).hexdigest()[:32]
    try:
        mapped = _mapped(folder, name, places)
    except OSError as error:
        why = why_unusable(error, folder, "shared_weights_dir")
        logger.warning("weights are not shared with other workers: %s", why)
        return
    for place in places:
        tensor = place.tensor
        tensor.data = mapped[place.offset : place.end].view(tensor.dtype).view(tensor.shape)
    ctypes.CDLL(None).malloc_trim(0)  # what the tensors had goes back to the system
    total = sum(tensor.nbytes for tensor in tensors)
    logger.info("%d of %d MiB of weights are mapped from %s", places[-1].end >> 20, total >> 20, folder)


def _places(tensors: Iterable[Tensor]) -> list[Place]:
    """Return all large tensors, one behind the other. What oneDNN has packed has no bytes to be seen."""
    places, end = list[Place](), 0
    for tensor in tensors:
        if tensor.layout == torch.strided and tensor.is_contiguous() and tensor.nbytes >= LEAST_BYTES:
            place = Place(tensor, -(-end // ALIGNMENT) * ALIGNMENT)
            end = place.end
            places.append(place)
    return places


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for each in value:
            yield from _tensors(each)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))


def _mapped(folder: Path, name: str, places: list[Place]) -> Tensor:
    """Return a file's bytes, which are those of the tensors; it is written if need be. OSError where that fails."""
    make_own_folder(folder)
    machine = os.uname().nodename
    path = folder / f"{machine}@{name}.weights"
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in folder.glob(f"{machine}@*.tmp"):  # by a worker that was ended while it wrote
            left.unlink()
        mapped = _read(path, places)
        if mapped is None:
            _write(path, places)
            mapped = _read(path, places)
        if mapped is None:
            raise OSError(errno.EIO, "what was written is not what is read", str(path))
        os.utime(path)
        for old in sorted(folder.glob(f"{machine}@*.weights"), key=lambda each: each.stat().st_mtime)[:-NUM_KEPT]:
            old.unlink()
    return mapped


def _read(path: Path, places: list[Place]) -> Tensor | None:
    """Map a file, or return None: it is not there, or has other bytes."""
    if not path.exists() or path.stat().st_size != places[-1].end:
        return None
    with path.open("rb") as file:
        if not all(_is_in(file, place) for place in places):
            return None
        return torch.from_numpy(np.memmap(file, np.uint8, "c"))  # nothing is written to it, but torch refuses "r"


def _is_in(file: BinaryIO, place: Place) -> bool:
    """Compare by reading: what is mapped would be in memory beside what it takes the place of."""
    file.seek(place.offset)
    return torch.equal(torch.from_numpy(np.fromfile(file, np.uint8, place.tensor.nbytes)), place.bytes_of())


def _write(path: Path, places: list[Place]) -> None:
    if shutil.disk_usage(path.parent).free < 2 * places[-1].end:
        raise OSError(errno.ENOSPC, f"too little space is free for {places[-1].end} bytes", str(path.parent))
    scratch = path.with_suffix(".tmp")
    try:
        scratch.touch(0o600)
        with naming_file(scratch), scratch.open("wb") as file:
            for place in places:
                file.seek(place.offset)
                file.write(place.bytes_of().numpy().data)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


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
