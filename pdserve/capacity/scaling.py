"""Serves a workload under virtual time on pools that something scales: the autoscaler's core, or another set of rules.

It sees what the autoscaler sees of a live cluster: what the router counts, what the router knows of its workers, and
the replicas of the actuator.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from pdserve.autoscaler.decisions import Action, ActuatorError, Decision
from pdserve.autoscaler.observation import Capacity, Observation, State
from pdserve.autoscaler.policy import Autoscaler
from pdserve.autoscaler.schema import Policy
from pdserve.base.roles import POOLS, Role
from pdserve.base.values import value
from pdserve.capacity.fleet import Fleet, Sizes
from pdserve.capacity.worker import Shape
from pdserve.measure.html_report import Line, Plot, plot, stepped
from pdserve.measure.outcomes import Objective, Outcome, percentiles
from pdserve.measure.read_workload import warm_up
from pdserve.measure.workload import Workload
from pdserve.perfmodel.profile import Profile
from pdserve.protocol.reports import Demand

Decide = Callable[[Observation], Sequence[Decision]]


@value
class Slowdown:
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
    slow: tuple[Slowdown, ...] = ()

    @property
    def span_s(self) -> float:
        """Until the last request comes."""
        return self.workload.arrivals[-1].at_s


def scene_of(
    policy: Policy,
    workload: Workload,
    profile: Profile,
    replicas: tuple[int | None, int | None],
    startup_s: float | None,
    slow: tuple[Slowdown, ...],
) -> Scene:
    """Return the scene of a policy. `replicas`: of each pool at the start, by default the least that it allows."""
    pools = policy.pools
    return Scene(
        profile=profile,
        workload=workload,
        objective=Objective(policy.objectives.ttft_s, policy.objectives.tpot_s),
        shape=Shape(
            replicas[0] or pools.prefill.min_replicas,
            replicas[1] or pools.decode.min_replicas,
            pools.prefill.devices_per_replica,
            pools.decode.devices_per_replica,
            local_prefill=False,
        ),
        startup_s={role: pools.of(role).startup_s if startup_s is None else startup_s for role in POOLS},
        slow=slow,
    )


@value
class Order:
    """A decision with an action, and why the action failed, if it did."""

    at_s: float
    decision: Decision
    error: str = ""


@dataclass(frozen=True, slots=True)
class Scaled:
    """What came of it."""

    name: str
    outcomes: tuple[Outcome, ...]
    sizes: tuple[Sizes, ...]
    orders: tuple[Order, ...]  # decisions with an action
    span_s: float

    @property
    def replica_hours(self) -> Mapping[Role, float]:
        """Replicas of each pool times the hours that they were paid for, until the last request came."""
        ends_s = [*(each.at_s for each in self.sizes[1:]), inf]
        lasted = [
            (sizes, min(end_s, self.span_s) - sizes.at_s) for sizes, end_s in zip(self.sizes, ends_s, strict=True)
        ]
        return {role: sum(max(0.0, paid_s) * each.count(role) for each, paid_s in lasted) / 3600 for role in POOLS}

    def attainment(self, objective: Objective) -> float:
        """Return the share of all requests within both objectives, refused ones counted."""
        return sum(outcome.meets(objective) for outcome in self.outcomes) / len(self.outcomes)

    @property
    def refused(self) -> float:
        """Share of all requests that were refused."""
        return sum(outcome.is_refused for outcome in self.outcomes) / len(self.outcomes)


class Scaling:
    """One run: looks at the cluster every few seconds, and carries out what is decided."""

    def __init__(
        self, scene: Scene, decide: Decide = lambda _: (), every_s: float = 5.0, autoscaler: Autoscaler | None = None
    ) -> None:
        """`autoscaler` learns what became of its orders. Other rules only go by what they observe."""
        self._scene = scene
        self._decide = decide
        self._every_s = every_s
        self._autoscaler = autoscaler
        self._fleet = Fleet(scene.profile, scene.shape, scene.workload, scene.objective, scene.startup_s)
        self._orders: list[Order] = []
        self._seen = Demand()
        self._refused: Counter[str] = Counter()
        self._looked_s = 0.0

    def run(self, name: str) -> Scaled:
        """Serve the whole workload, each request to its end."""
        clock = self._fleet.clock
        for slow in self._scene.slow:
            clock.at(slow.from_s, self._fleet.slow_down, slow.factor)
            clock.at(slow.until_s, self._fleet.slow_down, 1.0)
        clock.at(self._every_s, self._look)
        run = self._fleet.run()
        return Scaled(name, run.outcomes, tuple(self._fleet.history), tuple(self._orders), self._scene.span_s)

    def _look(self) -> None:
        clock = self._fleet.clock
        for decision in self._decide(self._observe()):
            if decision.action is not None:
                self._carry_out(decision, decision.action)
        if clock.now_s() + self._every_s < self._scene.span_s:
            clock.at(clock.now_s() + self._every_s, self._look)

    def _carry_out(self, decision: Decision, action: Action) -> None:
        now_s, error = self._fleet.clock.now_s(), ""
        if not decision.advisory:
            try:
                self._fleet.carry_out(action)
            except ActuatorError as failed:
                error = str(failed)
            if self._autoscaler is not None and error:
                self._autoscaler.failed(action, error, now_s)
            elif self._autoscaler is not None:
                self._autoscaler.ordered(action, now_s)
        self._orders.append(Order(now_s, decision, error))

    def _observe(self) -> Observation:
        router, builder, now_s = self._fleet.router, self._fleet.builder, self._fleet.clock.now_s()
        counted = router.placements.demand.counted()
        refused = Counter({cause.value: count for cause, count in router.placements.refused_because.items()})
        shape = self._scene.shape
        costs = {view.role: router.predictor.costs.of(view).step_costs(shape.max_num_seqs) for view in router.workers}
        capacities = {
            role: Capacity(
                builder.layout.paging.whole_tokens(builder.num_pages(role)),
                shape.max_num_seqs,
                builder.step_tokens[role],
                builder.page_size,
                builder.layout.paging.shapes if builder.layout.others else (),
            )
            for role in POOLS
        }
        observation = Observation(
            at_s=now_s,
            unix_s=now_s,  # it begins with a day
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


def follow(scene: Scene, policy: Policy) -> Scaled:
    """Return the run of the autoscaler's core under a policy."""
    core = Autoscaler(policy, warm_up(policy))
    return Scaling(scene, core.decide, policy.interval.react_s, core).run("policy")


