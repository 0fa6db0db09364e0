"""What a part of a coded matrix needs of the tensors that the matrix is stored in. Free of torch.

Invariant: a window parts no word of packed codes and no group. So it decodes to what the whole matrix decodes to there.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import lcm
from typing import TYPE_CHECKING, Self, cast

from pdserve.model.weights import COLUMNS, ROWS, Part, Stored

if TYPE_CHECKING:
    import torch

Axis = tuple[int, int]  # of a tensor: outputs or inputs of the matrix, and how many of them an index stands for
Axes = Mapping[str, tuple[Axis, ...]]  # of the tensors that are read in parts; others are read whole
Block = tuple[int, int]  # outputs and inputs that share a scale
ORDERS = ("g_idx", "weight_g_idx")  # the group of each input
OF_GROUPS = ("weight_scale", "weight_scale_inv", "weight_zero_point")
INPUTS_FIRST = ("qweight", "qzeros", "scales")


@dataclass(frozen=True, slots=True)
class Window:
    """Some outputs and inputs of a matrix."""

    spans: tuple[slice, slice]

    @classmethod
    def around(cls, part: Part, shape: tuple[int, int], parts: Mapping[str, Stored], axes: Axes) -> Self:
        """Return the least one that has a part of a matrix [outputs, inputs]."""
        steps = [1, 1]
        for name, found in axes.items():
            for (of, per), length in zip(found, parts[name].shape, strict=True):
                steps[of] = lcm(steps[of], per) if length > 1 else steps[of]
        wanted = [each.indices(size) for each, size in zip((*part, slice(None), slice(None)), shape, strict=False)]
        rows, columns = (
            slice(start // step * step, min(size, -(-stop // step) * step))
            for (start, stop, _), step, size in zip(wanted, steps, shape, strict=True)
        )
        return cls((rows, columns))

    @property
    def shape(self) -> tuple[int, int]:
        outputs, inputs = (span.stop - span.start for span in self.spans)
        return outputs, inputs

    def of(self, axes: tuple[Axis, ...], shape: tuple[int, ...]) -> Part:
        """Return what indexes the window in a tensor. An axis of a single index is read whole."""
        given = zip(axes, shape, strict=True)
        return tuple([self._indices(*axis) if length > 1 else slice(None) for axis, length in given])

    def inner(self, part: Part) -> Part:
        """Return what indexes a part of the matrix in the window."""
        spans = list(zip(part, self.spans, strict=False))
        return tuple([slice(*(at - span.start for at in each.indices(span.stop)[:2])) for each, span in spans])

    def _indices(self, of: int, per: int) -> slice:
        span = self.spans[of]
        return slice(span.start // per, -(-span.stop // per))


def read_window(
    part: Part, shape: tuple[int, int], parts: Mapping[str, Stored], block: Block | None
) -> "tuple[Window, dict[str, torch.Tensor]]":
    """Read what a part of a matrix needs: all inputs, where their groups are in an order of their own."""
    axes, orders = dict(_axes(parts, shape, block)), [name for name in ORDERS if name in parts]
    size = shape[1] // _num_groups(parts) if orders else shape[1]
    is_in_order = all(_is_in_order(cast("torch.Tensor", parts[name].read(())), size) for name in orders)
    window = Window.around(part if is_in_order else part[:1], shape, parts, axes)
    tensors = {
        name: cast("torch.Tensor", stored.read(window.of(axes[name], stored.shape) if name in axes else ()))
        for name, stored in parts.items()
    }
    first = window.spans[COLUMNS].start // size
    return window, tensors | {name: tensors[name] - first for name in orders}


def _num_groups(parts: Mapping[str, Stored]) -> int:
    """Return in how many groups the inputs of a matrix with an order are."""
    return parts["scales"].shape[0] if "scales" in parts else (1, *parts["weight_scale"].shape)[-1]


def _is_in_order(groups: "torch.Tensor", size: int) -> bool:
    return groups.tolist() == [place // size for place in range(len(groups))]


def _axes(
    parts: Mapping[str, Stored], shape: tuple[int, int], block: Block | None
) -> Iterator[tuple[str, tuple[Axis, ...]]]:
    """Yield the axes of the tensors of a matrix [outputs, inputs], of those that are read in parts."""
    outputs, inputs = shape
    for name, stored in parts.items():
        match stored.shape:
            case (_,) if name in ORDERS:
                yield name, ((COLUMNS, 1),)
            case (count,) if name in OF_GROUPS and count == outputs:
                yield name, ((ROWS, 1),)
            case (first, second) if name in INPUTS_FIRST:
                yield name, ((COLUMNS, inputs // first), (ROWS, outputs // second))
            case (_, second) if name in ("weight", "weight_packed"):
                yield name, ((ROWS, 1), (COLUMNS, inputs // second))
            case (_, _) if name in OF_GROUPS and block is not None:
                yield name, ((ROWS, block[0]), (COLUMNS, block[1]))
            case (_, second) if name in OF_GROUPS:
                yield name, ((ROWS, _outputs_of_zeros(name, parts, inputs)), (COLUMNS, inputs // second))


def _outputs_of_zeros(name: str, parts: Mapping[str, Stored], inputs: int) -> int:
    """Return of how many outputs a word of zeros is; 1 where these are no words."""
    is_packed = name == "weight_zero_point" and "weight_packed" in parts
    return inputs // parts["weight_packed"].shape[1] if is_packed else 1
