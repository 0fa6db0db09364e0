"""The operations on a CPU with compiled kernels, and plain torch for the rest."""

import ctypes
import logging

import torch
from torch import Tensor

from pdserve.kernels.cpu.calls import Calls, Immediate
from pdserve.kernels.cpu.experts import SharedRows, TiledExperts, mix
from pdserve.kernels.cpu.layers import (
    INPUT_BITS,
    MAX_INPUTS,
    Activation,
    Finish,
    HeadTiles,
    Tiles,
    has_matrix_unit,
    interleaved,
    layer_norm,
    look_up,
    multiplies_bfloat16,
    multiplies_bytes,
    multiply,
    multiply_heads,
    rms_norm,
    rms_norm_,
    tiled,
    tiled_codes,
    tiled_fp8,
    tiled_gate_up,
)
from pdserve.kernels.cpu.library import DTYPES
from pdserve.kernels.cpu.states import multiply_rows, scale
from pdserve.model import design
from pdserve.model.activations import MlpActivation, XIelu, xielu_scalars
from pdserve.model.elementwise import TorchElementwise, is_one
from pdserve.model.fp8 import Coded, Fp8
from pdserve.model.groups import Groups, alike
from pdserve.model.heads import HeadDense, HeadLinear
from pdserve.model.onednn import packs
from pdserve.model.ops import Dense, GateUp, LayerNorm, Linear, Matrix, Mixture, Norm, Ops, Quantized, RmsNorm, TorchOps

logger = logging.getLogger(__name__)


