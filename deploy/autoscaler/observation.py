"""What the autoscaler sees of a cluster. Pure values."""

from collections.abc import Mapping
from dataclasses import field
from enum import Enum

from pdserve.demand import Demand
from pdserve.perfmodel.curve import StepCosts
from pdserve.roles import Role
from pdserve.values import value


class State(Enum):
    """Where a replica is in its life. One that has ended is not listed."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


@value
class Replica:
    """One worker, as its actuator and its routers know it."""

    name: str
    role: Role
    state: State
    since_s: float  # when it was first seen in this state, as `Observation.at_s`
    num_sequences: int = 0  # that it runs, and that wait for their prompts there
    waiting_tokens: int = 0  # of prompts, yet to be computed there
    kv_tokens: int = 0  # of the sequences that it runs


def sequences_of(role: Role, num_running: int, num_waiting: int) -> int:
    """Return how many sequences of a replica count as its own, so that all replicas count each one once.

    What waits for pages in decode is also in the load of the worker that computes its prompt, or that moves it.
    """
    return num_running + (0 if role is Role.DECODE else num_waiting)


@value
class Capacity:
    """What one replica of a role holds at most."""

    kv_tokens: int
    max_num_seqs: int
    step_tokens: int  # that a step computes
    page_tokens: int = 1


@value
class Observation:
    """A cluster at one moment, and what it did since the last one."""

    at_s: float  # of a clock that never goes back
    unix_s: float  # for schedules
    replicas: tuple[Replica, ...]
    demand: Demand | None  # None: no router has reported, so nothing else here but the replicas is fresh
    seconds: float = 0.0  # that the demand came in
    num_held: int = 0  # requests that wait in routers for a place
    refused: Mapping[str, int] = field(default_factory=dict)  # since the last one, by what bound them (`Cause.value`)
    costs: Mapping[Role, StepCosts] = field(default_factory=dict)  # of steps, as learnt or from a profile
    capacities: Mapping[Role, Capacity] = field(default_factory=dict)
