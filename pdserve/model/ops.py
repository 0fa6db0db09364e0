"""What a model computes with: weights as typed values, and the operations of a device.

The type of a weight decides which product a linear takes, so a model's file names neither devices nor precisions.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from pdserve.base.errors import ConfigError
from pdserve.kernels.code_blocks import CodeBlocks
from pdserve.kernels.cpu.experts import SharedRows, TiledExperts
from pdserve.kernels.cpu.layers import Tiles
from pdserve.kernels.routing import Routing
from pdserve.model import onednn
from pdserve.model.activations import MlpActivation, activate, bent_times, capped, swiglu_oai
from pdserve.model.design import Activation
from pdserve.model.elementwise import Elementwise, TorchElementwise, times
from pdserve.model.fp8 import Coded, joined_coded
from pdserve.model.heads import HeadDense, HeadLinear, multiply_heads
from pdserve.model.parallel import RowParallel, VocabParallel


@dataclass(frozen=True, slots=True)
class Dense:
    """A matrix in the dtype that the model computes in."""

    data: Tensor  # [out_features, in_features]
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Packed:
    """A bfloat16 matrix in the tile order of oneDNN's matrix units, so that no call repacks it."""

    data: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Quantized:
    """A matrix as its checkpoint codes it."""

    coded: Coded
    dtype: torch.dtype  # of inputs and results
    bias: Tensor | None = None
    device: torch.device | None = None  # of inputs and results: codes lie on the host; None: there, too

    def dense(self) -> Dense:
        return Dense(torch.from_numpy(self.coded.values()).to(device=self.device, dtype=self.dtype), self.bias)


Matrix = Dense | Quantized  # as it is loaded
Linear = Matrix | Packed | Tiles | CodeBlocks | RowParallel | VocabParallel


@dataclass(frozen=True, slots=True)
class GateUp:
    """The two matrices of a gated unit, for a device that multiplies them one after the other."""

    gate: Packed
    up: Packed


Held = Linear | GateUp | HeadLinear  # all that is multiplied


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """x / rms(x) * weight."""

    weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """(x - mean(x)) / std(x) * weight + bias."""

    weight: Tensor
    bias: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """Experts in two matrices each, stacked, for a device that multiplies all of them in one launch."""

    router: Dense  # [num_experts, hidden_size]
    routing: Routing
    ranks_bias: Tensor | None  # see `Routing`
    gate_up: Dense | CodeBlocks  # [num_experts, 2 * inner_size, hidden_size]; its bias: [num_experts, 2 * inner_size]
    activation: Activation
    down: Dense | CodeBlocks  # [num_experts, hidden_size, inner_size]; of codes, experts' outputs follow each other
    is_gated: bool = True  # else `gate_up` has ups alone
    shares: Tensor | None = None  # float32 [num_experts]: see `Routing`

    @property
    def inputs(self) -> int:
        return self.gate_up.inputs if isinstance(self.gate_up, CodeBlocks) else self.gate_up.data.shape[-1]


Norm = RmsNorm | LayerNorm


Mixture = TiledExperts | ExpertStack