class CompiledOps:
    """The compiled operations, with weights in tiles. A token's results depend on that token alone."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def embed(self, token_ids: Tensor, weight: Linear, scale: float = 1.0) -> Tensor:
        assert isinstance(weight, Tiles)
        return look_up(self._calls, token_ids.long(), weight, scale)

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        match norm:
            case RmsNorm(weight, eps):
                return rms_norm(self._calls, x, weight, eps)
            case LayerNorm(weight, bias, eps):
                return layer_norm(self._calls, x, weight, bias, eps)

    def norm_(self, x: Tensor, norm: RmsNorm) -> None:
        rms_norm_(self._calls, x, norm.weight, norm.eps)

    def norm_add(self, x: Tensor, norm: RmsNorm, residual: Tensor) -> Tensor:
        return rms_norm(self._calls, x, norm.weight, norm.eps, residual)

    def linear(self, x: Tensor, weight: Linear) -> Tensor:
        assert isinstance(weight, Tiles)
        return multiply(self._calls, x, weight)

    def linear_into(self, out: Tensor, x: Tensor, weight: Linear) -> None:
        assert isinstance(weight, Tiles)
        multiply(self._calls, x, weight, out=out)

    def linear_heads(self, x: Tensor, weight: HeadLinear, num_more: int = 0) -> Tensor:
        assert isinstance(weight, HeadTiles)
        return multiply_heads(self._calls, x, weight, num_more)

    def logits(self, x: Tensor, weight: Linear, scale: float = 1.0, cap: float | None = None) -> Tensor:
        assert isinstance(weight, Tiles)
        out = self._calls.empty(len(x), weight.width, torch.float32 if weight.bias is None else weight.dtype)
        return multiply(self._calls, x, weight, None, out, Finish(scale=scale, cap=cap))

    def linear_add(self, x: Tensor, weight: Linear, residual: Tensor, scale: float = 1.0) -> Tensor:
        assert isinstance(weight, Tiles)
        return multiply(self._calls, x, weight, residual, finish=Finish(scale=scale))

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def mix(
        self, x: Tensor, experts: Mixture, shared: SharedRows | None, residual: Tensor | None, scale: float
    ) -> Tensor:
        assert isinstance(experts, TiledExperts)
        return mix(self._calls, x, experts, shared, residual, scale)

    def gated(self, x: Tensor, weight: Linear | GateUp, activation: design.Activation) -> Tensor:
        assert isinstance(weight, Tiles)
        assert weight.gated
        return multiply(self._calls, x, weight, finish=_activating(activation))

    def activated(self, x: Tensor, weight: Linear, activation: MlpActivation) -> Tensor:
        assert isinstance(weight, Tiles)
        return multiply(self._calls, x, weight, finish=_activating(activation))

    def scaled(self, x: Tensor, factor: float | Tensor) -> Tensor:
        return x if is_one(factor) else scale(self._calls, x, factor)

    def sigmoid_gated(self, x: Tensor, gates: Tensor) -> Tensor:
        return scale(self._calls, x, 1.0, x, gates)

    def multiplied(self, x: Tensor, factors: Tensor) -> Tensor:
        return multiply_rows(self._calls, x, factors)

    def side_by_side(self, *parts: Tensor) -> Tensor:
        widths = [part.shape[1] for part in parts]
        out = self._calls.empty(len(parts[0]), sum(widths), parts[0].dtype)
        for part, place in zip(parts, out.split(widths, 1), strict=True):
            scale(self._calls, part, 1.0, place)
        return out


def _activating(activation: MlpActivation) -> Finish:
    if isinstance(activation, XIelu):
        positive, negative = xielu_scalars(activation)
        return Finish(Activation.XIELU, (float(positive), float(negative)))
    return Finish(Activation[activation.name])


class CpuOps(TorchElementwise):
    """The operations of a CPU: compiled for weights in tiles, in plain torch for others."""

    stacks_experts = False

    def __init__(self, loaded: ctypes.CDLL, input_bits: int = INPUT_BITS) -> None:
        """Set up for one model. input_bits: of the inputs of its quantized products, 8 or 16."""
        self._input_bits = input_bits
        self._compiled, self._torch = CompiledOps(Immediate(loaded)), TorchOps()
        self._multiplies_bytes = multiplies_bytes(loaded)
        # A compiler may not know matrix units that torch knows.
        self._multiplies_bfloat16 = has_matrix_unit(loaded) or (multiplies_bfloat16(loaded) and not _has_matrix_units())
        self._noted = False  # whether slow products were logged

    def held(self, weight: Matrix) -> Linear:
        weight = _taken(weight)
        self._note_slow_products(weight)
        if isinstance(weight, Quantized):
            return _quantized_tiles(weight.coded, _tensors(weight.coded), weight, weight.bias, self._input_bits)
        return tiled(weight.data, weight.bias) if self._fits(weight.data) else self._torch.held(weight)

    def held_gate_up(self, gate: Matrix, up: Matrix) -> Linear | GateUp:
        gate, up = _taken(gate), _taken(up)
        if isinstance(gate, Quantized) and isinstance(up, Quantized) and type(gate.coded) is type(up.coded):
            return _quantized_gate_up(gate, up, self._input_bits)
        if isinstance(gate, Dense) and isinstance(up, Dense) and self._fits(gate.data):
            bias = None if gate.bias is None or up.bias is None else (gate.bias, up.bias)
            return tiled_gate_up(gate.data, up.data, bias)
        return self._torch.held_gate_up(gate, up)

    def held_heads(self, weight: Tensor) -> HeadLinear:
        return HeadTiles.of(weight) if self._fits(weight) else HeadDense(weight)

    def held_embedding(self, weight: Matrix, *, tied: bool) -> tuple[Linear, Linear | None]:
        if isinstance(weight, Quantized) and isinstance(weight.coded, Fp8):
            weight = weight.dense()  # since rows of FP8 are not looked up
        if isinstance(weight, Quantized) or self._fits(weight.data):
            held = self.held(weight)
            return held, held if tied else None
        return self._torch.held_embedding(weight, tied=tied)

    def embed(self, token_ids: Tensor, weight: Linear, scale: float = 1.0) -> Tensor:
        return self._with(weight).embed(token_ids, weight, scale)

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        return self._over(x).norm(x, norm)

    def norm_(self, x: Tensor, norm: RmsNorm) -> None:
        self._over(x).norm_(x, norm)

    def norm_add(self, x: Tensor, norm: RmsNorm, residual: Tensor) -> Tensor:
        return self._over(x).norm_add(x, norm, residual)

    def linear(self, x: Tensor, weight: Linear) -> Tensor:
        return self._with(weight).linear(x, weight)

    def linear_into(self, out: Tensor, x: Tensor, weight: Linear) -> None:
        self._with(weight).linear_into(out, x, weight)

    def linear_heads(self, x: Tensor, weight: HeadLinear, num_more: int = 0) -> Tensor:
        return self._with(weight).linear_heads(x, weight, num_more)

    def logits(self, x: Tensor, weight: Linear, scale: float = 1.0, cap: float | None = None) -> Tensor:
        return self._with(weight).logits(x, weight, scale, cap)

    def linear_add(self, x: Tensor, weight: Linear, residual: Tensor, scale: float = 1.0) -> Tensor:
        return self._with(weight).linear_add(x, weight, residual, scale)

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def mix(
        self, x: Tensor, experts: Mixture, shared: SharedRows | None, residual: Tensor | None, scale: float
    ) -> Tensor:
        return self._compiled.mix(x, experts, shared, residual, scale)

    def gated(self, x: Tensor, weight: Linear | GateUp, activation: design.Activation) -> Tensor:
        return self._with(weight).gated(x, weight, activation)

    def activated(self, x: Tensor, weight: Linear, activation: MlpActivation) -> Tensor:
        return self._with(weight).activated(x, weight, activation)

    def sigmoid_gated(self, x: Tensor, gates: Tensor) -> Tensor:
        return self._over(x).sigmoid_gated(x, gates)

    def multiplied(self, x: Tensor, factors: Tensor) -> Tensor:
        return self._over(x).multiplied(x, factors)

    def _with(self, weight: Linear | GateUp | HeadLinear) -> Ops:
        return self._compiled if isinstance(weight, Tiles | HeadTiles) else self._torch

    def _over(self, x: Tensor) -> Ops:
        return self._compiled if x.dtype in DTYPES else self._torch

    def _note_slow_products(self, weight: Matrix) -> None:
        if isinstance(weight, Quantized) and isinstance(weight.coded, Groups):
            there, kind, instructions = self._multiplies_bytes, "bytes", "AVX-512 VNNI"
        else:
            is_bfloat16 = isinstance(weight, Quantized) or weight.data.dtype == torch.bfloat16
            there = not is_bfloat16 or self._multiplies_bfloat16 or _has_matrix_units()
            kind, instructions = "bfloat16", "AVX-512 BF16"
        if not there and not self._noted:
            self._noted = True
            logger.warning(
                "this processor has no dot products of %s (%s, or Arm's): steps take longer", kind, instructions
            )

    def _fits(self, data: Tensor) -> bool:
        """Say whether a matrix is multiplied in tiles. Others take oneDNN's products if there are any."""
        inputs = data.shape[-1]
        fits = data.dtype == torch.bfloat16 and inputs % 2 == 0 and inputs <= MAX_INPUTS
        return fits and (self._multiplies_bfloat16 or not packs(data))


