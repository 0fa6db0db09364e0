"""Counts what there is: replicas of each pool, their names, and the devices that they hold. Pure."""

from collections.abc import Callable, Mapping

from pdserve.autoscaler.decisions import Action, Add
from pdserve.autoscaler.observation import Observation, Replica, State
from pdserve.autoscaler.schema import Policy
from pdserve.autoscaler.sizing import POOLS
from pdserve.roles import Role


class Supply:
    """The replicas of one observation, and those that were ordered and are not seen yet."""

    def __init__(self, policy: Policy, seen: Observation, unseen: Callable[[Mapping[str, Replica]], list[Add]]) -> None:
        self._policy, self._at_s = policy, seen.at_s
        self._listed = {replica.name: replica for replica in seen.replicas}
        self._coming = unseen(self._listed)

    @property
    def names(self) -> Mapping[str, Replica]:
        return self._listed

    @property
    def sizes(self) -> Mapping[Role, int]:
        """Replicas of each pool that serve or start; mixed ones are in both."""
        return {pool: len(self.of(pool)) for pool in POOLS}

    def of(self, pool: Role) -> list[Replica]:
        """Return a pool's replicas that serve or start."""
        return [r for r in self._listed.values() if r.role.is_in(pool) and r.state is not State.DRAINING]

    def num_draining(self, pool: Role) -> int:
        return sum(r.role.is_in(pool) and r.state is State.DRAINING for r in self._listed.values())

    def devices(self, besides: Action | None = None) -> int:
        """Return how many devices are held, or may be, without those of an order that is to be given again."""
        held = sum(self._devices(replica.role) for replica in self._listed.values())
        return held + sum(self._devices(add.role) for add in self._coming if add != besides)

    def expect(self, add: Add) -> None:
        """Count a replica that is ordered."""
        if add not in self._coming:
            self._coming.append(add)

    def free_name(self, pool: Role) -> str:
        """Return the name of a pool with the lowest number that no replica has, and none that may be coming."""
        taken = {*self._listed, *(add.name for add in self._coming)}
        return next(name for number in range(len(taken) + 1) if (name := f"{pool}-{number}") not in taken)

    def late(self, pool: Role, startup_s: float, drain_s: float) -> list[str]:
        """Return which replicas take long to start or to drain."""
        limits = {State.STARTING: startup_s, State.DRAINING: drain_s, State.READY: float("inf")}
        return [
            f"{replica.name} has been {replica.state.value} for {self._at_s - replica.since_s:.0f} s"
            for replica in self._listed.values()
            if replica.role.is_in(pool) and self._at_s - replica.since_s > limits[replica.state]
        ]

    def _devices(self, role: Role) -> int:
        return self._policy.pools.of(Role.DECODE if role is Role.MIXED else role).devices_per_replica
