"""Rules of others for the same pools: thresholds, as a HorizontalPodAutoscaler has them, and those of Dynamo's planner.

A router that refuses keeps queues short. What it refused since the last look for want of a pool counts as its demand.

HPA on queue length and KV usage. The targets are those of llm-d's workload-variant autoscaler
(docs/architecture/advanced/autoscaling/hpa-wva.md and its configmap-saturation-scaling.yaml, v0.7.0: kvCacheThreshold
0.80, queueLengthThreshold 5). The formula, its tolerance, its window and its rates of change are the defaults of HPA v2
(kubernetes.io, "Horizontal Pod Autoscaling"): the replicas that serve times the largest of `metric / target`; growth by
4 replicas or by 100 % in 15 s, whichever is more; shrinking to the largest size that was recommended within 300 s.

Dynamo's planner, as far as its rules are published. Source: ai-dynamo/dynamo (2026), docs/design-docs/planner-design.md
and components/src/dynamo/planner/core (throughput_scaling.py, load_scaling.py, perf_model/prefill.py and decode.py):

- Throughput, every 180 s: the next interval's requests and mean lengths are those of the last one (its `constant`
  predictor). A prefill replica serves `1 / wall time` prompts of the mean length not cached; where that time alone
  exceeds the TTFT objective, the pool has at least `ceil(time / objective)`. A decode replica runs the largest batch
  whose step keeps the ITL objective, within its KV tokens and sequences, and serves `batch / (answer * wall time)`
  requests (Little's law).
- Load, every 5 s: a pool gains one replica when every replica is estimated to miss its objective, and loses one when
  each would keep 0.8 of it with its load times N / (N - 1). The result of the throughput rule is its floor.
- Nothing is decided about a pool while one of its replicas starts or drains. A GPU budget scales both pools down in
  proportion.

Dynamo's regressions of step times are replaced by the step costs that the router has learnt, which are more exact.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import count
from math import ceil
from statistics import fmean

from pdserve.autoscaler.decisions import Action, Add, Binds, Decision, Drain
from pdserve.autoscaler.misses import num_refused
from pdserve.autoscaler.observation import Capacity, Observation, Replica, State
from pdserve.autoscaler.pools import Bounds
from pdserve.base.roles import Role
from pdserve.base.values import value
from pdserve.measure.outcomes import Objective
from pdserve.perfmodel.curve import Step, StepCosts
from pdserve.protocol.reports import Demand

HPA_PERIOD_S = 15.0  # between two looks
PLANNER_PERIOD_S = 5.0
_KV_USAGE = 0.80  # of a decode replica's KV tokens, on average
_QUEUE_LENGTH = 5.0  # requests that wait at a replica, on average
_TOLERANCE = 0.1
_STABILIZATION_S = 300.0
_MOST_ADDED = 4  # or as many as there are
_THROUGHPUT_S = 180.0
_SENSITIVITY = 0.8


@value
class Wanted:
    """A number of replicas, and what it is based on."""

    num_replicas: int
    binds: Binds
    seen: str


def pool_of(observation: Observation, role: Role, *states: State) -> list[Replica]:
    """Return the replicas of a pool in one of these states; without any named, those that do not drain."""
    listed = states or (State.STARTING, State.READY)
    return [replica for replica in observation.replicas if replica.role is role and replica.state in listed]


class Orders:
    """Orders replicas as far as the devices go round, and drains those that start first, then the emptiest."""

    def __init__(self, prefix: str, limits: Mapping[Role, Bounds], max_devices: int) -> None:
        self._names = (f"{prefix}-{number}" for number in count(1))
        self._limits = limits
        self._max_devices = max_devices

    def towards(self, observation: Observation, wanted: Mapping[Role, Wanted]) -> Sequence[Decision]:
        """Return the orders that bring pools to their wanted sizes, the first pool first."""
        left = self._max_devices - sum(self._limits[each.role].devices for each in observation.replicas)
        decisions = list[Decision]()
        for role, goal in wanted.items():
            pool, devices = pool_of(observation, role), self._limits[role].devices
            num_added = max(0, min(left // devices, goal.num_replicas - len(pool)))
            left -= num_added * devices
            cheapest = sorted(pool, key=lambda replica: (replica.state is not State.STARTING, replica.num_sequences))
            actions: list[Action] = [Add(next(self._names), role) for _ in range(num_added)]
            actions += [Drain(replica.name) for replica in cheapest[: max(0, len(pool) - goal.num_replicas)]]
            decisions += [
                Decision(role, action, len(pool), goal.num_replicas, goal.binds, goal.seen, predicted="nothing")
                for action in actions
            ]
        return decisions


class QueueAndKvUsage:
    """HPA for both pools, each on its own."""

    def __init__(self, limits: Mapping[Role, Bounds], max_devices: int) -> None:
        self._limits = limits
        self._orders = Orders("hpa", limits, max_devices)
        self._recommended: dict[Role, deque[tuple[float, int]]] = {role: deque() for role in limits}

    def decide(self, observation: Observation) -> Sequence[Decision]:
        """Return orders for both pools, as far as the devices go round."""
        return self._orders.towards(observation, {role: self._wanted(observation, role) for role in self._limits})

    def _wanted(self, observation: Observation, role: Role) -> Wanted:
        size, serving = len(pool_of(observation, role)), len(pool_of(observation, role, State.READY))
        queue, usage = _queue_length(observation, role), _kv_usage(observation, role)
        ratio = max(queue / _QUEUE_LENGTH, usage / _KV_USAGE)
        recommended = size if abs(ratio - 1) <= _TOLERANCE else ceil(ratio * serving)
        recommended = self._limits[role].within(min(recommended, max(size + _MOST_ADDED, 2 * size)))
        if not self._recommended[role]:
            self._recommended[role].append((observation.at_s, size))  # as the HPA begins
        largest = self._largest(role, recommended, observation.at_s)
        binds = Binds.PAGES if usage / _KV_USAGE > queue / _QUEUE_LENGTH else Binds.WAITING
        target = recommended if recommended >= size else min(size, largest)
        return Wanted(target, binds, f"queue {queue:.1f}, KV usage {usage:.0%}")

    def _largest(self, role: Role, recommended: int, now_s: float) -> int:
        """Return the largest size recommended within the window."""
        known = self._recommended[role]
        known.append((now_s, recommended))
        while known[0][0] < now_s - _STABILIZATION_S:
            known.popleft()
        return max(size for _, size in known)


def _queue_length(observation: Observation, role: Role) -> float:
    """Return how many requests wait for a replica of a pool, on average."""
    serving = pool_of(observation, role, State.READY)
    waiting = observation.num_held + num_refused(observation, role)
    if role is Role.PREFILL:
        waiting += sum(replica.num_sequences for replica in serving)
    return waiting / max(1, len(serving))


def _kv_usage(observation: Observation, role: Role) -> float:
    """Return the share of the KV tokens in use, on average over a pool."""
    shares = [replica.kv_tokens for replica in pool_of(observation, role, State.READY)]
    return fmean(shares) / observation.capacities[role].kv_tokens if shares else 0.0


class PlannerRules:
    """Both loops, for both pools."""

    def __init__(self, limits: Mapping[Role, Bounds], max_devices: int, objective: Objective) -> None:
        self._limits = limits
        self._max_devices = max_devices
        self._objective = objective
        self._orders = Orders("planner", limits, max_devices)
        self._demand, self._seconds = Demand(), 0.0  # of the interval under way
        self._prompt_tokens = 0.0  # of a mean prompt
        self._floors: dict[Role, int] = {}  # until a first interval is over, the pools as they are

    def decide(self, observation: Observation) -> Sequence[Decision]:
        """Return orders for both pools, as far as the devices go round."""
        if observation.demand is not None:
            self._demand += observation.demand
            self._seconds += observation.seconds
        if self._demand.num_requests:
            self._prompt_tokens = self._demand.prompt_tokens / self._demand.num_requests
        if self._seconds >= _THROUGHPUT_S:
            self._floors = self._affordable(self._throughput(observation))
            self._demand, self._seconds = Demand(), 0.0
        if not self._floors:
            self._floors = {role: len(pool_of(observation, role)) for role in self._limits}
        changing = {each.role for each in observation.replicas if each.state is not State.READY}
        wanted = dict[Role, Wanted]()
        for role, limits in self._limits.items():
            if role not in changing:
                size = limits.within(max(self._floors[role], self._by_load(observation, role)))
                wanted[role] = Wanted(size, Binds.STEP_TIME, f"floor {self._floors[role]}")
        return self._orders.towards(observation, wanted)

    # ---- throughput

    def _throughput(self, observation: Observation) -> dict[Role, int]:
        """Return the sizes that serve as many requests as came, of their mean lengths."""
        demand = self._demand
        num_answers = sum(demand.answers)
        if not demand.num_requests or not num_answers:
            return {role: limits.least for role, limits in self._limits.items()}
        rate = demand.num_requests / self._seconds
        prompt = max(1.0, (demand.prompt_tokens - demand.cached_tokens) / demand.num_requests)
        answer = max(1.0, demand.answer_tokens / num_answers)
        context = demand.prompt_tokens / demand.num_requests + answer / 2
        prompt_s = _prompt_s(observation.costs[Role.PREFILL], prompt, observation.capacities[Role.PREFILL])
        floor = ceil(prompt_s / self._objective.ttft_s) if prompt_s > self._objective.ttft_s else 1
        batch, step_s = self._batch(observation, context)
        wanted = {
            Role.PREFILL: max(ceil(rate * prompt_s), floor),
            Role.DECODE: ceil(rate * answer * step_s / batch),
        }
        return {role: limits.within(wanted[role]) for role, limits in self._limits.items()}

    def _batch(self, observation: Observation, context: float) -> tuple[int, float]:
        """Return the largest batch whose steps keep the objective, one at least, and how long its steps take."""
        costs, capacity = observation.costs[Role.DECODE], observation.capacities[Role.DECODE]
        most = max(1, min(capacity.max_num_seqs, int(capacity.kv_tokens / context)))

        def step_s(batch: int) -> float:
            return _step_s(costs, batch, batch * context)

        batch = max(1, bisect_right(range(1, most + 1), self._objective.tpot_s, key=step_s))
        return batch, step_s(batch)

    def _affordable(self, sizes: dict[Role, int]) -> dict[Role, int]:
        devices = sum(size * self._limits[role].devices for role, size in sizes.items())
        share = min(1.0, self._max_devices / devices)
        return {role: max(self._limits[role].least, int(size * share)) for role, size in sizes.items()}

    # ---- load

    def _by_load(self, observation: Observation, role: Role) -> int:
        pool = pool_of(observation, role)
        if not pool:
            return 1
        estimate = self._ttft_share if role is Role.PREFILL else self._itl_share
        if num_refused(observation, role) or all(estimate(observation, replica, 1.0) > 1 for replica in pool):
            return len(pool) + 1
        more = len(pool) / (len(pool) - 1) if len(pool) > 1 else None
        if more and all(estimate(observation, replica, more) < _SENSITIVITY for replica in pool):
            return len(pool) - 1
        return len(pool)

    def _ttft_share(self, observation: Observation, replica: Replica, more: float) -> float:
        """Return the estimated TTFT of one more mean prompt behind a replica's queue, as a share of the objective."""
        costs, capacity = observation.costs[Role.PREFILL], observation.capacities[Role.PREFILL]
        own_s = _prompt_s(costs, self._prompt_tokens, capacity)
        queue_s = _prompt_s(costs, more * replica.waiting_tokens, capacity) if replica.waiting_tokens else 0.0
        if own_s >= self._objective.ttft_s or more == 1.0:
            return (queue_s + own_s) / self._objective.ttft_s
        return queue_s / (self._objective.ttft_s - own_s)

    def _itl_share(self, observation: Observation, replica: Replica, more: float) -> float:
        """Return a replica's estimated ITL as a share of the objective; over 1 where its KV tokens do not suffice."""
        costs, capacity = observation.costs[Role.DECODE], observation.capacities[Role.DECODE]
        kv_tokens = more * replica.kv_tokens
        if kv_tokens >= capacity.kv_tokens:
            return 2.0
        return _step_s(costs, more * replica.num_sequences, kv_tokens) / self._objective.tpot_s


def _prompt_s(costs: StepCosts, num_tokens: float, capacity: Capacity) -> float:
    """Return how long a prompt takes, in steps of so many tokens."""
    num_steps = max(1, ceil(num_tokens / capacity.step_tokens))
    return num_steps * costs.prefill.step_s + costs.prefill.marginal_s(num_tokens, num_tokens * num_tokens)


def _step_s(costs: StepCosts, sequences: float, kv_tokens: float) -> float:
    return costs.seconds(Step(sequences=max(1, round(sequences)), kv_tokens=round(kv_tokens)))
