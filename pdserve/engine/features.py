"""What a step leaves for a drafting head: a feature of each token that it has computed.

Invariant: features are those of one step. They go by the KV slots of their tokens, so nobody has to know in which
order, or as rows of which chunks, the runner has computed the tokens.
"""

import numpy as np
import torch
from torch import Tensor

from pdserve.engine.batch import Batch, Ints
from pdserve.model.taps import Tap, Taps


class Features:
    """The features of a runner's last step."""

    def __init__(self, parts: Taps, num_pages: int, page_size: int) -> None:
        """parts: without any, nothing is kept. num_pages, page_size: of the runner's pool."""
        self.parts = parts
        self._page_size = page_size
        self._rows = np.zeros(num_pages * page_size if parts else 0, np.int32)  # by slot
        self._values = torch.empty(0)

    def tap(self) -> Tap:
        """Return what collects the features of a step."""
        return Tap(self.parts)

    def keep(self, batch: Batch, features: Tensor | None) -> None:
        """Take in what was collected of a batch, in place of what there was of the step before."""
        if features is not None:
            self._rows[batch.pages * self._page_size + batch.slots] = np.arange(batch.num_tokens)
            self._values = features

    def of(self, slots: Ints) -> Tensor:
        """Return the features of tokens of the last step: [num_tokens, hidden_size]."""
        return self._values.index_select(0, torch.from_numpy(self._rows[slots]).to(self._values.device))
