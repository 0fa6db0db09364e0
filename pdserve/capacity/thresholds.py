"""Scales by thresholds, as peers do: Kubernetes' HPA on the lengths of queues and on KV usage.

The targets are those of llm-d's workload-variant autoscaler (docs/architecture/advanced/autoscaling/hpa-wva.md and its
configmap-saturation-scaling.yaml, v0.7.0: kvCacheThreshold 0.80, queueLengthThreshold 5). The formula, its tolerance,
its window and its rates of change are the defaults of HPA v2 (kubernetes.io, "Horizontal Pod Autoscaling"): the
replicas that serve times the largest of `metric / target`; growth by 4 replicas or by 100 % in 15 s, whichever is more;
shrinking to the largest size that was recommended within 300 s.

A router that refuses keeps queues short. Requests that it refused since the last look count as waiting for the pool
that bound them: behind a router that refuses nothing they would wait there.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from math import ceil
from statistics import fmean

from pdserve.autoscaler.decisions import Binds, Decision
from pdserve.autoscaler.observation import Observation, State
from pdserve.capacity.ordering import Limits, Orders, Rules, Wanted, devices_left, num_refused, pool_of
from pdserve.roles import Role

KV_USAGE = 0.80  # of a decode replica's KV tokens, on average
QUEUE_LENGTH = 5.0  # requests that wait at a replica, on average
PERIOD_S = 15.0  # between two looks
_TOLERANCE = 0.1
_STABILIZATION_S = 300.0
_MOST_ADDED = 4  # or as many as there are


class QueueAndKvUsage(Rules):
    """HPA for both pools, each on its own."""

    def __init__(self, limits: Mapping[Role, Limits], max_devices: int) -> None:
        self._limits = limits
        self._max_devices = max_devices
        self._orders = Orders("hpa")
        self._recommended: dict[Role, deque[tuple[float, int]]] = {role: deque() for role in limits}

    def decide(self, observation: Observation) -> Sequence[Decision]:
        """Return orders for both pools, as far as the devices go round."""
        left, decisions = devices_left(observation, self._max_devices), list[Decision]()
        for role in self._limits:
            wanted = self._wanted(observation, role)
            orders = self._orders.towards(observation, role, wanted, left)
            left -= sum(order.verb == "add" for order in orders) * observation.capacities[role].num_devices
            decisions += orders
        return decisions

    def _wanted(self, observation: Observation, role: Role) -> Wanted:
        size, serving = len(pool_of(observation, role)), len(pool_of(observation, role, State.READY))
        queue, usage = _queue_length(observation, role), _kv_usage(observation, role)
        ratio = max(queue / QUEUE_LENGTH, usage / KV_USAGE)
        recommended = size if abs(ratio - 1) <= _TOLERANCE else ceil(ratio * serving)
        recommended = self._limits[role].within(min(recommended, max(size + _MOST_ADDED, 2 * size)))
        if not self._recommended[role]:
            self._recommended[role].append((observation.at_s, size))  # as the HPA begins
        largest = self._largest(role, recommended, observation.at_s)
        binds = Binds.PAGES if usage / KV_USAGE > queue / QUEUE_LENGTH else Binds.WAITING
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
