"""Decides how many replicas each pool has, and what each replica's role is. Pure.

Without fresh figures a pool keeps its size, or grows to its fallback.
"""

from pdserve.autoscaler.decisions import Action, Add, Binds, Decision
from pdserve.autoscaler.observation import Observation, State
from pdserve.autoscaler.schedules import bounds
from pdserve.autoscaler.schema import Policy
from pdserve.roles import Role

POOLS = (Role.PREFILL, Role.DECODE)


class Autoscaler:
    """Turns observations into orders, one in flight for each pool.

    A shell gives it every observation, carries out the actions of its decisions that are not advisory, and reports for
    each of them that it was ordered, or that it failed. What was ordered counts as done once it is observed.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def decide(self, observation: Observation) -> tuple[Decision, ...]:
        """Return a decision for each pool."""
        names = {replica.name for replica in observation.replicas}
        decisions = []
        for pool in POOLS:
            here = [r for r in observation.replicas if r.role.is_in(pool) and r.state is not State.DRAINING]
            least, _ = bounds(self._policy, pool, observation.unix_s)
            action = Add(free_name(pool, names), pool) if len(here) < least else None
            decisions.append(Decision(pool, action, len(here), least, Binds.MIN, f"{len(here)} replicas", ""))
        return tuple(decisions)

    def ordered(self, action: Action, at_s: float) -> None:
        """Take note that the actuator has taken an action on."""

    def failed(self, action: Action, reason: str, at_s: float) -> None:
        """Take note that an action was not carried out, or that nobody knows whether it was."""


def free_name(pool: Role, names: set[str]) -> str:
    """Return the name of a pool with the lowest number that nobody has."""
    return next(name for number in range(len(names) + 1) if (name := f"{pool}-{number}") not in names)
