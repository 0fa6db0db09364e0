"""The operations on a CPU with compiled kernels, and plain torch for the rest."""

import ctypes
import logging

import torch
from torch import Tensor

from pdserve.kernels.cpu.calls import Calls, Immediate
from pdserve.kernels.cpu.layers import (
    INPUT_BITS,
    MAX_INPUTS,
    Tiles,
    interleaved,
    look_up,
    multiplies_bfloat16,
    multiplies_bytes,
    multiply,
    rms_norm,
    tiled,
    tiled_codes,
    tiled_gate_up,
)
from pdserve.kernels.cpu.library import DTYPES
from pdserve.model.groups import Groups
from pdserve.model.ops import Dense, GateUp, Linear, Matrix, Quantized, TorchOps, packs

logger = logging.getLogger(__name__)


class CompiledOps:
    """The compiled operations, with weights in tiles. A token's results depend on that token alone."""

    def __init__(self, eps: float, calls: Calls) -> None:
        self._eps = eps
        self._calls = calls

    def embed(self, token_ids: Tensor, weight: Linear) -> Tensor:
        assert isinstance(weight, Tiles)
        return look_up(self._calls, token_ids, weight)

    def rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(self._calls, x, weight, self._eps)

    def linear(self, x: Tensor, weight: Linear | GateUp, residual: Tensor | None = None) -> Tensor:
        assert isinstance(weight, Tiles)
        return multiply(self._calls, x, weight, residual)

    def logits(self, x: Tensor, weight: Linear) -> Tensor:
        assert isinstance(weight, Tiles)
        return multiply(self._calls, x, weight, out_dtype=torch.float32)

    def linear_add(self, x: Tensor, weight: Linear, residual: Tensor) -> Tensor:
        return self.linear(x, weight, residual)

    def swiglu(self, x: Tensor, weight: Linear | GateUp) -> Tensor:
        return self.linear(x, weight)


class CpuOps(TorchOps):
    """The operations of a CPU: compiled for weights in tiles, in plain torch for others."""

    def __init__(self, eps: float, loaded: ctypes.CDLL, input_bits: int = INPUT_BITS) -> None:
        """Set up for one model. eps: of its norms. input_bits: of the inputs of its quantized products, 8 or 16."""
        super().__init__(eps)
        self._input_bits = input_bits
        self._compiled = CompiledOps(eps, Immediate(loaded))
        self._multiplies_bytes = multiplies_bytes(loaded)
        self._multiplies_bfloat16 = multiplies_bfloat16(loaded)
        self._noted = False  # whether slow products were logged

    def held(self, weight: Matrix) -> Linear:
        self._note_slow_products(weight)
        if isinstance(weight, Quantized):
            groups = weight.groups
            data = tiled_codes(*_tensors(groups))
            return Tiles(data, groups.bits, groups.shape[0], weight.dtype, weight.bias, input_bits=self._input_bits)
        return tiled(weight.data, weight.bias) if self._fits(weight) else super().held(weight)

    def held_gate_up(self, gate: Matrix, up: Matrix) -> Linear | GateUp:
        if isinstance(gate, Quantized) and isinstance(up, Quantized):
            return _quantized_gate_up(gate, up, self._input_bits)
        if isinstance(gate, Dense) and isinstance(up, Dense) and self._fits(gate):
            bias = None if gate.bias is None or up.bias is None else (gate.bias, up.bias)
            return tiled_gate_up(gate.data, up.data, bias)
        return super().held_gate_up(gate, up)

    def held_embedding(self, weight: Matrix, *, tied: bool) -> tuple[Linear, Linear | None]:
        if isinstance(weight, Quantized) or self._fits(weight):
            held = self.held(weight)
            return held, held if tied else None
        return super().held_embedding(weight, tied=tied)

    def embed(self, token_ids: Tensor, weight: Linear) -> Tensor:
        if isinstance(weight, Tiles):
            return self._compiled.embed(token_ids, weight)
        return super().embed(token_ids, weight)

    def rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._compiled.rms_norm(x, weight) if x.dtype in DTYPES else super().rms_norm(x, weight)

    def linear(self, x: Tensor, weight: Linear) -> Tensor:
        return self._compiled.linear(x, weight) if isinstance(weight, Tiles) else super().linear(x, weight)

    def logits(self, x: Tensor, weight: Linear) -> Tensor:
        return self._compiled.logits(x, weight) if isinstance(weight, Tiles) else super().logits(x, weight)

    def linear_add(self, x: Tensor, weight: Linear, residual: Tensor) -> Tensor:
        if isinstance(weight, Tiles):
            return self._compiled.linear_add(x, weight, residual)
        return super().linear_add(x, weight, residual)

    def swiglu(self, x: Tensor, weight: Linear | GateUp) -> Tensor:
        return self._compiled.swiglu(x, weight) if isinstance(weight, Tiles) else super().swiglu(x, weight)

    def _note_slow_products(self, weight: Matrix) -> None:
        if isinstance(weight, Quantized):
            there, kind, instructions = self._multiplies_bytes, "bytes", "AVX-512 VNNI"
        else:
            there = weight.data.dtype != torch.bfloat16 or self._multiplies_bfloat16 or _has_matrix_units()
            kind, instructions = "bfloat16", "AVX-512 BF16"
        if not there and not self._noted:
            self._noted = True
            logger.warning(
                "this processor has no dot products of %s (%s, or Arm's): steps take longer", kind, instructions
            )

    def _fits(self, weight: Dense) -> bool:
        """Say whether a matrix is multiplied in tiles. Others take oneDNN's products if there are any."""
        inputs = weight.data.shape[1]
        fits = weight.data.dtype == torch.bfloat16 and inputs % 2 == 0 and inputs <= MAX_INPUTS
        return fits and not _has_matrix_units() and (self._multiplies_bfloat16 or not packs(weight.data))


def _quantized_gate_up(gate: Quantized, up: Quantized, input_bits: int) -> Tiles:
    """Put SwiGLU's two matrices into common tiles, with 8 bits if one of them has 8."""
    pair = (gate.groups, up.groups)
    if gate.groups.bits != up.groups.bits:
        pair = (gate.groups.eight_bits(), up.groups.eight_bits())
    first, second = map(_tensors, pair)
    data = tiled_codes(*(interleaved(*each) for each in zip(first, second, strict=True)))
    bias = None if gate.bias is None or up.bias is None else interleaved(gate.bias, up.bias)
    return Tiles(data, pair[0].bits, gate.groups.shape[0], gate.dtype, bias, gated=True, input_bits=input_bits)


def _tensors(groups: Groups) -> tuple[Tensor, Tensor, Tensor]:
    return torch.tensor(groups.codes), torch.tensor(groups.scales), torch.tensor(groups.minimums)


def _has_matrix_units() -> bool:
    """Say whether oneDNN's products run on matrix units, which are faster than vectors."""
    return torch.cpu._is_amx_tile_supported()
