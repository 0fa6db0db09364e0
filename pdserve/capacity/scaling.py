"""Serves a workload under virtual time on pools that something scales: the autoscaler's core, or another set of rules.

It sees what the autoscaler sees of a live cluster: what the router counts, what the router knows of its workers, and
the replicas of the actuator.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from pdserve.autoscaler.actuator import ActuatorError
from pdserve.autoscaler.decisions import Action, Decision
from pdserve.autoscaler.observation import Capacity, Observation
from pdserve.capacity.fleet import ElasticCluster, Fleet, Sizes, replica_seconds
from pdserve.capacity.shape import Shape
from pdserve.demand import Demand
from pdserve.measure.outcomes import Objective, Outcome
from pdserve.measure.workload import Workload
from pdserve.perfmodel.profile import Profile
from pdserve.roles import POOLS, Role
from pdserve.values import value


class Scaler(Protocol):
    """Decides how many replicas each pool has."""

    def decide(self, observation: Observation) -> Sequence[Decision]:
        """Return what to do now."""

    def ordered(self, action: Action, at_s: float) -> None:
        """Take note that an action was taken on."""

    def failed(self, action: Action, reason: str, at_s: float) -> None:
        """Take note that an action was not carried out."""


@value
class Slow:
    """A stretch of time in which steps take longer, as beside a noisy neighbour."""

    factor: float
    from_s: float
    until_s: float


@dataclass(frozen=True, slots=True)
class Scene:
    """What is served, on what, and how fast workers start."""

    profile: Profile
    workload: Workload  # from 0 s on
    objective: Objective
    shape: Shape  # what the cluster begins with
    startup_s: Mapping[Role, float]
    slow: tuple[Slow, ...] = ()
    placement: str = "goodput"  # of the router
    unix_s: float = 0.0  # when it begins

    @property
    def span_s(self) -> float:
        """Until the last request comes."""
        return self.workload.arrivals[-1].at_s


@value
class Noted:
    """A decision with an action, and why the action failed if it did."""

    at_s: float
    decision: Decision
    error: str = ""


@dataclass(frozen=True, slots=True)
class Scaled:
    """What came of it."""

    name: str
    outcomes: tuple[Outcome, ...]
    sizes: tuple[Sizes, ...]
    orders: tuple[Noted, ...]  # decisions with an action
    span_s: float

    @property
    def replica_hours(self) -> Mapping[Role, float]:
        """Replicas of each pool times the hours that they were paid for, until the last request came."""
        return {role: paid_s / 3600 for role, paid_s in replica_seconds(self.sizes, self.span_s).items()}

    def attainment(self, objective: Objective) -> float:
        """Return the share of all requests within both objectives, refused ones counted."""
        return sum(outcome.meets(objective) for outcome in self.outcomes) / len(self.outcomes)

    @property
    def refused(self) -> float:
        """Share of all requests that were refused."""
        return sum(outcome.is_refused for outcome in self.outcomes) / len(self.outcomes)


class Scaling:
    """One run: looks at the cluster every few seconds, and carries out what its scaler decides."""

    def __init__(self, scene: Scene, scaler: Scaler | None = None, every_s: float = 5.0) -> None:
        """Without a scaler the pools stay as they are."""
        self._scene = scene
        self._scaler = scaler
        self._every_s = every_s
        self._cluster = ElasticCluster(scene.profile, scene.shape, scene.placement, scene.workload, scene.objective)
        self._fleet = Fleet(self._cluster, scene.startup_s)
        self._orders: list[Noted] = []
        self._seen = Demand()
        self._refused: Counter[str] = Counter()
        self._looked_s = 0.0

    def run(self, name: str) -> Scaled:
        """Serve the whole workload, each request to its end."""
        clock = self._cluster.clock
        for slow in self._scene.slow:
            clock.at(slow.from_s, self._cluster.slow_down, slow.factor)
            clock.at(slow.until_s, self._cluster.slow_down, 1.0)
        if self._scaler is not None:
            clock.at(self._every_s, self._look, self._scaler)
        run = self._cluster.run()
        return Scaled(name, run.outcomes, tuple(self._fleet.history), tuple(self._orders), self._scene.span_s)

    def _look(self, scaler: Scaler) -> None:
        clock = self._cluster.clock
        for decision in scaler.decide(self._observe()):
            if decision.action is not None:
                self._carry_out(scaler, decision, decision.action)
        if clock.now_s() + self._every_s < self._scene.span_s:
            clock.at(clock.now_s() + self._every_s, self._look, scaler)

    def _carry_out(self, scaler: Scaler, decision: Decision, action: Action) -> None:
        now_s, error = self._cluster.clock.now_s(), ""
        if not decision.advisory:
            try:
                self._fleet.carry_out(action)
                scaler.ordered(action, now_s)
            except ActuatorError as failed:
                error = str(failed)
                scaler.failed(action, error, now_s)
        self._orders.append(Noted(now_s, decision, error))

    def _observe(self) -> Observation:
        router, builder, now_s = self._cluster.router, self._cluster.builder, self._cluster.clock.now_s()
        counted = router.placements.demand.counted()
        refused = Counter({cause.value: count for cause, count in router.placements.refused_because.items()})
        shape = self._scene.shape
        costs = {view.role: router.predictor.costs.of(view).step_costs(shape.max_num_seqs) for view in router.workers}
        capacities = {
            role: Capacity(
                builder.num_pages(role) * builder.page_size,
                shape.max_num_seqs,
                builder.step_tokens[role],
                builder.page_size,
            )
            for role in POOLS
        }
        observation = Observation(
            at_s=now_s,
            unix_s=self._scene.unix_s + now_s,
            replicas=self._fleet.replicas(),
            demand=counted.since(self._seen),
            seconds=now_s - self._looked_s,
            num_held=router.num_held,
            refused=refused - self._refused,
            costs={**builder.costs, **costs},
            capacities=capacities,
        )
        self._seen, self._refused, self._looked_s = counted, refused, now_s
        return observation
