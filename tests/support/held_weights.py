"""Weights that are in memory, as a checkpoint would hold them."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pdserve.model.weights import Part, Stored, Weights


def held(tensors: Mapping[str, Tensor]) -> Weights:
    return {name: Stored(tuple(tensor.shape), tensor.__getitem__) for name, tensor in tensors.items()}


def scaled(weights: Weights, factor: float = 4.0, **of_others: float) -> Weights:
    """Return weights whose matrices are multiplied, such as lm_head by a factor of its own."""

    def times(name: str, stored: Stored) -> Stored:
        if len(stored.shape) == 1:
            return stored
        by = of_others.get(name.split(".", maxsplit=1)[0], factor)

        def read(part: Part) -> Tensor:
            values = stored.read(part)
            assert isinstance(values, Tensor)
            return values * by

        return Stored(stored.shape, read)

    return {name: times(name, stored) for name, stored in weights.items()}


def read_all(weights: Weights) -> dict[str, Any]:
    return {name: stored.read(()) for name, stored in weights.items()}
