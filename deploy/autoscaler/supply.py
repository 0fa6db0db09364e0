"""What there is of each pool, and what was ordered and has no outcome yet. Pure.

Invariant: a pool has at most one order in flight, and every order ends in one outcome: it is observed, it failed, it is
late, or its replica is gone.

An order that failed or is late may have been carried out all the same. So it is owed for a while: the devices that it
may hold count, and its pool is given the same order again instead of another one of the same direction, so that nothing
is done twice. An order to grow that failed delays no drain, and a drain that failed delays no growth.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from pdserve.autoscaler.decisions import Action, Add, Drain, Flip
from pdserve.autoscaler.observation import Observation, Replica, State
from pdserve.autoscaler.pools import Pools, bounds
from pdserve.base.roles import POOLS, Role
from pdserve.base.values import value

_FIRST_BACKOFF_S, _MAX_BACKOFF_S = 5.0, 300.0
_NEWER = 0.3  # weight of the latest start-up time


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


class Supply:
    """The replicas of one observation, those that were ordered and are not seen yet, and the limits of the moment."""

    def __init__(self, pools: Pools, seen: Observation, coming: list[Add]) -> None:
        """`coming`: replicas that were ordered, or may have been, and are not seen yet."""
        self._pools, self._coming = pools, coming
        self.at_s = seen.at_s
        self.listed = {replica.name: replica for replica in seen.replicas}
        self.limits = {pool: bounds(pools.of(pool), seen.unix_s) for pool in POOLS}

    @property
    def sizes(self) -> Mapping[Role, int]:
        """Replicas of each pool that serve or start; mixed ones are in both."""
        return {pool: len(self.of(pool)) for pool in POOLS}

    def of(self, pool: Role) -> list[Replica]:
        """Return a pool's replicas that serve or start."""
        return [r for r in self.listed.values() if r.role.is_in(pool) and r.state is not State.DRAINING]

    def num_draining(self, pool: Role) -> int:
        return sum(r.role.is_in(pool) and r.state is State.DRAINING for r in self.listed.values())

    def devices(self, besides: Action | None = None) -> int:
        """Return how many devices are held, or may be, without those of an order that is to be given again."""
        roles = [replica.role for replica in self.listed.values()]
        roles += [add.role for add in self._coming if add != besides]
        return sum(self._pools.of(role).devices_per_replica for role in roles)

    def expect(self, add: Add) -> None:
        """Count a replica that is ordered."""
        if add not in self._coming:
            self._coming.append(add)

    def free_name(self, pool: Role) -> str:
        """Return the name of a pool with the lowest number that no replica has, and none that may be coming."""
        taken = {*self.listed, *(add.name for add in self._coming)}
        return next(name for number in range(len(taken) + 1) if (name := f"{pool}-{number}") not in taken)

    def late(self, pool: Role, startup_s: float, drain_s: float) -> list[str]:
        """Return which replicas take long to start or to drain."""
        limits = {State.STARTING: startup_s, State.DRAINING: drain_s, State.READY: float("inf")}
        return [
            f"{replica.name} has been {replica.state.value} for {self.at_s - replica.since_s:.0f} s"
            for replica in self.listed.values()
            if replica.role.is_in(pool) and self.at_s - replica.since_s > limits[replica.state]
        ]


class ReplicaHistory:
    """When replicas were ordered, and since when each has its role; how long start-ups take."""

    def __init__(self) -> None:
        self.startup_s: dict[Role, float] = {}  # from the order until it serves, in pools where a start was seen
        self._asked_s: dict[str, float] = {}  # when a replica was ordered, or first seen to start
        self._roles: dict[str, tuple[Role, float]] = {}  # and since when

    def observe(self, replicas: Iterable[Replica], at_s: float) -> None:
        """Take in the replicas that there are."""
        listed = {replica.name: replica for replica in replicas}
        for name, replica in listed.items():
            if name not in self._roles or self._roles[name][0] is not replica.role:
                self._roles[name] = replica.role, at_s
            if replica.state is State.STARTING:
                self._asked_s.setdefault(name, replica.since_s)
            elif (asked_s := self._asked_s.pop(name, None)) is not None and replica.state is State.READY:
                self._learn(replica.role, max(0.0, replica.since_s - asked_s))
        self._roles = {name: role for name, role in self._roles.items() if name in listed}

    def asked(self, name: str, at_s: float) -> None:
        """Take note that a replica was ordered."""
        self._asked_s[name] = at_s

    def forget(self, name: str) -> None:
        """Take note that an order for a replica came to nothing."""
        self._asked_s.pop(name, None)

    def in_role_s(self, name: str, at_s: float) -> float:
        """Return for how long a replica has been seen in its role."""
        return at_s - self._roles[name][1] if name in self._roles else 0.0

    def _learn(self, role: Role, took_s: float) -> None:
        for pool in POOLS:
            if role.is_in(pool):
                before_s = self.startup_s.get(pool, took_s)
                self.startup_s[pool] = before_s + _NEWER * (took_s - before_s)
