"""What an engine expects of a head that guesses from what a model computes."""

from typing import Protocol

from torch import Tensor

from pdserve.model.attention import Attention
from pdserve.model.config import ModelConfig
from pdserve.model.design import Scores
from pdserve.model.rope import Rope
from pdserve.model.taps import Taps


class Head(Protocol):
    """A layer that takes in a feature of each position, and the token that follows."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def taps(self) -> Taps:
        """Return what makes features of the model's hidden states."""
        ...

    @property
    def rope(self) -> Rope: ...

    @property
    def scores(self) -> Scores: ...

    def hidden(self, token_ids: Tensor, features: Tensor, attention: Attention, rows: Tensor) -> Tensor:
        """Compute K and V of every position, and outputs of some: [len(rows), hidden_size].

        token_ids: int64 [num_positions], of the tokens that follow. features: [num_positions, hidden_size]; the output
        is the feature of the next position, where the model has not computed that.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits of outputs over the model's vocabulary; -inf where the head has no such token."""
        ...
