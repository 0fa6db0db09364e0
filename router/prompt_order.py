"""In which order a worker computes the prompts that wait there: by priority, then as they came.

A prompt that has begun is overtaken by none: what a later one overtakes are prompts of lower priority that have not.
"""

from dataclasses import dataclass, field
from math import inf

from pdserve.ids import Attempt, RequestId

Key = tuple[RequestId, Attempt]
Cost = tuple[int, int]  # of a prompt: its tokens, and the work of their attention


@dataclass(slots=True)
class _Level:
    """Prompts of one priority that have not begun, and what they cost together."""

    costs: dict[Key, Cost] = field(default_factory=dict)
    num_tokens: int = 0
    work: int = 0


class PromptOrder:
    """The prompts that one worker has still to compute."""

    def __init__(self) -> None:
        self._levels: dict[int, _Level] = {}  # by priority
        self._priorities: dict[Key, int] = {}  # of those that have not begun
        self._begun: dict[Key, None] = {}
        self.lowest = inf  # priority of those that have not begun

    @property
    def first_begun(self) -> Key | None:
        """The prompt that is computed in part, if one is."""
        return next(iter(self._begun), None)

    @property
    def waiting_tokens(self) -> int:
        """Tokens of the prompts that have not begun."""
        return sum([level.num_tokens for level in self._levels.values()])

    def add(self, key: Key, priority: int, cost: Cost) -> list[Key]:
        """Queue a prompt; return those that it overtakes."""
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = _Level()
            self.lowest = min(self._levels)
        level.costs[key] = cost
        level.num_tokens += cost[0]
        level.work += cost[1]
        self._priorities[key] = priority
        if priority <= self.lowest:
            return []
        return [other for lower in self._levels if lower < priority for other in self._levels[lower].costs]

    def grow(self, key: Key, cost: Cost) -> None:
        """Note that a prompt costs so much more than it did when it was queued."""
        priority = self._priorities.get(key)
        if priority is not None:
            level = self._levels[priority]
            num_tokens, work = level.costs[key]
            level.costs[key] = num_tokens + cost[0], work + cost[1]
            level.num_tokens += cost[0]
            level.work += cost[1]

    def remove(self, key: Key) -> None:
        """Forget a prompt that is computed or given up, if it is here."""
        if key in self._priorities:
            self._take(key)
        else:
            self._begun.pop(key, None)

    def begin(self, num_tokens: int) -> None:
        """Note that a step begins with so many tokens of prompts that have not begun."""
        while num_tokens > 0 and self._levels:
            key = next(iter(self._levels[max(self._levels)].costs))
            num_tokens -= self._take(key)
            self._begun[key] = None

    def behind(self, priority: int) -> Cost:
        """Return what the prompts cost that one more of this priority would overtake."""
        lower = [level for each, level in self._levels.items() if each < priority]
        return sum([level.num_tokens for level in lower]), sum([level.work for level in lower])

    def _take(self, key: Key) -> int:
        priority = self._priorities.pop(key)
        level = self._levels[priority]
        num_tokens, work = level.costs.pop(key)
        level.num_tokens -= num_tokens
        level.work -= work
        if not level.costs:
            del self._levels[priority]
            self.lowest = min(self._levels, default=inf)
        return num_tokens
