"""Decode steps in a few fixed sizes, so that each is launched from Python once and replayed ever after.

A step of n sequences runs in the smallest size that holds n. What changes between two steps of a size lies at addresses
that never change; padding is a token whose K and V go nowhere and whose result nobody reads.
"""

from bisect import bisect_left
from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch
from torch import Tensor


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Return the powers of two below `max_num_seqs`, and `max_num_seqs`."""
    return (*(1 << power for power in range((max_num_seqs - 1).bit_length())), max_num_seqs)


def size_for(num_seqs: int, sizes: Seq[int]) -> int | None:
    """Return the smallest of the rising `sizes` that holds `num_seqs`, or None."""
    index = bisect_left(sizes, num_seqs)
    return sizes[index] if index < len(sizes) else None


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
