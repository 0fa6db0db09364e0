"""Learns how long replicas take to start, and since when each has its role. Pure."""

from collections.abc import Iterable

from pdserve.autoscaler.observation import Replica, State
from pdserve.roles import Role

_NEWER = 0.3  # weight of the latest start


class Lives:
    """What is remembered of replicas that are listed."""

    def __init__(self) -> None:
        self._startup_s: dict[Role, float] = {}
        self._learnt: set[Role] = set()
        self._asked_s: dict[str, float] = {}  # when a replica was ordered, or first seen to start
        self._roles: dict[str, tuple[Role, float]] = {}  # and since when

    def guess(self, guesses_s: dict[Role, float]) -> None:
        """Take these for how long a start takes in each pool, until one was seen there."""
        self._startup_s |= {pool: guess_s for pool, guess_s in guesses_s.items() if pool not in self._learnt}

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

    def startup_s(self, pool: Role) -> float:
        """Return how long a replica of a pool takes from the order until it serves."""
        return self._startup_s[pool]

    def in_role_s(self, name: str, at_s: float) -> float:
        """Return for how long a replica has been seen in its role."""
        return at_s - self._roles[name][1] if name in self._roles else 0.0

    def _learn(self, role: Role, took_s: float) -> None:
        for pool in self._startup_s:
            if role.is_in(pool):
                before_s = self._startup_s[pool] if pool in self._learnt else took_s
                self._startup_s[pool] = before_s + _NEWER * (took_s - before_s)
                self._learnt.add(pool)
