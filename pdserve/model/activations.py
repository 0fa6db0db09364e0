"""The activations of MLPs in torch."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from pdserve.model.design import Activation


@dataclass(frozen=True, slots=True)
class XIelu:
    """The activation xIELU, of which each layer has learnt two scalars (Huang, Schlag 2024)."""

    positive: Tensor  # [1] each, before softplus
    negative: Tensor


MlpActivation = Activation | XIelu


def bent_times(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """Return gates, bent, times ups."""
    return swiglu_oai(gate, up) if activation is Activation.SWIGLU_OAI else activate(gate, activation).mul_(up)


OAI_SLOPE, OAI_LIMIT = 1.702, 7.0


def swiglu_oai(gate: Tensor, up: Tensor) -> Tensor:
    """Return (up + 1) * gate * sigmoid(1.702 * gate), with gates up to 7, and ups from -7 to 7 (GPT-OSS, 2025)."""
    gate, up = gate.clamp(max=OAI_LIMIT), up.clamp(-OAI_LIMIT, OAI_LIMIT)
    return (up + 1.0) * (gate * torch.sigmoid(gate * OAI_SLOPE))


def activate(x: Tensor, activation: MlpActivation) -> Tensor:
    """Return the activation of each element."""
    match activation:
        case Activation.SILU:
            return functional.silu(x)
        case Activation.GELU:
            return functional.gelu(x)
        case Activation.GELU_TANH:
            return functional.gelu(x, approximate="tanh")
        case Activation.SQUARED_RELU:
            return functional.relu(x).square_()
        case XIelu():
            above, below = xielu_scalars(activation)
            bent = (torch.expm1(x.clamp(max=XIELU_EPS)) - x) * below
            return torch.where(x > 0, above * x * x, bent) + XIELU_BETA * x
        case Activation.XIELU | Activation.SWIGLU_OAI:
            raise TypeError(f"{activation} is not of one value alone")


XIELU_BETA, XIELU_EPS = 0.5, -1e-6


def xielu_scalars(of: XIelu) -> tuple[Tensor, Tensor]:
    """Return what xIELU multiplies with above zero, and below."""
    return functional.softplus(of.positive), XIELU_BETA + functional.softplus(of.negative)


def capped(x: Tensor, cap: float | None) -> Tensor:
    """Return cap * tanh(x / cap) in float32, or x itself where there is no cap; x is overwritten."""
    return x if cap is None else x.float().div_(cap).tanh_().mul_(cap)
