"""The operations on a CPU with the compiled kernels; plain torch does what they do not."""

import ctypes
import logging

import torch
from torch import Tensor

from pdserve.kernels.cpu.library import DTYPES
from pdserve.kernels.cpu.products import (
    Products,
    Tiles,
    embedded,
    interleaved,
    multiplies_bfloat16,
    tiled,
    tiled_gate_up,
)
from pdserve.kernels.cpu.quantized import QuantizedProducts, QuantizedTiles, tiled_codes
from pdserve.kernels.cpu.rows import Rows
from pdserve.model.groups import Groups
from pdserve.model.ops import Dense, GateUp, Linear, Matrix, Quantized, TorchOps

logger = logging.getLogger(__name__)


class CpuOps(TorchOps):
    """The operations of a CPU. A token's results depend on that token alone, however many are computed with it."""

    def __init__(self, eps: float, loaded: ctypes.CDLL) -> None:
        super().__init__(eps)
        self._rms_eps = eps
        self._rows = Rows(loaded)
        self._quantized = QuantizedProducts(loaded)
        self._noted = False  # that quantized products are slow
        self._products = Products(loaded) if multiplies_bfloat16(loaded) and not _has_matrix_units() else None

    def held(self, weight: Matrix) -> Linear:
        if isinstance(weight, Quantized):
            self._note_slow_codes()
            groups = weight.groups
            return QuantizedTiles(
                tiled_codes(*_tensors(groups)), groups.bits, groups.shape[0], weight.dtype, weight.bias
            )
        return tiled(weight.data, weight.bias) if self._fits(weight) else super().held(weight)

    def held_gate_up(self, gate: Matrix, up: Matrix) -> Linear | GateUp:
        if isinstance(gate, Quantized) and isinstance(up, Quantized):
            return _quantized_gate_up(gate, up)
        if isinstance(gate, Dense) and isinstance(up, Dense) and self._fits(gate):
            bias = None if gate.bias is None or up.bias is None else (gate.bias, up.bias)
            return tiled_gate_up(gate.data, up.data, bias)
        return super().held_gate_up(gate, up)

    def held_embedding(self, weight: Matrix, *, tied: bool) -> tuple[Linear, Linear | None]:
        if isinstance(weight, Quantized) or (tied and self._fits(weight)):
            held = self.held(weight)
            return held, held if tied else None
        return super().held_embedding(weight, tied=tied)

    def embed(self, token_ids: Tensor, weight: Linear) -> Tensor:
        match weight:
            case Tiles():
                return embedded(weight, token_ids)
            case QuantizedTiles():
                return self._quantized.rows(token_ids, weight)
            case _:
                return super().embed(token_ids, weight)

    def rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        if x.dtype not in DTYPES:
            return super().rms_norm(x, weight)
        return self._rows.rms_norm(x, weight, self._rms_eps)

    def linear(self, x: Tensor, weight: Linear) -> Tensor:
        if isinstance(weight, QuantizedTiles):
            return self._quantized.product(x, weight)
        if self._products is not None and isinstance(weight, Tiles):
            return self._products.product(x, weight)
        return super().linear(x, weight)

    def linear_add(self, x: Tensor, weight: Linear, residual: Tensor) -> Tensor:
        if isinstance(weight, QuantizedTiles):
            return self._quantized.product(x, weight, residual)
        if self._products is not None and isinstance(weight, Tiles):
            return self._products.product(x, weight, residual)
        return super().linear_add(x, weight, residual)

    def swiglu(self, x: Tensor, weight: Linear | GateUp) -> Tensor:
        if isinstance(weight, Tiles | QuantizedTiles):
            return self.linear(x, weight)
        return super().swiglu(x, weight)

    def _note_slow_codes(self) -> None:
        if not self._quantized.is_fast and not self._noted:
            self._noted = True
            logger.warning(
                "quantized weights: this processor has no AVX-512 VNNI, products of bytes take several times as long"
            )

    def _fits(self, weight: Dense) -> bool:
        """Say whether a matrix is multiplied in tiles."""
        return self._products is not None and weight.data.dtype == torch.bfloat16 and weight.data.shape[1] % 2 == 0


def _quantized_gate_up(gate: Quantized, up: Quantized) -> QuantizedTiles:
    """Put SwiGLU's two matrices into common tiles, with 8 bits where one of them has."""
    pair = (gate.groups, up.groups)
    if gate.groups.bits != up.groups.bits:
        pair = (gate.groups.eight_bits(), up.groups.eight_bits())
    first, second = map(_tensors, pair)
    data = tiled_codes(*(interleaved(*each) for each in zip(first, second, strict=True)))
    bias = None if gate.bias is None or up.bias is None else interleaved(gate.bias, up.bias)
    return QuantizedTiles(data, pair[0].bits, gate.groups.shape[0], gate.dtype, bias, gated=True)


def _tensors(groups: Groups) -> tuple[Tensor, Tensor, Tensor]:
    return torch.tensor(groups.codes), torch.tensor(groups.scales), torch.tensor(groups.minimums)


def _has_matrix_units() -> bool:
    """Say whether oneDNN's products have matrix units to run on: they leave vectors behind."""
    return torch.cpu._is_amx_tile_supported()
