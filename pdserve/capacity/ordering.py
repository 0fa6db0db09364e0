"""Turns a wanted number of replicas into orders, for rules that decide nothing but that number."""

from collections.abc import Sequence
from itertools import count

from pdserve.autoscaler.decisions import Action, Add, Binds, Decision, Drain
from pdserve.autoscaler.observation import Observation, Replica, State
from pdserve.autoscaler.urgent import CAUSES
from pdserve.roles import Role
from pdserve.values import value


@value
class Wanted:
    """A number of replicas, and what it is based on."""

    num_replicas: int
    binds: Binds
    seen: str


@value
class Limits:
    """How small and how large a pool may be."""

    least: int
    most: int

    def within(self, num_replicas: int) -> int:
        return max(self.least, min(self.most, num_replicas))


def pool_of(observation: Observation, role: Role, *states: State) -> list[Replica]:
    """Return the replicas of a pool in one of these states; without any named, those that do not drain."""
    listed = states or (State.STARTING, State.READY)
    return [replica for replica in observation.replicas if replica.role is role and replica.state in listed]


def num_refused(observation: Observation, role: Role) -> int:
    """Return how many requests were refused since the last look because of a pool."""
    return sum(observation.refused.get(cause, 0) for cause in CAUSES[role])


def devices_left(observation: Observation, max_devices: int) -> int:
    """Return how many devices no replica holds."""
    return max_devices - sum(observation.capacities[each.role].num_devices for each in observation.replicas)


class Rules:
    """Rules that go by what is observed alone, and need no word of what became of their orders."""

    def ordered(self, action: Action, at_s: float) -> None:
        """Change nothing: the replica is observed."""

    def failed(self, action: Action, reason: str, at_s: float) -> None:
        """Change nothing: the replica is not observed, and ordered again."""


class Orders:
    """Orders replicas, and drains those that start first, then the emptiest."""

    def __init__(self, prefix: str) -> None:
        self._names = (f"{prefix}-{number}" for number in count(1))

    def towards(self, observation: Observation, role: Role, wanted: Wanted, num_devices: int) -> Sequence[Decision]:
        """Return the orders that bring a pool to its wanted size, or as near as so many devices allow."""
        pool, most = pool_of(observation, role), max(0, num_devices) // observation.capacities[role].num_devices
        num_lacking, num_spare = wanted.num_replicas - len(pool), len(pool) - wanted.num_replicas
        actions: list[Action] = [Add(next(self._names), role) for _ in range(min(most, num_lacking))]
        cheapest = sorted(pool, key=lambda replica: (replica.state is not State.STARTING, replica.num_sequences))
        actions += [Drain(replica.name) for replica in cheapest[: max(0, num_spare)]]
        return [
            Decision(role, action, len(pool), wanted.num_replicas, wanted.binds, wanted.seen, predicted="nothing")
            for action in actions
        ]
