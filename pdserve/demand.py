"""What clients asked for in a stretch of time, counted by size."""

from math import ceil, log2
from typing import Any

from pdserve.values import value

NUM_BANDS = 48  # the last one's requests have up to 2**23.5 tokens, or more


def band_of(num_tokens: int) -> int:
    """Return the band of a length: band k holds those above 2**((k - 1) / 2), up to 2**(k / 2)."""
    return min(NUM_BANDS - 1, ceil(2 * log2(max(1, num_tokens))))


def middle_of(band: int) -> float:
    """Return the length, tokens, that stands for a band: its geometric middle."""
    return float(2 ** ((band - 0.5) / 2)) if band else 1.0


@value
class Demand:
    """Counts of requests and tokens. A router's count up from its start."""

    num_requests: int = 0  # that arrived, refused ones included
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt tokens: those found in a cache, which no worker computed
    answer_tokens: int = 0  # delivered
    prompts: tuple[int, ...] = (0,) * NUM_BANDS  # requests by prompt tokens to compute
    answers: tuple[int, ...] = (0,) * NUM_BANDS  # answers that were not cut off, by their tokens
    num_judged: int = 0  # requests that have ended and had objectives, refused ones included
    num_within_ttft: int = 0
    num_within_tpot: int = 0
    num_within_both: int = 0

    def __add__(self, other: "Demand") -> "Demand":
        return self._combined(other, 1)

    def since(self, before: "Demand") -> "Demand":
        """Return what came after an earlier count; all of it where a router has started again between the two."""
        gone = self._combined(before, -1)
        counts = [getattr(gone, name) for name in _PARTS]
        least = min(min(count) if isinstance(count, tuple) else count for count in counts)
        return self if least < 0 else gone

    def _combined(self, other: "Demand", sign: int) -> "Demand":
        parts: dict[str, Any] = {}
        for name in _PARTS:
            mine, theirs = getattr(self, name), getattr(other, name)
            if isinstance(mine, tuple):
                parts[name] = tuple(one + sign * another for one, another in zip(mine, theirs, strict=True))
            else:
                parts[name] = mine + sign * theirs
        return Demand(**parts)


_PARTS = tuple(Demand.__annotations__)
