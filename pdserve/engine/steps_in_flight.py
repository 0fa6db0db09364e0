"""What a GPU's runner keeps of steps that are started and not finished."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from pdserve.base.errors import InvariantError
from pdserve.engine.batch import Batch, Ints
from pdserve.engine.sampler import Scores


@dataclass(frozen=True, slots=True)
class InFlight:
    """A step on its way through the device."""

    batch: Batch | None  # None: copies alone
    token_ids: Tensor  # on the host, filled when the step is done
    logprobs: Scores | None  # of tokens, where they are asked for; on the host
    scores: Mapping[int, Scores]  # of prompts, by place in the plan; on the host
    stuck: Mapping[int, str]  # why a sample's grammar lets nothing follow
    done: torch.cuda.Event | None
    started_s: float


@dataclass(frozen=True, slots=True)
class SampledOnDevice:
    """The tokens that a step samples, on the device."""

    token_ids: Tensor  # [num_samples] in batch order; on ranks that do not sample they come with the next step
    first_samples: Ints  # [num_chunks]: where the samples of each of the plan's chunks begin
    on_host: Tensor  # the same tokens, once `copied`
    copied: torch.cuda.Event | None

    def of_chunks(self, chunks: Ints) -> Ints:
        """Return where the first samples of some of the plan's chunks are."""
        if chunks.max() >= len(self.first_samples):
            raise InvariantError(f"a step needs a token of chunk {chunks.max()} of {len(self.first_samples)}")
        return self.first_samples[chunks]

    def wait(self) -> list[int]:
        """Wait for the tokens; the work that was launched behind them goes on."""
        if self.copied is not None:
            self.copied.synchronize()
        return cast("list[int]", self.on_host.tolist())
