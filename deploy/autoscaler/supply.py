"""Counts replicas of each pool and the devices that they hold, and learns how long they take to start. Pure."""

from collections.abc import Iterable, Mapping

from pdserve.autoscaler.decisions import Action, Add
from pdserve.autoscaler.observation import Observation, Replica, State
from pdserve.autoscaler.pools import Pools, bounds
from pdserve.roles import POOLS, Role

_NEWER = 0.3  # weight of the latest start


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


class Lives:
    """What is remembered of replicas that are listed."""

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
