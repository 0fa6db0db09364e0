"""Memory for KV pages that several processes map. It has no name, and ends with the last of them."""

import mmap
import os

import numpy as np
import torch
from torch import Tensor


def new_pages(num_bytes: int) -> int:
    """Return the descriptor of zeroed memory; it comes when it is first written to."""
    descriptor = os.memfd_create("pdserve-pages", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, num_bytes)
    return descriptor


def mapped_pages(descriptor: int) -> Tensor:
    """Return the memory, uint8, and close the descriptor."""
    try:
        return torch.from_numpy(np.frombuffer(mmap.mmap(descriptor, os.fstat(descriptor).st_size), np.uint8))
    finally:
        os.close(descriptor)
