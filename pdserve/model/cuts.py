"""Whether ranks can divide matrices of codes as they are: from the headers of files, before any rank starts."""

from dataclasses import replace

from torch import Tensor

from pdserve.base.errors import ConfigError
from pdserve.model.config import ModelConfig
from pdserve.model.decoder import Decoder
from pdserve.model.family import Wanted, unit_of
from pdserve.model.ops import TorchOps
from pdserve.model.weights import COLUMNS, SEGMENT, Rank, Shard, Stored, Weights
from pdserve.settings.degrees import Degrees


def check_cuts(config: ModelConfig, weights: Weights, degrees: Degrees) -> None:
    """Raise ConfigError, which names the matrix, where a rank's part of a model would begin or end within a group."""
    for index in range(degrees.num_ranks):
        Decoder.build(config, _Cuts(weights), TorchOps(), Rank.at(index, degrees))


class _Cuts(Wanted):
    """Compares each shard with how its matrix is coded."""

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        self._weights = weights

    def take(
        self, name: str, shape: tuple[int, ...], shard: Shard | None = None, plus: float = 0.0, *, exact: bool = False
    ) -> Tensor:
        if shard is not None and name in self._weights:
            _check(name, self._weights[name], shard)
        return super().take(name, shape, shard, plus, exact=exact)

    def group(self, name: str) -> int:
        stored = self._weights.get(f"{name}.weight")
        return 1 if stored is None else unit_of(stored)


def _check(name: str, stored: Stored, shard: Shard) -> None:
    codes, inputs = stored.codes, stored.shape[-1]
    if codes is None:
        shard.part(name, stored)
        return
    try:
        if shard.axis == COLUMNS and not codes.in_order:
            raise ConfigError(f"{name}: its groups of inputs are in an order of their own, for {shard.size} ranks")
        in_blocks = codes.is_fp8 and codes.group < inputs
        shard.part(name, replace(stored, group=SEGMENT) if in_blocks else stored)
    except ConfigError as error:
        raise ConfigError(f"{error}; --quantization none decodes all") from error
