"""Experts that a checkpoint holds in a few tensors, all of a layer in each, as matrices of their own. Free of torch."""

from functools import partial
from typing import TYPE_CHECKING, cast

from pdserve.base.errors import ConfigError
from pdserve.model.config import ModelConfig
from pdserve.model.design import Experts, Stacked
from pdserve.model.weights import Part, Stored, Weights

if TYPE_CHECKING:
    import torch

CODES, SCALES = "_blocks", "_scales"  # of MXFP4, after a tensor's name
BLOCK = 32  # inputs that share a scale


def apart(weights: Weights, config: ModelConfig) -> Weights:
    """Return a checkpoint's tensors with stacked experts as one matrix each, by the names that models take.

    ConfigError names a tensor that is missing or of another shape.
    """
    left = dict(weights)
    for index, layer in enumerate(config.design.layers):
        of = layer.mlp
        if isinstance(of, Experts) and of.stacked is not None:
            left |= _matrices(f"model.layers.{index}.{of.block}.", of, of.stacked, config.hidden_size, left)
    return left


def _matrices(prefix: str, of: Experts, stacked: Stacked, hidden: int, left: dict[str, Stored]) -> dict[str, Stored]:
    """Return the matrices and biases of a layer's experts; their tensors are taken away from those that are left."""
    inner, (gate, up, down) = of.expert.inner_size, of.expert.names
    gates, ups = slice(0, inner), slice(inner, 2 * inner)
    if stacked.alternating:
        gates, ups = slice(0, 2 * inner, 2), slice(1, 2 * inner, 2)
    made = dict[str, Stored]()
    for name, outputs, inputs, parts in (
        (stacked.gate_up, 2 * inner, hidden, {gate: gates, up: ups}),
        (stacked.down, hidden, inner, {down: slice(0, hidden)}),
    ):
        coded = f"{prefix}{name}{CODES}" in left  # then outputs come first
        inputs_first = stacked.inputs_first and not coded
        shape = (inputs, outputs) if inputs_first else (outputs, inputs)
        whole = (_decoding if coded else _taken)(left, f"{prefix}{name}", (of.num_experts, *shape))
        biases = _taken(left, f"{prefix}{name}_bias", (of.num_experts, outputs)) if of.expert.bias else None
        for expert in range(of.num_experts):
            for each, rows in parts.items():
                own = f"{prefix}experts.{expert}.{each}"
                count = len(range(outputs)[rows])
                read = partial(_read, whole, expert, rows, inputs_first)
                made[f"{own}.weight"] = Stored((count, inputs), read)
                if biases is not None:
                    made[f"{own}.bias"] = Stored((count,), partial(_read, biases, expert, rows, False))
    return made


def _taken(left: dict[str, Stored], name: str, shape: tuple[int, ...]) -> Stored:
    if name not in left:
        raise ConfigError(f"{name}: missing from the weights")
    stored = left.pop(name)
    if stored.shape != shape:
        raise ConfigError(f"{name}: shape {stored.shape}, the config asks for {shape}")
    return stored


def _decoding(left: dict[str, Stored], name: str, shape: tuple[int, ...]) -> Stored:
    """Return a stack in MXFP4; one expert is decoded at a time."""
    *outer, inputs = shape
    if inputs % BLOCK:
        raise ConfigError(f"{name}{CODES}: {inputs} inputs are not whole blocks of {BLOCK}")
    codes = _taken(left, f"{name}{CODES}", (*outer, inputs // BLOCK, BLOCK // 2))
    scales = _taken(left, f"{name}{SCALES}", (*outer, inputs // BLOCK))

    def read(part: Part) -> "torch.Tensor":
        from pdserve.model.mxfp4 import decoded  # noqa: PLC0415 - imports torch

        try:
            return decoded(*(cast("torch.Tensor", stored.read(part)) for stored in (codes, scales)))
        except ValueError as error:
            raise ConfigError(f"{name}{SCALES}: {error}") from error

    return Stored(shape, read)


def _read(whole: Stored, expert: int, rows: slice, inputs_first: bool, part: Part) -> "torch.Tensor":
    """Return a part of some outputs of one expert; no other expert is read."""
    own = cast("torch.Tensor", whole.read((slice(expert, expert + 1),)))[0]
    return (own.T if inputs_first else own)[rows][part]
