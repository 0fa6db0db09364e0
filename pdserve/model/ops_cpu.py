"""The operations on a CPU with the compiled kernels; plain torch does what they do not."""

import ctypes

import torch
from torch import Tensor

from pdserve.kernels.cpu.products import (
    Products,
    Tiles,
    embedded,
    multiplies_bfloat16,
    tiled,
    tiled_gate_up,
)
from pdserve.kernels.cpu.rows import Rows
from pdserve.model.ops import Dense, GateUp, Linear, TorchOps


class CpuOps(TorchOps):
    """The operations of a CPU. A token's results depend on that token alone, however many are computed with it."""

    def __init__(self, eps: float, loaded: ctypes.CDLL) -> None:
        super().__init__(eps)
        self._rms_eps = eps
        self._rows = Rows(loaded)
        self._products = Products(loaded) if multiplies_bfloat16(loaded) and not _has_matrix_units() else None

    def held(self, weight: Linear) -> Linear:
        if isinstance(weight, Dense) and self._tiles(weight):
            return tiled(weight.data, weight.bias)
        return super().held(weight)

    def held_gate_up(self, gate: Dense, up: Dense) -> Linear | GateUp:
        if not self._tiles(gate):
            return super().held_gate_up(gate, up)
        bias = None if gate.bias is None or up.bias is None else (gate.bias, up.bias)
        return tiled_gate_up(gate.data, up.data, bias)

    def held_embedding(self, weight: Dense, *, tied: bool) -> tuple[Linear, Linear | None]:
        if not (tied and self._tiles(weight)):
            return super().held_embedding(weight, tied=tied)
        head = self.held(weight)
        return head, head

    def embed(self, token_ids: Tensor, weight: Linear) -> Tensor:
        return embedded(weight, token_ids) if isinstance(weight, Tiles) else super().embed(token_ids, weight)

    def rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._rows.rms_norm(x, weight, self._rms_eps)

    def linear(self, x: Tensor, weight: Linear) -> Tensor:
        if self._products is not None and isinstance(weight, Tiles):
            return self._products.product(x, weight)
        return super().linear(x, weight)

    def linear_add(self, x: Tensor, weight: Linear, residual: Tensor) -> Tensor:
        if self._products is not None and isinstance(weight, Tiles):
            return self._products.product(x, weight, residual)
        return super().linear_add(x, weight, residual)

    def swiglu(self, x: Tensor, weight: Linear | GateUp) -> Tensor:
        if self._products is not None and isinstance(weight, Tiles):
            return self._products.product(x, weight)
        return super().swiglu(x, weight)

    def _tiles(self, weight: Dense) -> bool:
        return self._products is not None and weight.data.dtype == torch.bfloat16 and weight.data.shape[1] % 2 == 0


def _has_matrix_units() -> bool:
    """Say whether oneDNN's products have matrix units to run on: they leave vectors behind."""
    return torch.cpu._is_amx_tile_supported()
