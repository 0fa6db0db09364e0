"""What the parts of a model are built from."""

from dataclasses import dataclass

import torch

from pdserve.model import design
from pdserve.model.config import ModelConfig
from pdserve.model.family import TensorSource
from pdserve.model.ops import DeviceOps, LayerNorm, Norm, RmsNorm
from pdserve.model.weights import Rank


@dataclass(frozen=True, slots=True)
class Parts:
    """What one layer, or another part of a model, is built from."""

    config: ModelConfig
    tensors: TensorSource
    ops: DeviceOps
    rank: Rank
    prefix: str = ""

    def norm(self, name: str, of: design.Norm) -> Norm:
        shape = (self.config.hidden_size,)
        weight = self.tensors.take(f"{self.prefix}{name}.weight", shape, plus=of.plus)
        if isinstance(of, design.RmsNorm):
            return RmsNorm(weight, of.eps)
        bias = self.tensors.take(f"{self.prefix}{name}.bias", shape) if of.bias else torch.zeros_like(weight)
        return LayerNorm(weight, bias, of.eps)

    def norm_or_none(self, name: str | None, of: design.Norm) -> Norm | None:
        return None if name is None else self.norm(name, of)

    def after(self, name: str | None, of: design.Norm) -> RmsNorm | None:
        """Return a norm of what attention or MLP has computed."""
        norm = self.norm_or_none(name, of)
        assert norm is None or isinstance(norm, RmsNorm), "no family has another"
        return norm
