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
from pdserve.model.design import Activation
from pdserve.model.groups import Groups
from pdserve.model.ops import (
    Dense,
    GateUp,
    Linear,
    Matrix,
    MlpActivation,
    Norm,
    Quantized,
    RmsNorm,
    TorchOps,
    joined,
    packs,
    times,
)

logger = logging.getLogger(__name__)


class NotCompiledError(Exception):
    """The library has no such operation."""


class CompiledOps:
    """The compiled operations, with weights in tiles. A token's results depend on that token alone.

    NotCompiledError if the library does not have one.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def embed(self, token_ids: Tensor, weight: Linear, scale: float = 1.0) -> Tensor:
        assert isinstance(weight, Tiles)
        _require_compiled(scale == 1.0)
        return look_up(self._calls, token_ids, weight)

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        if not isinstance(norm, RmsNorm):
            raise NotCompiledError
        return rms_norm(self._calls, x, norm.weight, norm.eps)

    def norm_(self, x: Tensor, norm: RmsNorm) -> None:
        raise NotCompiledError

    def norm_add(self, x: Tensor, norm: RmsNorm, residual: Tensor) -> Tensor:
        raise NotCompiledError

    def linear(self, x: Tensor, weight: Linear) -> Tensor:
        assert isinstance(weight, Tiles)
        return multiply(self._calls, x, weight)

    def logits(self, x: Tensor, weight: Linear, scale: float = 1.0) -> Tensor:
        assert isinstance(weight, Tiles)
        _require_compiled(scale == 1.0)
        return multiply(self._calls, x, weight, out_dtype=torch.float32 if weight.bias is None else weight.dtype)

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        raise NotCompiledError

    def linear_add(self, x: Tensor, weight: Linear, residual: Tensor, scale: float = 1.0) -> Tensor:
        assert isinstance(weight, Tiles)
        _require_compiled(scale == 1.0)
        return multiply(self._calls, x, weight, residual)

    def gated(self, x: Tensor, weight: Linear | GateUp, activation: Activation) -> Tensor:
        assert isinstance(weight, Tiles)
        _require_compiled(weight.gated and activation is Activation.SILU)
        return multiply(self._calls, x, weight)

    def activated(self, x: Tensor, weight: Linear, activation: MlpActivation) -> Tensor:
        raise NotCompiledError


def _require_compiled(is_compiled: bool) -> None:
    if not is_compiled:
        raise NotCompiledError


class CpuOps(TorchOps):
    """The operations of a CPU: compiled for weights in tiles, in plain torch for others."""

    def __init__(self, loaded: ctypes.CDLL, input_bits: int = INPUT_BITS) -> None:
        """Set up for one model. input_bits: of the inputs of its quantized products, 8 or 16."""
        self._input_bits = input_bits
        self._compiled = CompiledOps(Immediate(loaded))
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

    def held_gate_up(self, gate: Matrix, up: Matrix, activation: Activation) -> Linear | GateUp:
        if isinstance(gate, Quantized) and isinstance(up, Quantized):
            if activation is not Activation.SILU:
                return self.held(joined(gate, up))
            return _quantized_gate_up(gate, up, self._input_bits)
        if isinstance(gate, Dense) and isinstance(up, Dense) and self._fits(gate):
            if activation is not Activation.SILU:
                return self.held(joined(gate, up))
            bias = None if gate.bias is None or up.bias is None else (gate.bias, up.bias)
            return tiled_gate_up(gate.data, up.data, bias)
        return super().held_gate_up(gate, up, activation)

    def held_embedding(self, weight: Matrix, *, tied: bool) -> tuple[Linear, Linear | None]:
        if isinstance(weight, Quantized) or self._fits(weight):
            held = self.held(weight)
            return held, held if tied else None
        return super().held_embedding(weight, tied=tied)

    def embed(self, token_ids: Tensor, weight: Linear, scale: float = 1.0) -> Tensor:
        if isinstance(weight, Tiles):
            return times(self._compiled.embed(token_ids, weight), scale)
        return super().embed(token_ids, weight, scale)

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        if isinstance(norm, RmsNorm) and x.dtype in DTYPES:
            return self._compiled.norm(x, norm)
        return super().norm(x, norm)

    def linear(self, x: Tensor, weight: Linear) -> Tensor:
        return self._compiled.linear(x, weight) if isinstance(weight, Tiles) else super().linear(x, weight)

    def logits(self, x: Tensor, weight: Linear, scale: float = 1.0) -> Tensor:
        if isinstance(weight, Tiles):
            return times(self._compiled.logits(x, weight), scale)
        return super().logits(x, weight, scale)

    def linear_add(self, x: Tensor, weight: Linear, residual: Tensor, scale: float = 1.0) -> Tensor:
        if isinstance(weight, Tiles) and scale == 1.0:
            return self._compiled.linear_add(x, weight, residual)
        return super().linear_add(x, weight, residual, scale)

    def gated(self, x: Tensor, weight: Linear | GateUp, activation: Activation) -> Tensor:
        if isinstance(weight, Tiles) and weight.gated:
            return self._compiled.gated(x, weight, activation)
        return super().gated(x, weight, activation)

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
