"""Decides how many replicas each pool has, and what each replica's role is. Pure.

Invariant: no order leads out of a pool's limits or beyond the budget, no pool has two orders in flight, and without
fresh figures no pool shrinks.

A mixed worker counts in both pools, as it serves both. It is drained as a last resort, where both are to shrink, and
never changes its role.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.autoscaler.decisions import Action, Add, Binds, Decision, Drain, Flip, other
from pdserve.autoscaler.observation import Observation, Replica, State
from pdserve.autoscaler.pacing import Pacing
from pdserve.autoscaler.planning import Plan, Planner
from pdserve.autoscaler.schema import Policy
from pdserve.autoscaler.supply import Orders, Outcome, ReplicaHistory, Result, Supply
from pdserve.base.roles import POOLS, Role

_LATE = 2.0  # times its start-up: when what was ordered counts as late
_LEAST_LATE_S = 30.0
_FAR_TOO_MANY = 1.5  # times the wanted size: then a pool does not wait for one drain before the next


@dataclass(slots=True)
class _Goal:
    """What a pool is to become, and why it may not."""

    size: int
    target: int
    binds: Binds
    refused: list[str]
    is_forced: bool = False  # by its limits, or as nobody serves: windows and rates do not count
    is_rescue: bool = False  # nobody serves: only a flip helps, as replicas that start hold the devices
    action: Action | None = None
    is_given: bool = False  # an order is given now: its own, or a flip to the other pool


class Autoscaler:
    """Turns observations into orders, one in flight for each pool.

    A shell gives it every observation, carries out the actions of its decisions that are not advisory, and reports for
    each of them that it was ordered, or that it failed. What was ordered counts as done once it is observed. After a
    restart everything is learnt from observations again.
    """

    def __init__(self, policy: Policy, warm_up: Sequence[tuple[float, float]] = ()) -> None:
        """`warm_up`: earlier forecast intervals, each with its prompt tokens to compute and answer tokens a second."""
        self._policy = policy
        self._planner = Planner(policy, warm_up)
        self._orders = Orders()
        self._history = ReplicaHistory()
        self._pacing: dict[Role, Pacing] = {}
        self._outcomes: list[Outcome] = []
        self._num_stale = 0  # reactions in a row without fresh figures

    def follow(self, policy: Policy, warm_up: Sequence[tuple[float, float]] = ()) -> None:
        """Follow another policy. Orders and what was learnt stay, but not demand if it is to be forecast otherwise."""
        before, self._policy = self._policy, policy
        self._planner.policy = policy
        if (policy.forecaster, policy.interval) != (before.forecaster, before.interval):
            self._planner = Planner(policy, warm_up)
        for pool, pacing in self._pacing.items():
            pacing.behavior = policy.pools.of(pool).behavior

    def decide(self, observation: Observation) -> tuple[Decision, ...]:
        """Return a decision for each pool."""
        at_s, replicas = observation.at_s, {replica.name: replica for replica in observation.replicas}
        if not self._pacing:
            self._pacing = {pool: Pacing(self._policy.pools.of(pool).behavior, at_s) for pool in POOLS}
        self._history.observe(observation.replicas, at_s)
        late_s = {pool: self._late_s(pool) for pool in POOLS}
        self._note(self._orders.settle(replicas, late_s, at_s))
        supply = Supply(self._policy.pools, observation, self._orders.unseen(replicas))
        plan = self._plan(observation, supply)
        if isinstance(plan, Plan):
            for pool in POOLS:
                self._pacing[pool].want(plan.wanted[pool], at_s)
        goals = {pool: self._goal(pool, supply, plan, has_requests=observation.has_requests) for pool in POOLS}
        for pool in sorted(POOLS, key=lambda pool: self._urgency(pool, goals[pool], plan)):
            if goals[pool].target > goals[pool].size and not goals[pool].is_given:
                self._grow(pool, goals, supply)
        for pool in POOLS:
            if goals[pool].target < goals[pool].size and not goals[pool].is_given:
                self._shrink(pool, goals, supply)
        return tuple(self._decision(pool, goals[pool], plan, at_s) for pool in POOLS)

    def ordered(self, action: Action, at_s: float) -> None:
        """Take note that the actuator has taken an action on."""
        self._orders.confirm(action, at_s)

    def failed(self, action: Action, reason: str, at_s: float) -> None:
        """Take note that an action was not carried out, or that nobody knows whether it was."""
        self._note(self._orders.fail(action, reason, at_s))

    def take_outcomes(self) -> tuple[Outcome, ...]:
        """Return how orders have ended since the last call."""
        outcomes, self._outcomes = tuple(self._outcomes), []
        return outcomes

    def startup_s(self, pool: Role) -> float:
        """Return how long a replica of a pool takes from the order until it serves; a guess until one was seen."""
        return self._history.startup_s.get(pool, self._policy.pools.of(pool).startup_s)

    # ---- what is there

    def _late_s(self, pool: Role) -> float:
        return max(_LEAST_LATE_S, _LATE * self.startup_s(pool))

    def _note(self, outcomes: Sequence[Outcome]) -> None:
        self._outcomes += outcomes
        for outcome in outcomes:
            if outcome.result is Result.DONE:
                continue
            if isinstance(outcome.action, Add):
                self._history.forget(outcome.action.name)
            for pool, by in outcome.effects.items():
                self._pacing[pool].unchanged(by)

    # ---- what is wanted

    def _plan(self, seen: Observation, supply: Supply) -> Plan | str:
        """Return what sizes are wanted, or why nobody can say."""
        if seen.demand is None:
            self._num_stale += 1
            return f"no router has reported, {self._num_stale} times in a row"
        self._num_stale = 0
        startup_s = {pool: self.startup_s(pool) for pool in POOLS}
        self._planner.observe(seen.demand, seen, startup_s)
        return self._planner.plan(seen, supply.sizes, supply.limits, startup_s)

    def _goal(self, pool: Role, supply: Supply, plan: Plan | str, *, has_requests: bool) -> _Goal:
        size, limits, at_s = supply.sizes[pool], supply.limits[pool], supply.at_s
        notes = supply.late(pool, self._late_s(pool), self._policy.pools.of(pool).drain_timeout_s)
        if size < limits.least:
            return _Goal(size, limits.least, Binds.MIN, notes, is_forced=True)
        if size == 0 and has_requests:
            return _Goal(size, 1, Binds.WAITING, notes, is_forced=True)
        if self._has_failed(pool, supply):
            return _Goal(size, max(size, min(size + 1, limits.most)), Binds.LATE, notes, is_forced=True, is_rescue=True)
        if isinstance(plan, str):
            fallback = self._policy.pools.of(pool).fallback
            if self._num_stale >= fallback.failure_threshold and fallback.replicas is not None:
                return _Goal(
                    size, max(size, min(limits.most, fallback.replicas)), Binds.FALLBACK, notes, is_forced=True
                )
            return _Goal(size, size, Binds.STALE if self._num_stale else Binds.NOTHING, notes)
        if sum(replica.state is State.READY for replica in supply.of(pool)) > limits.most:
            return _Goal(size, limits.most, Binds.MAX, notes, is_forced=True)
        pacing = self._pacing[pool]
        grown, kept_from = pacing.grown(size, at_s)
        if grown == size and not kept_from:
            shrunk, kept_from = pacing.shrunk(size, at_s)
            target = max(limits.least, shrunk)
        else:
            target = min(limits.most, grown)
        return _Goal(size, target, plan.binds[pool], [*notes, kept_from] if kept_from else notes)

    def _has_failed(self, pool: Role, supply: Supply) -> bool:
        """Return whether no replica of a pool serves, and each one that starts takes longer than a start does."""
        startup_s = self.startup_s(pool)
        here = supply.of(pool)
        is_late = [r.state is State.STARTING and supply.at_s - r.since_s > startup_s for r in here]
        return all(is_late) and bool(here)

    @staticmethod
    def _urgency(pool: Role, goal: _Goal, plan: Plan | str) -> tuple[bool, float]:
        """Return a sort key: first what is below its least size, then what serves the fewest in time."""
        return not goal.is_forced, 0.0 if isinstance(plan, str) else plan.attained[pool]

    # ---- orders

    def _grow(self, pool: Role, goals: dict[Role, _Goal], supply: Supply) -> None:
        goal, at_s = goals[pool], supply.at_s
        why = self._orders.blocked(pool, 1, at_s)
        if why:
            goal.refused.append(why)
            return
        owed = self._orders.owed(pool, 1)
        flip = None if isinstance(owed, Add) else self._flip(pool, goals, supply)
        if flip is not None:
            self._order(pool, flip, {pool: 1, other(pool): -1}, goals, at_s)
            return
        if goal.is_rescue:
            return
        used = supply.devices(besides=owed)
        if used + supply.limits[pool].devices > self._policy.budget.max_devices:
            goal.refused.append(f"{used} of {self._policy.budget.max_devices} devices are held")
            return
        add = owed if isinstance(owed, Add) and owed.name not in supply.listed else Add(supply.free_name(pool), pool)
        supply.expect(add)
        self._order(pool, add, {pool: 1}, goals, at_s)

    def _flip(self, pool: Role, goals: dict[Role, _Goal], supply: Supply) -> Flip | None:
        """Return a replica's change of roles that leaves the other pool what it needs, if there is one."""
        giver, at_s = other(pool), supply.at_s
        switch, theirs, goal = self._policy.role_switch, goals[giver], goals[pool]
        if not switch.enabled or self._num_stale:
            return None
        needed = supply.limits[giver].least
        if not goal.is_rescue:
            needed = max(needed, self._pacing[giver].needed(at_s))
        serving = [replica for replica in supply.of(giver) if replica.state is State.READY]
        if theirs.is_given or theirs.target > theirs.size or min(theirs.size, len(serving)) <= needed:
            return None
        why = self._orders.blocked(giver, -1, at_s)
        owed = self._orders.owed(giver, -1)
        if why or not (owed is None or isinstance(owed, Flip)):
            goal.refused.append(f"no flip from {giver}: {why or 'an earlier order may still be carried out'}")
            return None
        able = [r for r in serving if r.role is giver and self._history.in_role_s(r.name, at_s) >= switch.min_dwell_s]
        if not able:
            goal.refused.append(f"no flip from {giver}: none has kept its role for {switch.min_dwell_s:.0f} s")
            return None
        if isinstance(owed, Flip) and owed.role is pool and any(r.name == owed.name for r in able):
            return owed
        return Flip(min(able, key=_cost_of_drain).name, pool)

    def _shrink(self, pool: Role, goals: dict[Role, _Goal], supply: Supply) -> None:
        goal = goals[pool]
        why = self._orders.blocked(pool, -1, supply.at_s)
        if not why and supply.num_draining(pool) and goal.size <= _FAR_TOO_MANY * goal.target:
            why = "another replica drains"
        candidates = self._drainable(pool, goals, supply.of(pool))
        if why or not candidates:
            goal.refused.append(why or "replicas that start would have to serve first, and mixed ones serve both pools")
            return
        replica = min(candidates, key=_cost_of_drain)
        changes = {each: -1 for each in POOLS if replica.role.is_in(each)}
        self._order(pool, Drain(replica.name), changes, goals, supply.at_s)

    def _drainable(self, pool: Role, goals: dict[Role, _Goal], here: Sequence[Replica]) -> Sequence[Replica]:
        goal, theirs = goals[pool], goals[other(pool)]
        able = [replica for replica in here if replica.role is pool]
        both_shrink = theirs.target < theirs.size and not theirs.is_given and not self._orders.in_flight(other(pool))
        if not able and both_shrink:
            able = list(here)
        owed = self._orders.owed(pool, -1)
        if isinstance(owed, Drain) and (again := [replica for replica in able if replica.name == owed.name]):
            return again
        if sum(replica.state is State.READY for replica in here) <= goal.target and not goal.is_forced:
            return [replica for replica in able if replica.state is State.STARTING]
        return able

    def _order(
        self, pool: Role, action: Action, changes: dict[Role, int], goals: dict[Role, _Goal], at_s: float
    ) -> None:
        """Give an order that changes the sizes of pools; one that is not to be carried out changes nothing."""
        goals[pool].action = action
        for each in changes:
            goals[each].is_given = True
        if self._policy.mode == "advisory":
            return
        self._orders.begin(action, changes, at_s)
        held_s = self._policy.role_switch.min_dwell_s
        if isinstance(action, Add):
            self._history.asked(action.name, at_s)
            held_s += self.startup_s(pool)
        for each, by in changes.items():
            self._pacing[each].changed(by, goals[each].size + by, held_s, at_s)

    # ---- reports

    def _decision(self, pool: Role, goal: _Goal, plan: Plan | str, at_s: float) -> Decision:
        seen, predicted = (plan, "") if isinstance(plan, str) else (plan.seen, plan.predicted)
        in_flight = self._orders.in_flight(pool)
        if in_flight is not None and in_flight != goal.action and goal.target == goal.size:
            goal.refused.append(self._orders.blocked(pool, 1, at_s))
        return Decision(
            pool=pool,
            action=goal.action,
            num_replicas=goal.size,
            desired=goal.target,
            binds=goal.binds,
            seen=seen,
            predicted=predicted,
            refused="; ".join(goal.refused),
            advisory=self._policy.mode == "advisory",
        )


def _cost_of_drain(replica: Replica) -> tuple[bool, int, int, int, str]:
    """Return a sort key: one that has not started, then the least to finish or to move, then the latest."""
    number = replica.name.rpartition("-")[2]
    latest = -int(number) if number.isascii() and number.isdigit() else 0
    left = replica.waiting_tokens + replica.kv_tokens
    return replica.state is not State.STARTING, left, replica.num_sequences, latest, replica.name
