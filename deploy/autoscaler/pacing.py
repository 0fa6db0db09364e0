"""Holds a pool's changes to what its policy allows: windows, rates, dwell. Pure.

The rules are those of the HorizontalPodAutoscaler, autoscaling/v2: a pool grows to the least size that was wanted in
the window of scaleUp, shrinks to the greatest in that of scaleDown, and in each period by no more than its policies
allow. Beside these, a change is undone only after a while: what was added stays until it has started and dwelled, and
what was drained stays away for as long as a replica dwells. A pool that had to take a drain back within its window
waits twice as long before the next one, so that noise about a limit between two sizes does not move it back and forth.
"""

from collections import deque
from math import ceil

from pdserve.autoscaler.pools import MAX_REPLICAS, Behavior, ScalingRules
from pdserve.base.values import value

_MOST_PATIENCE = 8  # times the window of scaleDown
_MOST_CHANGES = 4096  # remembered


@value
class Wanted:
    """What a loop finds of a pool's size."""

    grow_below: int  # the pool grows if it is smaller than this, to `size`
    size: int
    shrink_above: int  # the pool shrinks if it is larger than this, to it


@value
class _Change:
    """An order that a pool was given."""

    at_s: float
    by: int  # replicas added, or taken away
    size: int  # of the pool with it
    until_s: float  # it is not undone before


class Pacing:
    """One pool's past."""

    def __init__(self, behavior: Behavior, begun_s: float) -> None:
        self.behavior = behavior
        self._begun_s = begun_s  # nothing is known of what was wanted before
        self._wanted: deque[tuple[float, Wanted]] = deque()
        self._changes: deque[_Change] = deque(maxlen=_MOST_CHANGES)
        self._drained_s: float | None = None  # when the last replica was taken away, if none was added since
        self._patience = 1

    def want(self, wanted: Wanted, at_s: float) -> None:
        """Take in what a loop wants."""
        longest_s = max(self._up.stabilization_window_seconds, _MOST_PATIENCE * self._down.stabilization_window_seconds)
        while self._wanted and self._wanted[0][0] < at_s - longest_s:
            self._wanted.popleft()
        self._wanted.append((at_s, wanted))

    def _learn_patience(self, by: int, held_s: float, at_s: float) -> None:
        """Wait longer after a drain that was taken back at once, and less after one that was not."""
        soon_s = self._patience * self._down.stabilization_window_seconds + held_s
        is_soon = self._drained_s is not None and at_s - self._drained_s <= soon_s
        if by > 0 and is_soon:
            self._patience = min(_MOST_PATIENCE, 2 * self._patience)
        elif by < 0 and self._drained_s is not None and not is_soon:
            self._patience = max(1, self._patience // 2)
        self._drained_s = at_s if by < 0 else None

    def changed(self, by: int, size: int, held_s: float, at_s: float) -> None:
        """Take note that a pool was given an order that makes it `size`, which is not undone for some seconds."""
        self._learn_patience(by, held_s, at_s)
        self._changes.append(_Change(at_s, by, size, at_s + held_s))

    def unchanged(self, by: int) -> None:
        """Take note that the last order of this direction did not come to pass."""
        last = next((change for change in reversed(self._changes) if change.by == by), None)
        if last is not None:
            self._changes.remove(last)

    def grown(self, size: int, at_s: float) -> tuple[int, str]:
        """Return the size that a pool may grow to, its own if none is wanted, and what keeps it from more."""
        wanted = self._within(self._up.stabilization_window_seconds, at_s)
        if not wanted or size >= min(each.grow_below for each in wanted):
            return size, ""
        target = min(each.size for each in wanted)
        ceiling = min((each.size for each in self._changes if each.by < 0 and each.until_s > at_s), default=target)
        allowed = self._allowed(self._up, size, 1, at_s)
        most = max(size, min(target, ceiling, allowed))
        if most >= target:
            return most, ""
        if ceiling <= allowed:
            return most, f"a replica was taken away a moment ago, no more than {ceiling} until it has dwelled"
        return most, f"scaleUp allows {allowed} in this period"

    def needed(self, at_s: float) -> int:
        """Return how many replicas a pool needs at this moment, with its margin, and those that it has to keep."""
        return max(self._floor(at_s), self._wanted[-1][1].shrink_above) if self._wanted else MAX_REPLICAS

    def shrunk(self, size: int, at_s: float) -> tuple[int, str]:
        """Return the size that a pool may shrink to, its own if it is not to, and what keeps it from less."""
        window_s = self._patience * self._down.stabilization_window_seconds
        wanted = self._within(window_s, at_s)
        if not wanted or size <= wanted[-1].shrink_above:
            return size, ""
        target = max(each.shrink_above for each in wanted)
        if at_s - self._begun_s < window_s:
            return size, f"demand has been watched for {at_s - self._begun_s:.0f} s of {window_s:.0f}"
        if target >= size:
            return size, f"{target} were wanted within the last {window_s:.0f} s"
        floor = self._floor(at_s)
        allowed = self._allowed(self._down, size, -1, at_s)
        least = min(size, max(target, floor, allowed))
        if least < size:
            return least, ""
        if floor >= allowed:
            return size, f"a replica was added lately, no less than {floor} until it has started and dwelled"
        return size, f"scaleDown allows {allowed} in this period"

    @property
    def _up(self) -> ScalingRules:
        return self.behavior.scale_up

    @property
    def _down(self) -> ScalingRules:
        return self.behavior.scale_down

    def _floor(self, at_s: float) -> int:
        """Return the size that keeps what was added lately."""
        return max((each.size for each in self._changes if each.by > 0 and each.until_s > at_s), default=0)

    def _within(self, window_s: float, at_s: float) -> list[Wanted]:
        latest = [wanted for then_s, wanted in self._wanted if then_s > at_s - window_s]
        return latest or [wanted for _, wanted in list(self._wanted)[-1:]]

    def _allowed(self, rules: ScalingRules, size: int, sign: int, at_s: float) -> int:
        """Return the size at which the policies of a direction stop a pool."""
        if rules.select_policy == "Disabled":
            return size
        reaches = []
        for limit in rules.policies:
            begun_s = at_s - limit.period_seconds
            done = sum(each.by for each in self._changes if each.at_s > begun_s and each.by * sign > 0)
            start = size - done
            step = limit.value if limit.type == "Pods" else ceil(start * limit.value / 100)
            reaches.append(start + sign * step)
        furthest = (rules.select_policy == "Max") == (sign > 0)
        return max(0, max(reaches) if furthest else min(reaches))