class Ops(Elementwise, Protocol):
    """The operations of one device. x: [num_tokens, features]."""

    def embed(self, token_ids: Tensor, weight: Linear, scale: float = 1.0) -> Tensor:
        """Return rows of an embedding times `scale`: token_ids int64 [num_tokens] -> [num_tokens, hidden_size]."""
        ...

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        """Normalize over the last axis, with means in float32."""
        ...

    def norm_(self, x: Tensor, norm: RmsNorm) -> None:
        """Normalize in place; x may be some columns of a wider matrix."""
        ...

    def norm_add(self, x: Tensor, norm: RmsNorm, residual: Tensor) -> Tensor:
        """Return norm(x) + residual, which may be overwritten."""
        ...

    def linear(self, x: Tensor, weight: Linear) -> Tensor: ...

    def linear_into(self, out: Tensor, x: Tensor, weight: Linear) -> None:
        """Write linear(x) into some columns of a wider matrix."""
        ...

    def linear_heads(self, x: Tensor, weight: HeadLinear, num_more: int = 0) -> Tensor:
        """Multiply the first features of each head: [num_tokens, num_heads, features] -> [num_tokens, heads * width].

        The result has room for `num_more` heads behind, which are not written.
        """
        ...

    def logits(self, x: Tensor, weight: Linear, scale: float = 1.0, cap: float | None = None) -> Tensor:
        """Return linear(x) * scale, and of that cap * tanh(it / cap) where there is a soft cap.

        In float32 where that costs nothing: bfloat16 would make near logits equal.
        """
        ...

    def linear_add(self, x: Tensor, weight: Linear, residual: Tensor, scale: float = 1.0) -> Tensor:
        """Return linear(x) * scale + residual, which may be overwritten."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum over all ranks of what each has made; x may be overwritten."""
        ...

    def mix(
        self, x: Tensor, experts: Mixture, shared: SharedRows | None, residual: Tensor | None, scale: float
    ) -> Tensor:
        """Return residual + scale * what the chosen experts and the shared one make; see `kernels.cpu.experts.mix`.

        x: what the router takes, and behind it what experts take where that is something else.
        """
        ...

    def gated(self, x: Tensor, weight: Linear | GateUp, activation: Activation) -> Tensor:
        """Return activation(gate(x)) * up(x)."""
        ...

    def activated(self, x: Tensor, weight: Linear, activation: MlpActivation) -> Tensor:
        """Return activation(linear(x))."""
        ...


class DeviceOps(Ops, Protocol):
    """A device's operations, and the types in which it holds weights."""

    @property
    def stacks_experts(self) -> bool:
        """Say whether experts are held as an `ExpertStack`."""
        ...

    def held(self, weight: Matrix) -> Linear:
        """Return a loaded weight as the type that this device multiplies."""
        ...

    def held_gate_up(self, gate: Matrix, up: Matrix) -> Linear | GateUp:
        """Return the matrices of a gated unit as this device multiplies them: joined into one, or apart."""
        ...

    def held_heads(self, weight: Tensor) -> HeadLinear:
        """Return a matrix of each head, [num_heads, width, inputs], as the type that this device multiplies."""
        ...

    def held_embedding(self, weight: Matrix, *, tied: bool) -> tuple[Linear, Linear | None]:
        """Return the embedding as a table to look rows up in, and the head if it is tied to the embedding."""
        ...


def dense(weight: Linear) -> Dense:
    """Return a weight in the model's dtype; ConfigError for a type that this device has no product of."""
    if not isinstance(weight, Dense):
        raise ConfigError(f"weights: no product of {type(weight).__name__} weights on this device")
    return weight