# ---- figures, plots over time, and the log of decisions

_BIN_S = 60.0


def result(run: Scaled, policy: Policy, objective: Objective) -> dict[str, object]:
    """Return all of a run but its single requests. Of lists, only the JSON has more than the table."""
    pools = {role: policy.pools.of(role) for role in POOLS}
    orders = Counter(noted.decision.verb for noted in run.orders if not noted.error and not noted.decision.advisory)
    served = [outcome for outcome in run.outcomes if outcome.is_good]
    return {
        "name": run.name,
        "attainment": run.attainment(objective),
        "refused": run.refused,
        "device_hours": sum(hours * pools[role].devices_per_replica for role, hours in run.replica_hours.items()),
        "mean_replicas": {role: run.replica_hours[role] / run.span_s * 3600 for role in POOLS},
        "most_devices": max(
            sum(sizes.count(role) * pools[role].devices_per_replica for role in POOLS) for sizes in run.sizes
        ),
        "cost": sum(hours * pools[role].cost_per_replica_hour for role, hours in run.replica_hours.items()),
        "orders": orders,
        "ttft_s": percentiles(outcome.ttft_s for outcome in served),
        "tpot_s": percentiles(outcome.tpot_s for outcome in served),
        "num_requests": len(run.outcomes),
        "attainment_over_time": attained_over_time(run, objective),
        "sizes": [
            {"at_s": each.at_s, **{f"{s.value} {role}": each.counts[s][role] for s in State for role in POOLS}}
            for each in run.sizes
        ],
        "decisions": log(run),
    }


def log(run: Scaled) -> list[str]:
    """Return the decisions that were to be carried out, a line each."""
    return [
        f"{each.at_s:7.0f} s  {each.decision.text}{f'; failed: {each.error}' if each.error else ''}"
        for each in run.orders
    ]


def attained_over_time(run: Scaled, objective: Objective) -> list[tuple[float, float]]:
    """Return the share within both objectives of what came in each minute; its middle in seconds."""
    bins = [[0, 0] for _ in range(int(run.span_s / _BIN_S) + 1)]
    for outcome in run.outcomes:
        counts = bins[int(outcome.sent_s / _BIN_S)]
        counts[0] += 1
        counts[1] += outcome.meets(objective)
    return [((place + 0.5) * _BIN_S, good / count) for place, (count, good) in enumerate(bins) if count]


def charts(runs: Sequence[Scaled], workload: Workload, objective: Objective) -> list[Plot]:
    """Return demand, the first run's replicas, and attainment and refusals of all runs, over time."""
    tokens = ((each.at_s, each.prompt_tokens + each.output_tokens) for each in workload.arrivals)
    sent = Line("sent", _each_second((each.at_s, 1) for each in workload.arrivals))
    attained = [(run.name, attained_over_time(run, objective)) for run in runs]
    within = [Line(name, [(at_s / 60, 100 * share) for at_s, share in shares]) for name, shares in attained]
    refused = [Line(run.name, _each_second((each.sent_s, each.is_refused) for each in run.outcomes)) for run in runs]
    return [
        plot("Requests", ("minutes", "requests per second"), [sent]),
        plot("Tokens", ("minutes", "tokens per second"), [Line("prompts and answers", _each_second(tokens))]),
        plot("Replicas", ("minutes", "replicas"), _replicas(runs)),
        plot("Within both objectives", ("minutes", "% of requests"), within, y_end=100.0),
        plot("Refused", ("minutes", "requests per second"), refused),
    ]


def _each_second(counts: Iterable[tuple[float, int]]) -> list[tuple[float, float]]:
    """Return the middle of each minute, in minutes, and what was counted in a second of it."""
    sums = Counter[int]()
    for at_s, count in counts:
        sums[int(at_s / _BIN_S)] += count
    return [((place + 0.5) * _BIN_S / 60, sums[place] / _BIN_S) for place in range(max(sums, default=-1) + 1)]


def _replicas(runs: Sequence[Scaled]) -> list[Line]:
    """Return the replicas of each pool of the first run that serve and that are paid for, and those of the others."""
    first, lines = runs[0], list[Line]()
    for role in POOLS:
        lines.append(
            _over_time(f"{role}, {first.name}", first, [each.count(role, State.READY) for each in first.sizes])
        )
        lines.append(_over_time(f"{role}, paid for", first, [each.count(role) for each in first.sizes]))
    for run in runs[1:]:
        lines.append(_over_time(f"both, {run.name}", run, [sum(map(each.count, POOLS)) for each in run.sizes]))
    return lines


def _over_time(name: str, run: Scaled, counts: Sequence[int]) -> Line:
    points = [(each.at_s / 60, count) for each, count in zip(run.sizes, counts, strict=True)]
    return Line(name, stepped([*points, (run.span_s / 60, counts[-1])]))
