"""What a pipeline stage does together with its neighbours: hidden states go from each stage to the one behind it."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pdserve.base.errors import DeviceError
from pdserve.kernels.cpu.calls import Calls
from pdserve.kernels.cpu.ranks import RankMemory, pass_rows
from pdserve.model.weights import Rank


@dataclass(frozen=True, slots=True)
class Stages:
    """One stage among the others. Two neighbours share a memory, in which the earlier one is the first rank."""

    rank: Rank
    before: RankMemory | None  # None: it is the first stage
    behind: RankMemory | None  # None: it is the last one
    calls: Calls

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def through(self, calls: Calls) -> "Stages":
        return replace(self, calls=calls)

    def receive(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """Wait for the hidden states of the stage before this one."""
        assert self.before is not None, "the first stage embeds tokens"
        x = self.calls.empty(num_rows, width, dtype)
        pass_rows(self.calls, self.before, x)
        return x

    def send(self, x: Tensor) -> None:
        """Give hidden states to the stage behind this one; waits until it takes them."""
        assert self.behind is not None, "the last stage makes logits"
        pass_rows(self.calls, self.behind, x)

    def check(self) -> None:
        """Raise DeviceError where a neighbour has not come in time: then nothing means anything."""
        for memory, stage in ((self.before, self.rank.stage - 1), (self.behind, self.rank.stage + 1)):
            if memory is not None and memory.missing_rank is not None:
                raise DeviceError(f"pipeline stage {stage}: it took no part in a step in time")
