"""What the engine's runners expect of a model, and the tensors it is built from."""

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Protocol, Self

import torch
from torch import Tensor

from pdserve.base.errors import ConfigError
from pdserve.kernels.cpu.calls import Calls
from pdserve.model.attention import Attention
from pdserve.model.config import ModelConfig
from pdserve.model.fp8 import Coded, Fp8
from pdserve.model.groups import Groups
from pdserve.model.ops import Dense, Held, Linear, Matrix, Quantized
from pdserve.model.rope import Rope
from pdserve.model.taps import Tap
from pdserve.model.weights import COLUMNS, Rank, Shard, Stored, Weights

Shapes = dict[str, tuple[int, ...]]
Progress = Callable[[float], None]


class TensorSource(Protocol):
    """The tensors that a model is built from, by name. A model takes each of them once, and says its shape."""

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of hidden states, K and V."""
        ...

    @property
    def device(self) -> torch.device: ...

    def take(
        self, name: str, shape: tuple[int, ...], shard: Shard | None = None, plus: float = 0.0, *, exact: bool = False
    ) -> Tensor:
        """Return a tensor, to which `plus` is added before it is rounded to the dtype, or a rank's shard of it.

        exact: in float32.
        """
        ...

    def take_matrix(
        self, name: str, outputs: int, inputs: int, *, bias: bool = False, shard: Shard | None = None
    ) -> Matrix:
        """Return `name`.weight [outputs, inputs], with `name`.bias if there is one, or a rank's shard of both.

        Where inputs are divided, the bias is the first rank's: ranks add their products. ConfigError names a matrix
        that has no such shard.
        """
        ...

    def group(self, name: str) -> int:
        """Return how many inputs of `name`.weight stay together: those that share a scale, or a pair, or 1.

        Products in tiles take pairs. So either all ranks have tiles of a matrix, or none, and they round alike.
        """
        ...


def unit_of(stored: Stored) -> int:
    """Return how many inputs of a matrix stay together."""
    return stored.group if stored.group > 1 else 2 - stored.shape[1] % 2


class Wanted:
    """Notes which tensors a model takes, and gives it matrices of no inputs in their place, which take no memory.

    Tensors on torch's device "meta" take none either, but joining two of them loads torch's compiler: for seconds.
    """

    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self) -> None:
        self.shapes: Shapes = {}
        self.num_elements = 0  # of the shards

    def take(
        self, name: str, shape: tuple[int, ...], shard: Shard | None = None, plus: float = 0.0, *, exact: bool = False
    ) -> Tensor:
        del plus, exact
        self.shapes[name] = shape
        span = slice(0, 1) if shard is None else shard.span(name, shape[shard.axis])
        length = 1 if shard is None else shape[shard.axis]
        self.num_elements += prod(shape) // length * (span.stop - span.start)
        return torch.empty(shape if len(shape) == 1 else (shape[0], 0))

    def take_matrix(
        self, name: str, outputs: int, inputs: int, *, bias: bool = False, shard: Shard | None = None
    ) -> Matrix:
        weight = self.take(f"{name}.weight", (outputs, inputs), shard)
        by_rows = None if shard is None or shard.axis == COLUMNS else shard
        return Dense(weight, self.take(f"{name}.bias", (outputs,), by_rows) if bias else None)

    def group(self, name: str) -> int:
        """Count shards as if every input could be parted: groups are small beside them."""
        del name
        return 1


class Tensors:
    """A checkpoint's tensors by name, each read when a model takes it: in the wanted dtype, on the wanted device.

    A model takes each of them once, so that no two copies pile up.
    """

    def __init__(
        self, weights: Weights, dtype: torch.dtype, device: torch.device, progress: Progress | None = None
    ) -> None:
        """Serve `weights`. progress: called with the share of elements taken, up to 1.0."""
        self.dtype, self.device = dtype, device
        self._left = dict(weights)
        self._total = sum(prod(stored.shape) for stored in weights.values())
        self._num_elements = 0
        self._progress = progress

    def take(
        self, name: str, shape: tuple[int, ...], shard: Shard | None = None, plus: float = 0.0, *, exact: bool = False
    ) -> Tensor:
        del shape  # has been compared by whoever gave us the weights
        taken = self._take(name, shard, plus, torch.float32 if exact else self.dtype)
        if isinstance(taken, Groups | Fp8):
            return Quantized(taken, self.dtype, None, self.device).dense().data
        return taken

    def take_matrix(
        self, name: str, outputs: int, inputs: int, *, bias: bool = False, shard: Shard | None = None
    ) -> Matrix:
        del outputs, inputs
        by_columns = shard is not None and shard.axis == COLUMNS
        added = self.take(f"{name}.bias", (), None if by_columns else shard) if bias else None
        if by_columns and shard is not None and shard.rank > 0:
            added = None
        weight = self._take(f"{name}.weight", shard)
        return Dense(weight, added) if isinstance(weight, Tensor) else Quantized(weight, self.dtype, added, self.device)

    def group(self, name: str) -> int:
        return unit_of(self._left[f"{name}.weight"])

    def _take(
        self, name: str, shard: Shard | None, plus: float = 0.0, dtype: torch.dtype | None = None
    ) -> Tensor | Coded:
        stored = self._left.pop(name)
        read = stored.read(() if shard is None else shard.part(name, stored))
        if not isinstance(read, Groups | Fp8):
            read = read if isinstance(read, Tensor) else torch.from_numpy(read)
            if read.element_size() == 1:
                raise ConfigError(f"{name}: {read.dtype} without scales")
            read = read.float() + plus if plus else read
            read = read.to(device=self.device, dtype=dtype or self.dtype).contiguous()
        self._num_elements += prod(stored.shape)
        if self._progress is not None:
            self._progress(self._num_elements / self._total)
        return read


class Model(Protocol):
    """A model ready to run; its weights are never written again."""

    @property
    def config(self) -> ModelConfig:
        """Return the config of the whole model, whatever part of it this is."""
        ...

    @property
    def rank(self) -> Rank:
        """Return which of the ranks that hold the model together this is."""
        ...

    @property
    def embedding(self) -> Linear | None:
        """Return the table of its tokens' embeddings, which are yet to be scaled; None: an earlier stage has it."""
        ...

    @property
    def lm_head(self) -> Linear | None:
        """Return what makes logits, which are yet to be scaled and capped; None: a later stage has it."""
        ...

    @property
    def ropes(self) -> Sequence[Rope]:
        """Return the rope of each layer; layers that rotate alike share one."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of hidden states, K and V."""
        ...

    @property
    def device(self) -> torch.device: ...

    def forward(self, token_ids: Tensor, attention: Attention, rows: Tensor | None, tap: Tap | None = None) -> Tensor:
        """Compute K and V of every token, and logits of some.

        token_ids: int64 [num_tokens]. rows: the tokens whose logits are wanted, or None for all of them. tap: collects
        features of every token.
        Returns [len(rows), vocab_size] in the model's dtype, or in float32: see `Ops.logits`.
        """
        ...

    def hidden(self, token_ids: Tensor, attention: Attention, rows: Tensor | None, tap: Tap | None = None) -> Tensor:
        """Do as `forward`, but return what logits are computed from: [len(rows), hidden_size]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of at least one row that `hidden` has returned."""
        ...

    def normed(self, hidden: Tensor) -> Tensor:
        """Return rows that `hidden` has returned behind the last norm, which is what embeddings are made of."""
        ...

    def matrices(self) -> Iterator[Held]:
        """Yield all that is multiplied."""
        ...

    def expert_counts(self) -> Sequence[Tensor]:
        """Return of each layer with experts how many tokens each of them has computed: int64, steps add to it."""
        ...

    def through(self, calls: Calls) -> Self:
        """Return the same model as the compiled library computes it, through these calls."""
        ...

    def activation_bytes(self) -> int:
        """Return the bytes that a step needs for each of its tokens beside their logits: an upper estimate."""
        ...

    def bytes_read(self, num_rows: int) -> int:
        """Return the bytes of weights that a step of `num_rows` tokens reads, all of which are sampled from."""
        ...
