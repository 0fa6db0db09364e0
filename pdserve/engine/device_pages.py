"""The pages of one rank, in the memory of its device."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from pdserve.engine.batch import Ints
from pdserve.engine.layer_kinds import pool_in, pool_size
from pdserve.engine.runner import zeroed
from pdserve.kernels.kv_rows import KvRows
from pdserve.model.family import Model
from pdserve.model.layer_groups import LayerGroup, held_by, layer_groups
from pdserve.protocol.kvlayout import KvCode


@dataclass(frozen=True, slots=True)
class DevicePages:
    """How a rank keeps pages on its device, and how it learns what the first one has drawn."""

    # Bytes, zeroed: of pages with its own KV heads alone, one behind the other. None: pages have all heads.
    memory: Tensor | None = None
    # Overwrites a tensor with the first rank's; all ranks call it, in one order. None: there are no others.
    spread: Callable[[Tensor], None] | None = None
    code: KvCode | None = None  # the form of K and V; None: the model's type
    keep: Callable[[Ints | None], None] | None = None  # of the first rank: lets others keep their parts of states

    def pool_of(self, model: Model, num_pages: int, page_size: int) -> tuple[tuple[LayerGroup, ...], Tensor, KvRows]:
        """Return groups of layers, zeroed pages and their rows; those of the smallest group have `page_size` tokens."""
        config, groups = model.config, layer_groups(model.config, page_size, powers_of_two=True)
        rows = KvRows(config.head_dim, model.dtype, self.code)
        if self.memory is None:
            size = pool_size(config, num_pages, groups, rows.width)
            return groups, zeroed(size, rows.pool_dtype, model.device), rows
        groups = held_by(model.rank, config, groups)
        size = pool_size(config, num_pages, groups, rows.width)
        return groups, pool_in(self.memory.view(rows.pool_dtype), size, by_head=True), rows


PLAIN = DevicePages()
