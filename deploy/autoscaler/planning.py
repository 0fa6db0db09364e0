"""Finds what sizes demand asks of both pools: as it is forecast, and as it is now. Pure.

The slow loop forecasts, for each pool, the tokens that come in a second: to compute, and to decode. The fast loop takes
what certainly comes at this moment, and what would have served the requests that were refused, where that is more. Both
pools are sized together, so that a budget that is too small is split once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil

from pdserve.autoscaler.decisions import Binds
from pdserve.autoscaler.forecast import new_forecaster
from pdserve.autoscaler.misses import Misses, for_losses, num_refused
from pdserve.autoscaler.observation import Observation, Replica, State
from pdserve.autoscaler.pacing import Wanted
from pdserve.autoscaler.pools import Bounds, Signal
from pdserve.autoscaler.schema import Policy
from pdserve.autoscaler.sizing import Sized, Sizer, devices_of
from pdserve.autoscaler.traffic import DecayingCounts, Traffic, mean
from pdserve.base.roles import POOLS, Role
from pdserve.base.values import value
from pdserve.protocol.reports import Demand

_LEAST_MIXTURE_S = 60.0  # over which lengths are counted at least
_LEAST_PRESENT_S = 15.0  # over which the present rate is counted; never less than a start-up takes
_ALL = 0.995  # share of the requests; the text says so if pools without end would serve fewer in time
_NONE = 1e-3  # requests of late that count as none
_WORTH = 0.01  # share of all requests that another split of a spent budget has to serve beyond the present


@value
class Plan:
    """What both pools should be."""

    wanted: Mapping[Role, Wanted]
    binds: Mapping[Role, Binds]
    attained: Mapping[Role, float]  # what each pool is predicted to serve in time as it is
    seen: str
    predicted: str


class Planner:
    """The slow loop and the fast loop."""

    def __init__(self, policy: Policy, warm_up: Sequence[tuple[float, float]]) -> None:
        """`warm_up`: earlier intervals, each with its prompt tokens to compute and its answer tokens a second."""
        self.policy, self._interval_s = policy, policy.interval.forecast_s
        self._mixture = DecayingCounts(max(_LEAST_MIXTURE_S, 2 * policy.interval.forecast_s))
        self._present = DecayingCounts(_LEAST_PRESENT_S)
        season = round((policy.forecaster.season_s or 0.0) / self._interval_s)
        self._forecasters = {
            pool: new_forecaster(policy.forecaster.kind, policy.forecaster.quantile, season) for pool in POOLS
        }
        for tokens in warm_up:
            self._take_in(*tokens)
        self._is_warm = bool(warm_up)
        self._interval = DecayingCounts(1e9)  # counts alone
        self._refused = dict.fromkeys(POOLS, 0.0)  # of late, by the pool that lacked something
        self._serving = dict.fromkeys(POOLS, 0.0)  # replicas, for each request of late
        self._misses = Misses()
        guesses_s = {pool: policy.pools.of(pool).startup_s for pool in POOLS}
        self._tokens = self._forecast(guesses_s)  # a second; none where nothing is known of earlier

    def _take_in(self, computed: float, answered: float) -> None:
        self._forecasters[Role.PREFILL].observe(computed)
        self._forecasters[Role.DECODE].observe(answered)

    def observe(self, demand: Demand, seen: Observation, startup_s: Mapping[Role, float]) -> None:
        """Take in what came since the last observation; forecast anew at the end of each interval."""
        self._present.fades_s = max(_LEAST_PRESENT_S, 3 * self.policy.interval.react_s, *startup_s.values())
        for counts in (self._mixture, self._present, self._interval):
            counts.add(demand, seen.seconds)
        kept = self._present.kept(seen.seconds)
        for pool in POOLS:
            self._refused[pool] = self._refused[pool] * kept + num_refused(seen, pool)
            self._serving[pool] = self._serving[pool] * kept + len(_ready(seen.replicas, pool)) * demand.num_requests
        self._misses.count(demand, seen)
        mixture = self._mixture.traffic()
        if self._interval.seconds < self._interval_s * 0.999 or (mixture is None and not self._is_idle(seen)):
            return
        answer = 0.0 if mixture is None else mean(mixture.answers)
        self._take_in(self._interval.computed_tokens / self._interval.seconds, self._interval.answer_rate * answer)
        self._is_warm, self._interval = True, DecayingCounts(1e9)
        self._tokens = self._forecast(startup_s)

    def _forecast(self, startup_s: Mapping[Role, float]) -> Mapping[Role, float]:
        """Return the tokens a second that each pool is to be ready for, up to its horizon."""
        ahead_s = {pool: self.policy.forecaster.horizon_s or startup_s[pool] + self._interval_s for pool in POOLS}
        return {
            pool: max(known.forecast(steps).upper for steps in (1.0, max(1.0, ahead_s[pool] / self._interval_s)))
            for pool, known in self._forecasters.items()
        }

    def plan(
        self,
        seen: Observation,
        sizes: Mapping[Role, int],
        bounds: Mapping[Role, Bounds],
        startup_s: Mapping[Role, float],
    ) -> Plan | str:
        """Return what sizes are wanted, or why nobody can say."""
        mixture = self._mixture.traffic()
        if mixture is None:
            return self._idle(sizes, bounds) if self._is_idle(seen) else "no request has ended yet"
        may_be_empty = {pool: bounds[pool].least == 0 and not seen.has_requests for pool in POOLS}
        bounds = {pool: replace(bounds[pool], least=max(1, bounds[pool].least)) for pool in POOLS}
        lacking = [pool for pool in POOLS if not _is_known(pool, seen)]
        if lacking:
            return f"nothing is known of the steps or the size of {' and '.join(lacking)} workers"
        behaviors = {pool: self.policy.pools.of(pool).behavior for pool in POOLS}
        ups = {pool: 1 / (1 + behaviors[pool].scale_up.tolerance) for pool in POOLS}
        downs = {pool: 1 + behaviors[pool].scale_down.tolerance for pool in POOLS}
        at_least, expected, at_most = (
            self._sizer(mixture, seen, margins) for margins in (ups, dict.fromkeys(POOLS, 1.0), downs)
        )
        budget = self.policy.budget
        best = settled(expected, expected.fewest(bounds, budget), sizes, bounds)
        lower, upper = at_least.fewest(bounds, budget), at_most.fewest(bounds, budget)
        wanted, binds = {}, dict(best.binds)
        is_split = Binds.BUDGET in best.binds.values()
        keeps_both = self._keeps_both(sizes, best.replicas, bounds)
        for pool in POOLS:
            size = best.replicas[pool]
            pressing = 0 if is_split else max(self._lost(pool), self._signalled(pool, seen, ups[pool]))
            kept = max(upper.replicas[pool], size, pressing, self._signalled(pool, seen, downs[pool]))
            if pressing > size:
                binds[pool] = Binds.WAITING
            size = min(max(size, pressing), bounds[pool].most)
            if not self._is_warm or keeps_both:
                kept = max(kept, sizes[pool])
            wanted[pool] = Wanted(min(size, max(lower.replicas[pool], pressing)), size, min(kept, bounds[pool].most))
            if kept == 1 and may_be_empty[pool]:
                wanted[pool], binds[pool] = Wanted(0, 0, 0), Binds.MIN
        serving = {pool: len(_ready(seen.replicas, pool)) for pool in POOLS}
        self._misses.expect({pool: expected.by_model(pool, serving[pool]) for pool in POOLS})
        attained = {pool: expected.attainment(pool, sizes[pool]) for pool in POOLS}
        return Plan(wanted, binds, attained, self._seen_text(seen), _predicted_text(expected, best))

    def _keeps_both(self, sizes: Mapping[Role, int], best: Mapping[Role, int], bounds: Mapping[Role, Bounds]) -> bool:
        """Return whether no pool may shrink because one of them has missed too much of late.

        Once the pool that missed has grown, more requests reach the other one than it has seen. Both may shrink where
        keeping them would exceed the budget.
        """
        goal = self.policy.objectives.attainment
        kept = {pool: max(best[pool], sizes[pool]) for pool in POOLS}
        too_many = any(self._misses.are_too_many(pool, goal) for pool in POOLS)
        return too_many and devices_of(bounds, kept) <= self.policy.budget.max_devices

    def _is_idle(self, seen: Observation) -> bool:
        """Return whether no request has come of late, and none is left."""
        return self._mixture.num_requests < _NONE and not seen.has_requests

    def _idle(self, sizes: Mapping[Role, int], bounds: Mapping[Role, Bounds]) -> Plan:
        """Return the smallest pools that are allowed; before a first interval is over, none smaller than it is."""
        least = {pool: bounds[pool].least if self._is_warm else max(bounds[pool].least, sizes[pool]) for pool in POOLS}
        wanted = {pool: Wanted(least[pool], least[pool], least[pool]) for pool in POOLS}
        return Plan(wanted, dict.fromkeys(POOLS, Binds.MIN), dict.fromkeys(POOLS, 1.0), "no request", "none comes")

    def _sizer(self, mixture: Traffic, seen: Observation, margins: Mapping[Role, float]) -> Sizer:
        """Return a sizer for the forecast times a margin, or for what certainly comes now if that is more."""
        prompts, answers = self._present.sure_rates(mixture)
        forecast = {
            Role.PREFILL: self._tokens[Role.PREFILL] / max(1.0, mean(mixture.prompts)),
            Role.DECODE: self._tokens[Role.DECODE] / max(1.0, mean(mixture.answers)),
        }
        traffic = replace(
            mixture,
            prompt_rate=max(forecast[Role.PREFILL] * margins[Role.PREFILL], prompts),
            answer_rate=max(forecast[Role.DECODE] * margins[Role.DECODE], answers),
        )
        return Sizer(traffic, self.policy.objectives, seen.costs, seen.capacities, self._misses.odds)

    def _lost(self, pool: Role) -> int:
        """Return the size that would have served what was refused of late for want of a pool."""
        goal, num_requests = self.policy.objectives.attainment, self._present.num_requests
        if not self._misses.are_too_many(pool, goal):
            return 0
        return for_losses(self._refused[pool], num_requests, self._serving[pool] / max(1.0, num_requests), goal)

    def _signalled(self, pool: Role, seen: Observation, margin: float) -> int:
        """Return how many replicas keep every signal at its target, by so much of a margin."""
        signals, ready = self.policy.pools.of(pool).signals, _ready(seen.replicas, pool)
        totals = ((_total(signal, ready, seen, pool), signal.target) for signal in signals)
        return max((ceil(total * margin / target - 1e-9) for total, target in totals), default=0)

    def _seen_text(self, seen: Observation) -> str:
        present = self._present.traffic()
        parts = [present.text if present is not None else f"{self._present.rate:.2f} requests/s"]
        waiting = sum(replica.waiting_tokens for replica in seen.replicas)
        running = sum(replica.num_sequences for replica in seen.replicas)
        parts.append(f"{waiting} prompt tokens wait, {running} sequences run, {seen.num_held} requests are held")
        refused = sum(seen.refused.values())
        return ", ".join([*parts, f"{refused} were refused"] if refused else parts)


def settled(sizer: Sizer, best: Sized, sizes: Mapping[Role, int], bounds: Mapping[Role, Bounds]) -> Sized:
    """Return the present sizes where they spend the whole budget and no other split of it serves clearly more."""
    if Binds.BUDGET not in best.binds.values():
        return best
    is_allowed = all(bounds[pool].least <= sizes[pool] <= bounds[pool].most for pool in POOLS)
    is_spent = devices_of(bounds, sizes) == devices_of(bounds, best.replicas)
    if not is_spent or not is_allowed or sizer.joint(sizes) < best.attainment - _WORTH:
        return best
    attainments = {pool: sizer.attainment(pool, sizes[pool]) for pool in POOLS}
    return Sized(dict(sizes), attainments, best.binds)


def _ready(replicas: Sequence[Replica], pool: Role) -> list[Replica]:
    """Return the replicas that serve a pool."""
    return [replica for replica in replicas if replica.role.is_in(pool) and replica.state is State.READY]


def _total(signal: Signal, replicas: Sequence[Replica], seen: Observation, pool: Role) -> float:
    """Return a load of all replicas of a pool."""
    match signal.metric:
        case "queue_tokens":
            return sum(replica.waiting_tokens for replica in replicas)
        case "kv_usage":
            capacity = seen.capacities.get(pool)
            return sum(capacity.kv_usage(r.kv_tokens, r.num_sequences) for r in replicas) if capacity else 0.0
        case "running_sequences":
            return sum(replica.num_sequences for replica in replicas)
        case "held_requests":
            return seen.num_held


def _is_known(pool: Role, seen: Observation) -> bool:
    """Whether a pool can be sized."""
    costs, capacity = seen.costs.get(pool), seen.capacities.get(pool)
    if costs is None or capacity is None or min(capacity.kv_tokens, capacity.max_num_seqs, capacity.step_tokens) <= 0:
        return False
    return pool is Role.PREFILL or bool(costs.decode)


def _predicted_text(sizer: Sizer, sized: Sized) -> str:
    prefill, decode = (sized.replicas[pool] for pool in POOLS)
    return (
        f"{sizer.traffic.text} at most; {prefill} prefill + {decode} decode serve {sized.attainment:.1%} in time "
        f"({sized.attainments[Role.PREFILL]:.1%}, {sized.attainments[Role.DECODE]:.1%})"
        + (f" of the {sizer.best:.1%} that any pools could" if sizer.best < _ALL else "")
    )
