"""Sends arrays to a device: one copy for all arrays of a step, for which the host does not wait."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

ALIGNMENT = 16  # entries; kernels are compiled once for aligned addresses


class Staging:
    """Sends arrays to one device, integers as int32 and floats as float32."""

    def __init__(self, device: torch.device, num_words: int = 0) -> None:
        """With `num_words`, every send goes to the same memory, behind the work already launched.

        Arrays of the same sizes then find the same addresses, as a captured graph needs. Without, each send gets memory
        of its own.
        """
        self._device = device
        self._words = torch.zeros(num_words, dtype=torch.int32, device=device) if num_words else None

    def send(self, *arrays: npt.NDArray[np.generic]) -> list[Tensor]:
        """Copy arrays to the device; each starts at an aligned address and keeps its shape."""
        starts = np.cumsum([0, *map(aligned, (array.size for array in arrays))]).tolist()
        # Torch's allocator reuses pinned memory only after the copy.
        image = torch.empty(starts[-1], dtype=torch.int32, pin_memory=self._device.type == "cuda")
        words = image.numpy()
        for start, array in zip(starts, arrays, strict=False):
            words[start : start + array.size] = (array.view(np.int32) if _is_float(array) else array).reshape(-1)
        sent = self._copy(image)
        return [
            sent[start : start + array.size].view(torch.float32 if _is_float(array) else torch.int32).view(array.shape)
            for start, array in zip(starts, arrays, strict=False)
        ]

    def _copy(self, image: Tensor) -> Tensor:
        if self._words is None:
            return image.to(self._device, non_blocking=True)
        if len(image) > len(self._words):
            raise ValueError(f"arrays must fit into {len(self._words)} words, got {len(image)}")
        return self._words[: len(image)].copy_(image, non_blocking=True)


def aligned(count: int) -> int:
    """Return the entries that an array of `count` takes up."""
    return -(-count // ALIGNMENT) * ALIGNMENT


def padded(array: npt.NDArray[np.integer], shape: tuple[int, ...], fill: int = 0) -> npt.NDArray[np.int32]:
    """Return an array of the shape, filled up with `fill`; cut off what does not fit."""
    whole = np.full(shape, fill, dtype=np.int32)
    corner = tuple(slice(0, min(sizes)) for sizes in zip(array.shape, shape, strict=True))
    whole[corner] = array[corner]
    return whole


def _is_float(array: npt.NDArray[np.generic]) -> bool:
    return array.dtype == np.float32
