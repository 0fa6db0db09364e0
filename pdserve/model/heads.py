"""Products in which each head of a token has a matrix of its own."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.kernels.cpu.layers import HeadTiles


@dataclass(frozen=True, slots=True)
class HeadDense:
    """A matrix of each head."""

    data: Tensor  # [num_heads, width, inputs]


HeadLinear = HeadDense | HeadTiles


def multiply_heads(x: Tensor, weight: HeadLinear, num_more: int) -> Tensor:
    """See `Ops.linear_heads`."""
    assert isinstance(weight, HeadDense)
    num_heads, width, inputs = weight.data.shape
    out = x.new_empty((len(x), num_heads + num_more, width))
    out[:, :num_heads] = torch.bmm(x[:, :, :inputs].transpose(0, 1), weight.data.transpose(1, 2)).transpose(0, 1)
    return out.flatten(1)
