"""Experts that a checkpoint holds in a few tensors, all of a layer in each, as matrices of their own. Free of torch."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, cast

from pdserve.base.errors import ConfigError
from pdserve.model.config import ModelConfig
from pdserve.model.design import BesideExperts, Experts, GatedMlp, Stacked
from pdserve.model.weights import GROUP, Codes, Part, Stored, Weights

if TYPE_CHECKING:
    import torch

    from pdserve.model.weights import Read

logger = logging.getLogger(__name__)

CODES, SCALES = "_blocks", "_scales"  # of MXFP4, after a tensor's name


def apart(weights: Weights, config: ModelConfig, *, keep_coded: bool = False) -> Weights:
    """Return a checkpoint's tensors with stacked experts as one matrix each, by the names that models take.

    keep_coded: those in MXFP4 as products take them. ConfigError names a tensor that is missing or of another shape.
    """
    left, layers = dict(weights), config.design.layers
    mlps = {f"model.layers.{index}.": layer.mlp for index, layer in enumerate(layers)}
    if config.design.guessing is not None:
        mlps[f"{config.design.guessing}layers.0."] = layers[-1].mlp
    for prefix, mlp in mlps.items():
        of = mlp.experts if isinstance(mlp, BesideExperts) else mlp
        if not isinstance(of, Experts) or of.stacked is None:
            continue
        assert isinstance(of.expert, GatedMlp), "others are not stacked"
        if _are_stacked(left, prefix, of, of.expert):
            stacks = _Stacks(left, of.within(prefix), of.num_experts, of.expert, keep_coded)
            left |= stacks.matrices(of.stacked, config.hidden_size)
    return left


def _are_stacked(weights: Weights, prefix: str, of: Experts, expert: GatedMlp) -> bool:
    """Say whether a layer of the file has no tensors of single experts. A module that guesses may not be there."""
    first = f"{of.within(prefix)}experts.0.{expert.names[0]}.weight"
    return first not in weights and any(name.startswith(prefix) for name in weights)


@dataclass(frozen=True, slots=True)
class _Stacks:
    """The stacks of one layer; they are taken away from the tensors that are left."""

    left: dict[str, Stored]
    prefix: str
    num_experts: int
    expert: GatedMlp
    keep_coded: bool

    def matrices(self, stacked: Stacked, hidden: int) -> dict[str, Stored]:
        """Return the matrices and biases of the layer's experts."""
        inner, (gate, up, down) = self.expert.inner_size, self.expert.names
        gates, ups = slice(0, inner), slice(inner, 2 * inner)
        if stacked.alternating:
            gates, ups = slice(0, 2 * inner, 2), slice(1, 2 * inner, 2)
        first = self._parted(stacked.gate_up, (2 * inner, hidden), {gate: gates, up: ups}, stacked)
        return first | self._parted(stacked.down, (hidden, inner), {down: slice(0, hidden)}, stacked)

    def _parted(
        self, name: str, shape: tuple[int, int], parts: Mapping[str, slice], stacked: Stacked
    ) -> dict[str, Stored]:
        """Return the matrices that a stack of `shape` (outputs and inputs) has for each expert, by rows of outputs."""
        outputs, inputs = shape
        read, codes = self._reading(f"{self.prefix}{name}", shape, stacked)
        biases = self._taken(f"{self.prefix}{name}_bias", (outputs,)) if self.expert.bias else None
        made = dict[str, Stored]()
        for expert in range(self.num_experts):
            for each, rows in parts.items():
                own = f"{self.prefix}experts.{expert}.{each}"
                count = len(range(outputs)[rows])
                made[f"{own}.weight"] = Stored(
                    (count, inputs), partial(read, expert, rows), codes.group if codes else 1, codes
                )
                if biases is not None:
                    made[f"{own}.bias"] = Stored((count,), partial(_read, biases, False, expert, rows))
        return made

    def _reading(
        self, name: str, shape: tuple[int, int], stacked: Stacked
    ) -> tuple[Callable[..., "Read"], Codes | None]:
        """Return what reads rows of one expert, and how these are coded; None: as floats."""
        outputs, inputs = shape
        if f"{name}{CODES}" not in self.left:
            whole = self._taken(name, (inputs, outputs) if stacked.inputs_first else shape)
            return partial(_read, whole, stacked.inputs_first), None
        if inputs % GROUP:
            raise ConfigError(f"{name}{CODES}: {inputs} inputs are not whole blocks of {GROUP}")
        codes = self._taken(f"{name}{CODES}", (outputs, inputs // GROUP, GROUP // 2))
        scales = self._taken(f"{name}{SCALES}", (outputs, inputs // GROUP))
        if not self.keep_coded:
            return partial(_decoded, (codes, scales), name), None
        return _Mxfp4((codes, scales), name).read, Codes(4, GROUP)

    def _taken(self, name: str, shape: tuple[int, ...]) -> Stored:
        """Take a stack of such matrices or rows, one for each expert."""
        if name not in self.left:
            raise ConfigError(f"{name}: missing from the weights")
        stored, whole = self.left.pop(name), (self.num_experts, *shape)
        if stored.shape != whole:
            raise ConfigError(f"{name}: shape {stored.shape}, the config asks for {whole}")
        return stored


def _read(whole: Stored, inputs_first: bool, expert: int, rows: slice, part: Part) -> "torch.Tensor":
    """Return a part of some outputs of one expert; no other expert is read."""
    own = cast("torch.Tensor", whole.read((slice(expert, expert + 1),)))[0]
    return (own.T if inputs_first else own)[rows][part]


class _Mxfp4:
    """A stack in MXFP4: products take all of it, or all of it is decoded, since experts lie together in one form."""

    def __init__(self, stacks: tuple[Stored, Stored], name: str) -> None:
        self._stacks, self._name = stacks, name

    def read(self, expert: int, rows: slice, part: Part) -> "Read":
        """Return a part of some outputs of one expert."""
        if not self._is_kept:
            return _decoded(self._stacks, self._name, expert, rows, part)
        from pdserve.model.mxfp4 import kept  # noqa: PLC0415 - imports torch

        of_blocks, inner = _in_blocks(part)
        groups = kept(*(_read(stored, False, expert, rows, of_blocks) for stored in self._stacks))
        assert groups is not None
        return groups.part(inner)

    @cached_property
    def _is_kept(self) -> bool:
        """Say whether products take the scales of all experts; codes are read of experts with a scale beyond them."""
        from pdserve.model.mxfp4 import kept, takes_scales  # noqa: PLC0415 - imports torch

        codes, scales = self._stacks
        for expert in range(scales.shape[0]):
            own = _read(scales, False, expert, slice(None), ())
            if not takes_scales(own) and kept(_read(codes, False, expert, slice(None), ()), own) is None:
                logger.warning("%s%s: one is beyond what products take; all experts are decoded", self._name, SCALES)
                return False
        return True


def _decoded(stacks: tuple[Stored, Stored], name: str, expert: int, rows: slice, part: Part) -> "torch.Tensor":
    """Return a part of some outputs of one expert whose stacks are in MXFP4."""
    from pdserve.model.mxfp4 import decoded  # noqa: PLC0415 - imports torch

    of_blocks, inner = _in_blocks(part)
    try:
        return decoded(*(_read(stored, False, expert, rows, of_blocks) for stored in stacks))[inner]
    except ValueError as error:
        raise ConfigError(f"{name}{SCALES}: {error}") from error


def _in_blocks(part: Part) -> tuple[Part, Part]:
    """Return which outputs and blocks of inputs have a part of a matrix, and the part of these."""
    if len(part) < 2:
        return part, ()
    rows, inputs = part
    first, last = inputs.start // GROUP, -(-inputs.stop // GROUP)
    return (rows, slice(first, last)), (slice(None), slice(inputs.start - first * GROUP, inputs.stop - first * GROUP))