def _taken(weight: Matrix) -> Matrix:
    """Return a weight as it is, or decoded if products do not take its codes: FP8's inputs are bfloat16."""
    if not isinstance(weight, Quantized) or isinstance(weight.coded, Groups):
        return weight
    inputs = weight.coded.shape[1]
    fits = weight.dtype == torch.bfloat16 and inputs % 2 == 0 and inputs <= MAX_INPUTS
    return weight if fits else weight.dense()


def _quantized_gate_up(gate: Quantized, up: Quantized, input_bits: int) -> Tiles:
    """Put the two matrices of a gated unit, which are coded alike, into common tiles."""
    first, second = gate.coded, up.coded
    if isinstance(first, Groups) and isinstance(second, Groups):
        first, second = alike(first, second)
    parts = tuple(interleaved(*each) for each in zip(_tensors(first), _tensors(second), strict=True))
    bias = None if gate.bias is None or up.bias is None else interleaved(gate.bias, up.bias)
    return _quantized_tiles(first, parts, gate, bias, input_bits, gated=True)


def _quantized_tiles(
    coded: Coded, parts: tuple[Tensor, ...], of: Quantized, bias: Tensor | None, input_bits: int, *, gated: bool = False
) -> Tiles:
    """Put the parts of a coded matrix, or of two, into tiles."""
    given, width = (of.dtype, bias, gated, input_bits), coded.shape[0]
    match coded:
        case Groups():
            return Tiles(tiled_codes(*parts), coded.bits, width, *given, is_float=coded.fp4)
        case Fp8():
            return Tiles(tiled_fp8(*parts), 8, width, *given, is_float=True)


def _tensors(coded: Coded) -> tuple[Tensor, ...]:
    if isinstance(coded, Fp8):
        return torch.tensor(coded.codes), torch.tensor(coded.segment_scales())
    return torch.tensor(coded.codes), torch.tensor(coded.scales), torch.tensor(coded.minimums)


def _has_matrix_units() -> bool:
    """Say whether oneDNN's products run on matrix units, which are faster than vectors."""
    return torch.cpu._is_amx_tile_supported()
