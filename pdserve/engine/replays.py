"""Captures decode steps in CUDA graphs, one for each size, and replays them."""

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

Made = TypeVar("Made")


class Replays(Generic[Made]):
    """One captured step for each size that was needed; on a CPU nothing is captured."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._captured: dict[int, tuple[torch.cuda.CUDAGraph, Made]] = {}
        if device.type == "cuda":
            self._memory = torch.cuda.graph_pool_handle()
            self._aside = torch.cuda.Stream(device)  # one for all: libraries keep a workspace for each stream

    def run(self, size: int, step: Callable[[], Made]) -> Made:
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

    def _capture(self, step: Callable[[], Made]) -> tuple[torch.cuda.CUDAGraph, Made]:
        self._warm_up(step)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, self._memory, self._aside, capture_error_mode="thread_local"):
            result = step()
        return graph, result

    def _warm_up(self, step: Callable[[], Made]) -> None:
        """Compile kernels and let libraries allocate their memory, on the stream that captures."""
        self._aside.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._aside):
            step()
        torch.cuda.current_stream(self._device).wait_stream(self._aside)
