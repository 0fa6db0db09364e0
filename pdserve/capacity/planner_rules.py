"""Scales as NVIDIA Dynamo's planner does, as far as its rules are published.

Source: ai-dynamo/dynamo (2026), docs/design-docs/planner-design.md and components/src/dynamo/planner/core
(throughput_scaling.py, load_scaling.py, perf_model/prefill.py and decode.py):

- Throughput, every 180 s: the next interval's requests and mean lengths are those of the last one (its `constant`
  predictor). A prefill replica serves `1 / wall time` prompts of the mean length not cached; where that time alone
  exceeds the TTFT objective, the pool has at least `ceil(time / objective)`. A decode replica runs the largest batch
  whose step keeps the ITL objective, within its KV tokens and sequences, and serves `batch / (answer * wall time)`
  requests (Little's law).
- Load, every 5 s: a pool gains one replica when every replica is estimated to miss its objective, and loses one when
  each would keep 0.8 of it with its load times N / (N - 1). The result of the throughput rule is its floor.
- Nothing is decided about a pool while one of its replicas starts or drains. A GPU budget scales both pools down in
  proportion.

A router that refuses lets no replica miss its objective. Where it refused requests because of a pool, every replica of
that pool counts as missing. Dynamo's regressions of step times are replaced by the step costs that the router has
learnt, which are more exact.
"""

from collections.abc import Mapping, Sequence
from math import ceil

from pdserve.autoscaler.decisions import Binds, Decision
from pdserve.autoscaler.observation import Capacity, Observation, Replica, State
from pdserve.capacity.ordering import Limits, Orders, Rules, Wanted, devices_left, num_refused, pool_of
from pdserve.demand import Demand
from pdserve.measure.objectives import Objective
from pdserve.perfmodel.curve import Step, StepCosts
from pdserve.roles import Role

PERIOD_S = 5.0
_THROUGHPUT_S = 180.0
_SENSITIVITY = 0.8


class PlannerRules(Rules):
    """Both loops, for both pools."""

    def __init__(self, limits: Mapping[Role, Limits], max_devices: int, objective: Objective) -> None:
        self._limits = limits
        self._max_devices = max_devices
        self._objective = objective
        self._orders = Orders("planner")
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
            self._floors = self._affordable(observation, self._throughput(observation))
            self._demand, self._seconds = Demand(), 0.0
        if not self._floors:
            self._floors = {role: len(pool_of(observation, role)) for role in self._limits}
        left, decisions = devices_left(observation, self._max_devices), list[Decision]()
        for role, limits in self._limits.items():
            if any(each.role is role and each.state is not State.READY for each in observation.replicas):
                continue
            size = limits.within(max(self._floors[role], self._by_load(observation, role)))
            wanted = Wanted(size, Binds.STEP_TIME, f"floor {self._floors[role]}")
            orders = self._orders.towards(observation, role, wanted, left)
            left -= sum(order.verb == "add" for order in orders) * observation.capacities[role].num_devices
            decisions += orders
        return decisions

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
        low, high = 1, max(1, min(capacity.max_num_seqs, int(capacity.kv_tokens / context)))
        while low < high:
            middle = (low + high + 1) // 2
            if _step_s(costs, middle, middle * context) <= self._objective.tpot_s:
                low = middle
            else:
                high = middle - 1
        return low, _step_s(costs, low, low * context)

    def _affordable(self, observation: Observation, sizes: dict[Role, int]) -> dict[Role, int]:
        devices = sum(size * observation.capacities[role].num_devices for role, size in sizes.items())
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
