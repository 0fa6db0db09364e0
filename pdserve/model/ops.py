"""What a model computes with: weights as typed values, and the operations of a device.

The type of a weight decides which product a linear takes, so a model's file names neither devices nor precisions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from pdserve.errors import ConfigError
from pdserve.kernels.cpu.build import Missing
from pdserve.kernels.cpu.layers import INPUT_BITS, Tiles
from pdserve.kernels.cpu.library import library
from pdserve.model.groups import Groups, joined_groups


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

    groups: Groups
    dtype: torch.dtype  # of inputs and results
    bias: Tensor | None = None

    def dense(self) -> Dense:
        return Dense(torch.from_numpy(self.groups.values()).to(self.dtype), self.bias)


Matrix = Dense | Quantized  # as it is loaded
Linear = Matrix | Packed | Tiles


@dataclass(frozen=True, slots=True)
class GateUp:
    """SwiGLU's two matrices, for a device that multiplies them one after the other."""

    gate: Packed
    up: Packed


@dataclass(frozen=True, slots=True)
class QkNorm:
    """Weights of the norms over each head of q and of k, before they are rotated."""

    q: Tensor
    k: Tensor


class Ops(Protocol):
    """The operations of one device. x: [num_tokens, features]."""

    def embed(self, token_ids: Tensor, weight: Linear) -> Tensor:
        """Return rows of an embedding: token_ids int64 [num_tokens] -> [num_tokens, hidden_size]."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return x / rms(x) * weight over the last axis, with the mean of squares in float32."""
        ...

    def linear(self, x: Tensor, weight: Linear) -> Tensor: ...

    def logits(self, x: Tensor, weight: Linear) -> Tensor:
        """Return linear(x), in float32 where that costs nothing: bfloat16 would make near logits equal."""
        ...

    def linear_add(self, x: Tensor, weight: Linear, residual: Tensor) -> Tensor:
        """Return linear(x) + residual, which may be overwritten."""
        ...

    def swiglu(self, x: Tensor, weight: Linear | GateUp) -> Tensor:
        """Return silu(gate(x)) * up(x)."""
        ...


class DeviceOps(Ops, Protocol):
    """A device's operations, and the types in which it holds weights."""

    def held(self, weight: Matrix) -> Linear:
        """Return a loaded weight as the type that this device multiplies."""
        ...

    def held_gate_up(self, gate: Matrix, up: Matrix) -> Linear | GateUp:
        """Return SwiGLU's matrices as this device multiplies them: joined into one, or apart."""
        ...

    def held_embedding(self, weight: Matrix, *, tied: bool) -> tuple[Linear, Linear | None]:
        """Return the embedding as a table to look rows up in, and the head if it is tied to the embedding."""
        ...


class Attention(Protocol):
    """One step's attention, already planned."""

    def run(self, layer: int, qkv: Tensor, qk_norm: QkNorm | None) -> Tensor:
        """Norm and rotate q and k, put K and V into the step's pages, attend over each sequence's pages.

        qkv: [num_tokens, num_heads + 2 * num_kv_heads, head_dim], the heads of q, then k, then v; may be overwritten.
        Returns [num_tokens, num_heads * head_dim].
        """
        ...


def ops_for(device: torch.device, eps: float, input_bits: int = INPUT_BITS) -> DeviceOps:
    """Return the operations of a device.

    eps: of every norm. input_bits: of the inputs of quantized products on a CPU, 8 or 16.
    """
    if device.type == "cuda":
        from pdserve.model.ops_cuda import CudaOps  # noqa: PLC0415 - a worker on a CPU starts without Triton

        return CudaOps(eps)
    loaded = library()
    if isinstance(loaded, Missing):
        return TorchOps(eps)
    from pdserve.model.ops_cpu import CpuOps  # noqa: PLC0415 - it builds on the operations in plain torch

    return CpuOps(eps, loaded, input_bits)


def dense(weight: Linear) -> Dense:
    """Return a weight in the model's dtype; ConfigError for a type that this device has no product of."""
    if not isinstance(weight, Dense):
        raise ConfigError(f"weights: no product of {type(weight).__name__} weights on this device")
    return weight


class TorchOps:
    """The operations in plain torch, and in oneDNN's fused products where the CPU has matrix units for bfloat16."""

    def __init__(self, eps: float) -> None:
        self._eps = torch.full((1, 1), eps, dtype=torch.float32)

    def held(self, weight: Matrix) -> Linear:
        matrix = decoded(weight)
        return _packed(matrix) if packs(matrix.data) else matrix

    def held_gate_up(self, gate: Matrix, up: Matrix) -> Linear | GateUp:
        first, second = decoded(gate), decoded(up)
        if packs(first.data):
            return GateUp(_packed(first), _packed(second))
        return joined(first, second)

    def held_embedding(self, weight: Matrix, *, tied: bool) -> tuple[Linear, Linear | None]:
        matrix = decoded(weight)
        return matrix, self.held(matrix) if tied else None

    def embed(self, token_ids: Tensor, weight: Linear) -> Tensor:
        return functional.embedding(token_ids, dense(weight).data)

    def rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        norm = torch.linalg.vector_norm(wide, 2, -1, keepdim=True)
        scale = torch.addcmul(self._eps, norm, norm, value=1.0 / len(weight)).rsqrt_()
        return (wide * scale).to(x.dtype).mul_(weight)

    def linear(self, x: Tensor, weight: Linear) -> Tensor:
        if isinstance(weight, Packed):
            return _unary(x, weight.data, weight.bias, "none", [], "")
        matrix = dense(weight)
        return functional.linear(x, matrix.data, matrix.bias)

    def logits(self, x: Tensor, weight: Linear) -> Tensor:
        return self.linear(x, weight)

    def linear_add(self, x: Tensor, weight: Linear, residual: Tensor) -> Tensor:
        if isinstance(weight, Packed):
            return _binary(x, residual, weight.data, weight.bias, "add")
        return self.linear(x, weight).add_(residual)

    def swiglu(self, x: Tensor, weight: Linear | GateUp) -> Tensor:
        if isinstance(weight, GateUp):
            gated = _unary(x, weight.gate.data, weight.gate.bias, "swish", [], "")
            return _binary(x, gated, weight.up.data, weight.up.bias, "mul")
        gate, up = self.linear(x, weight).chunk(2, -1)
        return functional.silu(gate).mul_(up)


def decoded(weight: Matrix) -> Dense:
    return weight.dense() if isinstance(weight, Quantized) else weight


def joined(*weights: Matrix) -> Matrix:
    """Return one matrix with the outputs of all side by side: quantized if all are."""
    if len(weights) == 1:
        return weights[0]
    biases = [weight.bias for weight in weights if weight.bias is not None]
    bias = torch.cat(biases) if biases else None
    groups = [weight.groups for weight in weights if isinstance(weight, Quantized)]
    if len(groups) == len(weights):
        (first,) = {weight.dtype for weight in weights if isinstance(weight, Quantized)}
        return Quantized(joined_groups(*groups), first, bias)
    return Dense(torch.cat([decoded(weight).data for weight in weights]), bias)


# These apply the operation that follows a product to its float32 sums, before rounding.
_unary: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default
_binary: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.binary


def _packed(matrix: Dense) -> Packed:
    return Packed(torch.ops.mkldnn._reorder_linear_weight(matrix.data.contiguous()), matrix.bias)


def packs(data: Tensor) -> bool:
    """Say whether this machine multiplies packed weights of the matrix's dtype."""
    if data.device.type != "cpu" or data.dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
