"""Where the ranks of a worker keep KV pages, and which settings go with it: the others are refused by name."""

from collections.abc import Mapping
from typing import Literal

from pdserve.settings.degrees import Degrees

RankMemory = Literal["shared", "own"]

SERVED: Mapping[str, tuple[object, ...]] = {
    "mover": ("nixl",),
    "attention_backend": ("auto",),
}


def is_own_unasked(given: Mapping[str, object]) -> bool:
    """Say whether a worker with these settings has several ranks with a device each."""
    return given.get("device") in ("cuda", "interpreter") and str(given.get("tensor_parallel_size", 1)) != "1"


def rank_memory_problem(rank_memory: RankMemory, degrees: Degrees, beside: Mapping[str, object]) -> str | None:
    """Return why ranks do not have such memory beside other settings, or None."""
    device, num_ranks = beside["device"], degrees.num_ranks
    has_devices = num_ranks > 1 and device in ("cuda", "interpreter")
    if rank_memory == "shared":
        return (
            f"rank_memory: shared is served on CPUs; each of {degrees} on {device} has its own" if has_devices else None
        )
    wrong = [name for name, values in SERVED.items() if beside[name] not in values]
    kind = f"tensor_parallel_size: {num_ranks} on {device}" if has_devices else "rank_memory: own"
    return f"{kind} is not served with this {wrong[0]} yet: {beside[wrong[0]]}" if wrong else None
