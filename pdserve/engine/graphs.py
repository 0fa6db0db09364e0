"""Decode steps in a few fixed sizes, so that each is launched from Python once and replayed ever after.

A step of n sequences runs in the smallest size that holds n. What changes between two steps of a size lies in buffers
that never move; places without a sequence hold a token whose K and V go nowhere and whose result nobody reads.
"""

from bisect import bisect_left
from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pdserve.engine.batch import Batch
from pdserve.errors import InvariantError

Int32s = npt.NDArray[np.int32]

ALIGNMENT = 16  # entries; kernels are compiled once for aligned addresses
NUM_FIELDS = 3  # token ids, positions, slots


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Return the powers of two below `max_num_seqs`, and `max_num_seqs`."""
    return (*(1 << power for power in range((max_num_seqs - 1).bit_length())), max_num_seqs)


def size_for(num_seqs: int, sizes: Seq[int]) -> int | None:
    """Return the smallest of the rising `sizes` that holds `num_seqs`, or None."""
    index = bisect_left(sizes, num_seqs)
    return sizes[index] if index < len(sizes) else None


def lay_out(batch: Batch, page_size: int, num_pages: int, image: Int32s) -> None:
    """Fill `image` [3, size], size >= batch.num_tokens: token ids, positions, slots; the rest goes nowhere."""
    num_tokens = batch.num_tokens
    image[0, :num_tokens] = batch.token_ids
    image[1, :num_tokens] = batch.positions
    image[2, :num_tokens] = batch.pages * page_size + batch.slots
    image[:2, num_tokens:] = 0
    image[2, num_tokens:] = num_pages * page_size


class StepInputs:
    """The fixed buffers of a step's tokens on a device, and their image on the host."""

    def __init__(self, max_num_tokens: int, page_size: int, num_pages: int, device: torch.device) -> None:
        length = NUM_FIELDS * _aligned(max_num_tokens)
        self._host = torch.zeros(length, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device = torch.zeros(length, dtype=torch.int32, device=device)
        self._sent = torch.cuda.Event() if device.type == "cuda" else None
        self._page_size = page_size
        self._num_pages = num_pages

    def send(self, batch: Batch, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Copy a step to the device, behind the work already launched.

        Returns token ids, positions and slots, int32 [size]; steps of one size find them at the same addresses.
        """
        stride = _aligned(size)
        used = NUM_FIELDS * stride
        if used > len(self._host):
            raise InvariantError(f"a step of {size} tokens in buffers for {len(self._host) // NUM_FIELDS}")
        if self._sent is not None:
            self._sent.synchronize()  # the last step's copy may still read the image
        image = self._host[:used].numpy().reshape(NUM_FIELDS, stride)
        lay_out(batch, self._page_size, self._num_pages, image)
        self._device[:used].copy_(self._host[:used], non_blocking=True)
        if self._sent is not None:
            self._sent.record()
        token_ids, positions, slots = self._device[:used].view(NUM_FIELDS, stride)[:, :size]
        return token_ids, positions, slots


class Replays:
    """One captured step for each size that was asked for; on a CPU nothing is captured."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._captured: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._memory = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def run(self, size: int, step: Callable[[], Tensor]) -> Tensor:
        """Compute a step, capturing it if it is the first of its size.

        step: launches the work, which must give the same result when it is done twice. Returns what `step` returned
        when it was captured; the next step of that size overwrites it.
        """
        if self._device.type != "cuda":
            return step()
        if size not in self._captured:
            self._captured[size] = self._capture(step)
        graph, result = self._captured[size]
        graph.replay()
        return result

    def _capture(self, step: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        self._warm_up(step)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            result = step()
        return graph, result

    def _warm_up(self, step: Callable[[], Tensor]) -> None:
        """Compile kernels and make libraries allocate what they need, on a stream of its own as capture asks."""
        aside = torch.cuda.Stream(self._device)
        aside.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(aside):
            step()
        torch.cuda.current_stream(self._device).wait_stream(aside)


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT
