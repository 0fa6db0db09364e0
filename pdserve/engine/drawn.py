"""The tokens that a step draws, on the device: for a step that is planned before the host knows them."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pdserve.engine.batch import FOLLOWS_NONE, Ints
from pdserve.errors import InvariantError


@dataclass(frozen=True, slots=True)
class DrawnTokens:
    token_ids: Tensor  # [num_samples] on the device, in batch order
    first_samples: Ints  # [num_chunks]: where the samples of each of the plan's chunks begin

    def fill_in(self, token_ids: Tensor, followed: Ints) -> None:
        """Write tokens of this step into the next one's, behind the work already launched.

        token_ids: [>= num_tokens] on the device. followed: [num_tokens], the chunk whose first token it is, or
        FOLLOWS_NONE.
        """
        places = np.flatnonzero(followed != FOLLOWS_NONE)
        if followed[places].max() >= len(self.first_samples):
            raise InvariantError(f"a step follows chunk {followed.max()} of {len(self.first_samples)}")
        index = torch.from_numpy(np.stack((places, self.first_samples[followed[places]])))
        if token_ids.device.type == "cuda":
            index = index.pin_memory().to(token_ids.device, non_blocking=True)
        token_ids.index_copy_(0, index[0], self.token_ids.index_select(0, index[1]).to(token_ids.dtype))
