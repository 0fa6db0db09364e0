"""The heads of keys and values of a layer, where a model's layers have several kinds."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads of queries have the same size, and are as many in each layer."""

    num_kv_heads: int
    head_dim: int
