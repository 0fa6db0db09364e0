"""Keeps the orders that have no outcome yet, and those whose outcome nobody knows. Pure.

Invariant: a pool has at most one order in flight, and every order ends in one outcome: it is observed, it failed, it is
late, or its replica is gone.

An order that failed or is late may have been carried out all the same. It stays owed for a while: what it would hold
counts, and its pool is given the same order again rather than another one that changes the pool likewise, so that
nothing is done twice. Growth that failed delays no drain, and a drain that failed delays no growth.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from pdserve.autoscaler.decisions import Action, Add, Drain, Flip
from pdserve.autoscaler.observation import Replica, State
from pdserve.roles import Role
from pdserve.values import value

_FIRST_BACKOFF_S, _MAX_BACKOFF_S = 5.0, 300.0


class Result(StrEnum):
    """How an order ended."""

    DONE = "done"
    FAILED = "failed"
    LATE = "late"  # nothing of it is to be seen yet
    GONE = "gone"  # its replica is


@value
class Outcome:
    """The end of an order."""

    action: Action
    result: Result
    effects: Mapping[Role, int]  # what it would have changed each pool's size by
    reason: str = ""


@dataclass(slots=True)
class _Order:
    action: Action
    effects: Mapping[Role, int]
    at_s: float


@dataclass(slots=True)
class _Trouble:
    """Orders of one pool, in one direction, that failed one after another."""

    count: int = 0
    again_s: float = 0.0
    reason: str = ""


class Orders:
    """Orders of both pools."""

    def __init__(self) -> None:
        self._in_flight: dict[Role, _Order] = {}  # an order that changes both pools is listed under both
        self._owed: dict[tuple[Role, int], _Order] = {}  # by pool and direction, 1 or -1
        self._troubles: dict[tuple[Role, int], _Trouble] = {}

    def begin(self, action: Action, effects: Mapping[Role, int], at_s: float) -> None:
        """Take note of an order to one or both pools, which have none in flight."""
        order = _Order(action, effects, at_s)
        for pool, by in effects.items():
            self._in_flight[pool] = order
            self._owed.pop((pool, by), None)

    def confirm(self, action: Action, at_s: float) -> None:
        """Take note that an order was taken on: from then on it takes its time."""
        for order in self._in_flight.values():
            if order.action == action:
                order.at_s = at_s

    def fail(self, action: Action, reason: str, at_s: float) -> list[Outcome]:
        """End an order in flight that failed: it was not carried out, or nobody knows whether it was."""
        order = next((order for order in self._in_flight.values() if order.action == action), None)
        return [] if order is None else [self._end(order, Result.FAILED, at_s, reason)]

    def settle(self, replicas: Mapping[str, Replica], late_s: Mapping[Role, float], at_s: float) -> list[Outcome]:
        """Compare what was ordered with what is there; return the orders that have ended."""
        outcomes = []
        for pool, order in list(self._in_flight.items()):
            if self._in_flight.get(pool) is not order:
                continue  # of both pools, and has just ended
            result = _seen(order.action, replicas)
            if result is None and at_s - order.at_s > late_s[pool]:
                result = Result.LATE
            if result is not None:
                reason = f"not seen within {late_s[pool]:.0f} s" if result is Result.LATE else ""
                outcomes.append(self._end(order, result, at_s, reason))
        for (pool, by), order in list(self._owed.items()):
            if _seen(order.action, replicas) is not None or at_s - order.at_s > 2 * late_s[pool]:
                del self._owed[pool, by]
        return outcomes

    def _end(self, order: _Order, result: Result, at_s: float, reason: str) -> Outcome:
        for pool, by in order.effects.items():
            del self._in_flight[pool]
            if result in {Result.DONE, Result.GONE}:
                self._troubles.pop((pool, by), None)
                continue
            trouble = self._troubles.setdefault((pool, by), _Trouble())
            backoff_s = min(_MAX_BACKOFF_S, _FIRST_BACKOFF_S * 2 ** min(trouble.count, 10))
            trouble.count, trouble.again_s, trouble.reason = trouble.count + 1, at_s + backoff_s, reason
            self._owed[pool, by] = _Order(order.action, order.effects, at_s)
        return Outcome(order.action, result, order.effects, reason)

    def in_flight(self, pool: Role) -> Action | None:
        order = self._in_flight.get(pool)
        return None if order is None else order.action

    def owed(self, pool: Role, by: int) -> Action | None:
        """Return the order to give again before any other, if the pool still is to grow (1) or to shrink (-1)."""
        order = self._owed.get((pool, by))
        return None if order is None else order.action

    def blocked(self, pool: Role, by: int, at_s: float) -> str:
        """Return why a pool can be given no order to grow (1) or to shrink (-1), or nothing."""
        order = self._in_flight.get(pool)
        if order is not None:
            return f"{order.action} is in flight since {at_s - order.at_s:.0f} s"
        trouble = self._troubles.get((pool, by))
        if trouble is not None and trouble.again_s > at_s:
            return f"the last order failed ({trouble.reason}); again in {trouble.again_s - at_s:.0f} s"
        return ""

    def unseen(self, replicas: Mapping[str, Replica]) -> list[Add]:
        """Return replicas that were ordered, or may have been, and are not seen yet."""
        orders = (*self._in_flight.values(), *self._owed.values())
        return [o.action for o in orders if isinstance(o.action, Add) and o.action.name not in replicas]


def _seen(action: Action, replicas: Mapping[str, Replica]) -> Result | None:
    """Return how an order ended, as far as can be seen."""
    replica = replicas.get(action.name)
    match action:
        case Add():
            return None if replica is None else Result.DONE
        case Drain():
            return Result.DONE if replica is None or replica.state is State.DRAINING else None
        case Flip(_, role):
            if replica is None or replica.state is State.DRAINING:
                return Result.GONE
            return Result.DONE if replica.role is role else None