class TorchOps(TorchElementwise):
    """The operations in plain torch, and in oneDNN's fused products where the CPU has matrix units for bfloat16."""

    stacks_experts = False

    def held(self, weight: Matrix) -> Linear:
        matrix = decoded(weight)
        return _packed(matrix) if onednn.packs(matrix.data) else matrix

    def held_gate_up(self, gate: Matrix, up: Matrix) -> Linear | GateUp:
        first, second = decoded(gate), decoded(up)
        if onednn.packs(first.data):
            return GateUp(_packed(first), _packed(second))
        return joined(first, second)

    def held_heads(self, weight: Tensor) -> HeadLinear:
        return HeadDense(weight)

    def held_embedding(self, weight: Matrix, *, tied: bool) -> tuple[Linear, Linear | None]:
        matrix = decoded(weight)
        return matrix, self.held(matrix) if tied else None

    def embed(self, token_ids: Tensor, weight: Linear, scale: float = 1.0) -> Tensor:
        return times(functional.embedding(token_ids, dense(weight).data), scale)

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        match norm:
            case RmsNorm(weight, eps):
                wide = x.float()
                length = torch.linalg.vector_norm(wide, 2, -1, keepdim=True)
                scale = length.square_().mul_(1.0 / len(weight)).add_(eps).rsqrt_()
                normed: Tensor = (wide * scale).to(x.dtype).mul_(weight)
                return normed
            case LayerNorm(weight, bias, eps):
                return functional.layer_norm(x, weight.shape, weight, bias, eps)

    def norm_(self, x: Tensor, norm: RmsNorm) -> None:
        x.copy_(self.norm(x, norm))

    def norm_add(self, x: Tensor, norm: RmsNorm, residual: Tensor) -> Tensor:
        return residual.add_(self.norm(x, norm))

    def linear(self, x: Tensor, weight: Linear) -> Tensor:
        if isinstance(weight, Packed):
            return onednn.unary(x, weight.data, weight.bias, "none", [], "")
        matrix = dense(weight)
        return functional.linear(x, matrix.data, matrix.bias)

    def linear_into(self, out: Tensor, x: Tensor, weight: Linear) -> None:
        out.copy_(self.linear(x, weight))

    def linear_heads(self, x: Tensor, weight: HeadLinear, num_more: int = 0) -> Tensor:
        return multiply_heads(x, weight, num_more)

    def logits(self, x: Tensor, weight: Linear, scale: float = 1.0, cap: float | None = None) -> Tensor:
        return capped(times(self.linear(x, weight), scale), cap)

    def linear_add(self, x: Tensor, weight: Linear, residual: Tensor, scale: float = 1.0) -> Tensor:
        if isinstance(weight, Packed) and scale == 1.0:
            return onednn.binary(x, residual, weight.data, weight.bias, "add")
        return times(self.linear(x, weight), scale).add_(residual)

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def mix(
        self, x: Tensor, experts: Mixture, shared: SharedRows | None, residual: Tensor | None, scale: float
    ) -> Tensor:
        raise TypeError("torch multiplies experts one by one")

    def gated(self, x: Tensor, weight: Linear | GateUp, activation: Activation) -> Tensor:
        if isinstance(weight, GateUp):
            is_silu = activation is Activation.SILU  # which is fused with the product
            gate = onednn.unary(x, weight.gate.data, weight.gate.bias, "swish" if is_silu else "none", [], "")
            if activation is Activation.SWIGLU_OAI:
                return swiglu_oai(gate, self.linear(x, weight.up))
            gate = gate if is_silu else activate(gate, activation)
            return onednn.binary(x, gate, weight.up.data, weight.up.bias, "mul")
        gate, up = self.linear(x, weight).chunk(2, -1)
        return bent_times(gate, up, activation)

    def activated(self, x: Tensor, weight: Linear, activation: MlpActivation) -> Tensor:
        return activate(self.linear(x, weight), activation)


def weight_bytes(weight: Held) -> int:
    """Return the bytes of a matrix, its bias aside."""
    match weight:
        case GateUp(gate, up):
            return weight_bytes(gate) + weight_bytes(up)
        case Quantized(coded=of) | (CodeBlocks() as of):
            return of.nbytes
        case RowParallel(held) | VocabParallel(held):
            return weight_bytes(held)
        case _:
            return weight.data.numel() * weight.data.element_size()


def rounds_inputs(weight: Held) -> bool:
    """Say whether products round the inputs of a matrix to 8 bits."""
    match weight:
        case Tiles():
            return weight.codes_inputs and weight.input_bits == 8
        case CodeBlocks():
            return weight.rounded
        case RowParallel(held) | VocabParallel(held):
            return rounds_inputs(held)
        case _:
            return False


def decoded(weight: Matrix) -> Dense:
    return weight.dense() if isinstance(weight, Quantized) else weight


def rows_of(weight: Matrix, rows: slice | Tensor) -> Matrix:
    """Return the matrix of some outputs, in their order."""
    bias = None if weight.bias is None else weight.bias[rows].contiguous()
    if isinstance(weight, Quantized):
        return replace(
            weight, coded=weight.coded.of_outputs(rows if isinstance(rows, slice) else rows.numpy()), bias=bias
        )
    return Dense(weight.data[rows].contiguous(), bias)


def joined(*weights: Matrix) -> Matrix:
    """Return one matrix with the outputs of all side by side: quantized if all are, in one form."""
    if len(weights) == 1:
        return weights[0]
    biases = [weight.bias for weight in weights if weight.bias is not None]
    bias = torch.cat(biases) if biases else None
    coded = [weight.coded for weight in weights if isinstance(weight, Quantized)]
    whole = joined_coded(*coded) if len(coded) == len(weights) else None
    if whole is not None and isinstance(weights[0], Quantized):
        return replace(weights[0], coded=whole, bias=bias)
    return Dense(torch.cat([decoded(weight).data for weight in weights]), bias)


def _packed(matrix: Dense) -> Packed:
    return Packed(onednn.packed(matrix.data), matrix.bias)
