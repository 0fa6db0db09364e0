"""Where the ranks of a worker keep KV pages, and which settings go with it: the others are refused by name."""

from collections.abc import Mapping
from typing import Literal

RankMemory = Literal["shared", "own"]

SERVED: Mapping[str, tuple[object, ...]] = {
    "device": ("auto", "cpu"),
    "mover": ("nixl",),
    "kv_cache_dtype": ("auto",),
    "speculative_config": (None,),
}


def rank_memory_problem(rank_memory: RankMemory, beside: Mapping[str, object]) -> str | None:
    """Return why ranks do not have memory of their own beside other settings, or None."""
    wrong = [name for name, served in SERVED.items() if rank_memory == "own" and beside[name] not in served]
    return f"rank_memory: own is not served with this {wrong[0]} yet: {beside[wrong[0]]}" if wrong else None
