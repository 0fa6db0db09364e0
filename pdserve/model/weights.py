"""A checkpoint's tensors by name. A model reads each of them whole, or one rank's shard of it. Free of torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, TypeAlias

from pdserve.base.errors import ConfigError
from pdserve.settings.degrees import Degrees

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from pdserve.model.fp8 import Fp8
    from pdserve.model.groups import Groups

    Read: TypeAlias = npt.NDArray[np.float32] | torch.Tensor | Groups | Fp8

Part = tuple[slice, ...]  # indexes a part of a tensor; empty: all of it
ROWS, COLUMNS = 0, 1  # axes of a matrix: its outputs, and its inputs
GROUP = 32  # inputs of a quantized matrix that share a scale and a minimum
SEGMENT = 128  # inputs of a matrix in FP8 that share a scale


@dataclass(frozen=True, slots=True)
class Codes:
    """How a matrix is coded, as far as headers say."""

    bits: int
    group: int  # inputs that share a scale
    is_fp8: bool = False
    has_zeros: bool = False  # codes that stand for zero, of each group
    in_order: bool = True  # whether inputs come in the order of their groups


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a checkpoint that is not read yet."""

    shape: tuple[int, ...]
    read: "Callable[[Part], Read]"  # reads no other rows; and no other bytes, where the format allows it
    group: int = 1  # columns that cannot be parted
    codes: Codes | None = None  # as which products take it; None: as floats


Weights = Mapping[str, Stored]


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of a tensor along one axis. Parts may differ by one unit."""

    axis: int
    rank: int
    size: int  # ranks
    unit: int = 1  # rows or columns that stay together, such as those of a head

    def part(self, name: str, stored: Stored) -> Part:
        """Return what indexes the shard of a tensor; ConfigError if the tensor cannot be divided like this."""
        span = self.span(name, stored.shape[self.axis])
        length, start, stop = stored.shape[self.axis], span.start, span.stop
        if self.axis == COLUMNS and (start % stored.group or (stop % stored.group and stop < length)):
            part = f"inputs {start} to {stop} of {length} are not whole groups of {stored.group}"
            raise ConfigError(f"{name}: {part}, for rank {self.rank} of {self.size}")
        return (*(slice(None),) * self.axis, span)

    def span(self, name: str, length: int) -> slice:
        """Return the shard of an axis of so many; ConfigError if it cannot be divided like this."""
        units, rest = divmod(length, self.unit)
        if rest or units < self.size:
            raise ConfigError(f"{name}: {length} in units of {self.unit} cannot be split over {self.size} ranks")
        start, stop = (rank * units // self.size * self.unit for rank in (self.rank, self.rank + 1))
        return slice(start, stop)


@dataclass(frozen=True, slots=True)
class Rank:
    """One of `size` devices that hold a model's layers together, or the layers of one of its pipeline stages."""

    index: int = 0
    size: int = 1
    stage: int = 0
    num_stages: int = 1

    @classmethod
    def at(cls, index: int, degrees: Degrees) -> Self:
        """Return what the process of this number is. The first one, which samples, is the last pipeline stage."""
        if degrees.pipeline > 1:
            return cls(stage=(index - 1) % degrees.pipeline, num_stages=degrees.pipeline)
        return cls(index, degrees.tensor)

    @property
    def degrees(self) -> Degrees:
        return Degrees(self.size, self.num_stages)

    @property
    def is_first(self) -> bool:
        """Say whether this is in the stage that embeds tokens."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Say whether this is in the stage that makes logits."""
        return self.stage == self.num_stages - 1

    def layers(self, num_layers: int) -> range:
        """Return which layers are this rank's."""
        first, end = (stage * num_layers // self.num_stages for stage in (self.stage, self.stage + 1))
        return range(first, end)

    def rows(self, unit: int = 1) -> Shard | None:
        """Return the shard of a matrix whose outputs are divided; None: all of it."""
        return Shard(ROWS, self.index, self.size, unit) if self.size > 1 else None

    def columns(self, unit: int = 1) -> Shard | None:
        """Return the shard of a matrix whose inputs are divided, so that ranks add their products; None: all of it."""
        return Shard(COLUMNS, self.index, self.size, unit) if self.size > 1 else None

    def kv_heads(self, num_kv_heads: int) -> slice:
        """Return which KV heads are this rank's; where there are fewer than ranks, several have the same one."""
        first = self.index * num_kv_heads // self.size
        return slice(first, max(first + 1, (self.index + 1) * num_kv_heads // self.size))

    def query_heads(self, num_heads: int, num_kv_heads: int) -> slice:
        """Return which heads of queries are this rank's: all that share its KV heads, or a part of those of one."""
        unit = self.query_unit(num_heads, num_kv_heads)
        return Shard(ROWS, self.index, self.size, unit).span("heads", num_heads)

    def query_unit(self, num_heads: int, num_kv_heads: int) -> int:
        """Return how many heads of queries stay together."""
        return num_heads // num_kv_heads if self.size <= num_kv_heads else 1

    def kv_rows(self, num_kv_heads: int, head_dim: int) -> Shard | None:
        """Return the shard of a matrix of keys or values; None: all of it."""
        if self.size <= num_kv_heads:
            return self.rows(head_dim)
        return Shard(ROWS, self.kv_heads(num_kv_heads).start, num_kv_heads, head_dim)


WHOLE = Rank()
