"""Finds the fewest replicas of both pools that serve a stream of requests in time. Pure.

A request needs both pools, and what is lost in one hardly depends on the other: attainment is the product of both.
Requests that no size of a pool could serve in time count for none.

Beside the capacity simulator (OPT-13B on A100; 2 + 2, 1 + 3 and 3 + 1 workers, four loads each), predicted attainment
is off by 2 points at most where 95 % are attained or more. Beyond, it is up to 11 points too low: the router finds room
that an average does not have.
"""

from collections.abc import Mapping
from math import log, sqrt
from types import MappingProxyType

import numpy as np

from pdserve.autoscaler.decisions import Binds
from pdserve.autoscaler.observation import Capacity
from pdserve.autoscaler.pools import Bounds
from pdserve.autoscaler.prefill_queue import PrefillPool
from pdserve.autoscaler.schema import Budget, Objectives
from pdserve.autoscaler.traffic import Traffic, mean
from pdserve.base.roles import POOLS, Role
from pdserve.base.values import value
from pdserve.perfmodel.curve import StepCosts

FloatArray = np.ndarray[tuple[int], np.dtype[np.float64]]

_LEAST_STEP_S = 1e-6
_ROUNDS = 8  # of finding how many of the sequences decode


class DecodePool:
    """Decode workers under a stream of sequences: how many of these have room at the speed that was asked.

    Sequences share their worker's steps, and steps take longer the more share them. The number of sequences of such a
    pool depends on the lengths of answers by their mean alone (insensitivity; Cohen, The multiple phase service network
    with generalized processor sharing, Acta Informatica 12, 1979), so that it is a birth-death process: sequences come
    at random, and end at the rate that Little's law gives, their number over the time that an answer takes at this
    number. The router spreads them evenly, and refuses one that would make steps too slow or has no room: the process
    ends there, and what comes then is lost. It counts a sequence's pages from its placement on, so that a sequence
    takes room while its prompt is computed elsewhere, and steps only after that.
    """

    def __init__(
        self, traffic: Traffic, costs: StepCosts, capacity: Capacity, tpot_s: float, delay_s: float = 0.0
    ) -> None:
        """`delay_s`: from a sequence's placement until it decodes, on average."""
        self._tpot_s, self._delay_s = tpot_s, delay_s
        later = [(tokens - 1, share) for tokens, share in traffic.answers if tokens >= 1.5]
        decoding = sum(share for _, share in later)
        self._rate = traffic.answer_rate * decoding
        self._tokens = sum(tokens * share for tokens, share in later) / decoding if decoding else 0.0
        self._single = 1 - decoding  # answers of one token: these never decode
        self._lengths = np.array([tokens for tokens, _ in later])
        shares = [share for _, share in later]
        self._longer = np.array([sum(shares[place:]) for place in range(len(shares) + 1)])  # than those before a place
        kv_each = _kv_of_a_sequence(traffic)
        alone_s = np.array([_step_s(costs, batch, kv_each) for batch in range(1, capacity.max_num_seqs + 1)])
        steps_s = self._in_company(alone_s)
        reserved = kv_each + mean(traffic.answers) / 2  # the router keeps room for the rest of each answer
        reserved += capacity.tokens_beside
        in_pages = max(1, int(capacity.num_sequences(max(1.0, reserved))))
        in_time = int(np.searchsorted(steps_s, tpot_s, side="right"))
        limits = {Binds.BATCH: capacity.max_num_seqs, Binds.PAGES: in_pages, Binds.STEP_TIME: in_time}
        self.binds = min(limits, key=lambda bound: limits[bound])
        self.most = min(limits.values())  # sequences of a worker
        self._steps_s = np.concatenate((steps_s[:1], steps_s[: self.most]))  # by sequences that are placed
        alone = self._fast_enough(self._steps_s[1:2])  # share of the answers, each with a worker for itself
        self.best = float(alone[0]) if self.most else 0.0  # attainment of a pool without end

    def attainment(self, num_replicas: int) -> float:
        """Return the share of sequences that are taken in and fast enough, of those for which that is possible."""
        if not self.best or self._rate <= 0 or self._tokens <= 0:
            return 1.0
        if num_replicas <= 0:
            return 0.0
        counts = np.arange(1, num_replicas * self.most + 1)
        steps_s = np.interp(counts / num_replicas, np.arange(self.most + 1), self._steps_s)
        lives_s = self._delay_s + self._tokens * steps_s
        logs = np.concatenate(([0.0], np.cumsum(log(self._rate) + np.log(lives_s / counts))))
        chances = np.exp(logs - logs.max())  # of each number of sequences, up to a factor
        lost = chances[-1] / chances.sum()
        running = counts * chances[1:]
        timely = (running * self._fast_enough(steps_s)).sum() / running.sum()
        return float((1 - lost) * timely / self.best)

    def _in_company(self, alone_s: FloatArray) -> FloatArray:
        """Return how long steps take by how many sequences are placed; `alone_s`: by how many decode."""
        placed = np.arange(1, len(alone_s) + 1)
        steps_s = alone_s
        for _ in range(_ROUNDS):
            decode_s = np.maximum(1e-9, self._tokens * steps_s)
            steps_s = np.interp(placed * decode_s / (decode_s + self._delay_s), placed, alone_s)
        return steps_s

    def _fast_enough(self, steps_s: FloatArray) -> FloatArray:
        """Return the share of answers that keep the objective at each step time.

        A sequence waits for half a step before its first one here, which short answers feel.
        """
        spare_s = np.maximum(1e-9, self._tpot_s - steps_s)
        place = np.searchsorted(self._lengths, steps_s / 2 / spare_s)
        return self._single + self._longer[place]


def _step_s(costs: StepCosts, batch: int, kv_each: float) -> float:
    return max(_LEAST_STEP_S, costs.decode_curve(batch).seconds(batch, batch * kv_each))


def _kv_of_a_sequence(traffic: Traffic) -> float:
    """Return the KV tokens of a sequence that runs, on average: long answers run longer, and are met more often."""
    tokens = mean(traffic.answers)
    squares = sum(share * length**2 for length, share in traffic.answers)
    prompt = traffic.decoded_tokens
    if prompt is None:
        prompt = mean(traffic.prompts) + traffic.cached_tokens
    return prompt + squares / (2 * tokens) if tokens else 0.0


_PROMPTS_BEFORE = 6.0  # prompts that are computed until one of a burst is done, itself included
_MAX_SPLITS = 64  # of a budget that are compared


@value
class Sized:
    """Sizes of both pools, and what is predicted for them."""

    replicas: Mapping[Role, int]
    attainments: Mapping[Role, float]
    binds: Mapping[Role, Binds]

    @property
    def attainment(self) -> float:
        """Share of requests within both objectives."""
        return self.attainments[Role.PREFILL] * self.attainments[Role.DECODE]


class Sizer:
    """Both pools under one stream of requests."""

    def __init__(
        self,
        traffic: Traffic,
        objectives: Objectives,
        costs: Mapping[Role, StepCosts],
        capacities: Mapping[Role, Capacity],
        odds: Mapping[Role, float] = MappingProxyType({}),
    ) -> None:
        """`odds`: by which factor misses of each pool have lately exceeded the predicted odds; 1 by default."""
        self.traffic, self._goal, self._odds = traffic, objectives.attainment, odds
        self._known: dict[tuple[Role, int], float] = {}
        step_tokens = capacities[Role.PREFILL].step_tokens
        self.prefill = PrefillPool(traffic, costs[Role.PREFILL].prefill, step_tokens, objectives.ttft_s)
        delay_s = min(objectives.ttft_s / 2, _PROMPTS_BEFORE * self.prefill.alone_s)
        self.decode = DecodePool(traffic, costs[Role.DECODE], capacities[Role.DECODE], objectives.tpot_s, delay_s)

    @property
    def best(self) -> float:
        """Share of requests that pools without end would serve in time."""
        return self.prefill.best * self.decode.best

    def attainment(self, pool: Role, num_replicas: int) -> float:
        """Return the share of requests that a pool of this size serves in time."""
        known = self._known.get((pool, num_replicas))
        if known is None:
            served = self.by_model(pool, num_replicas)
            known = served / (served + self._odds.get(pool, 1.0) * (1 - served))
            self._known[pool, num_replicas] = known
        return known

    def by_model(self, pool: Role, num_replicas: int) -> float:
        """Return the share as the pool's model predicts it, without what was learnt from misses."""
        return (self.prefill if pool is Role.PREFILL else self.decode).attainment(num_replicas)

    def joint(self, sizes: Mapping[Role, int]) -> float:
        """Return the share that both pools serve in time."""
        return self.attainment(Role.PREFILL, sizes[Role.PREFILL]) * self.attainment(Role.DECODE, sizes[Role.DECODE])

    def fewest(self, bounds: Mapping[Role, Bounds], budget: Budget) -> Sized:
        """Return the sizes that meet the objective with the fewest devices.

        Where the limits do not allow that, pools are as large as they may be; where the budget does not, it is split so
        that the most requests are served.
        """
        prefill, decode = bounds[Role.PREFILL], bounds[Role.DECODE]
        found: Mapping[Role, int] | None = None
        least_decode = self._least(Role.DECODE, self._goal, decode)
        first = self._least(Role.PREFILL, self._goal, prefill) or prefill.most
        for size in range(first, prefill.most + 1):
            rest = self._least(Role.DECODE, self._goal / max(1e-9, self.attainment(Role.PREFILL, size)), decode)
            if rest is None:
                if least_decode is None or self.attainment(Role.PREFILL, size) > 1 - 1e-4:
                    break
                continue
            sizes = {Role.PREFILL: size, Role.DECODE: rest}
            if found is None or devices_of(bounds, sizes) < devices_of(bounds, found):
                found = sizes
            if rest == least_decode:
                break
        filled = self._filled(found or self._beyond(bounds), bounds, budget.min_devices)
        if devices_of(bounds, filled) > budget.max_devices:
            return self._sized(self._split(bounds, budget.max_devices), bounds, Binds.BUDGET)
        return self._sized(filled, bounds, Binds.MAX)

    def _least(self, pool: Role, goal: float, bounds: Bounds) -> int | None:
        """Return the least size of a pool that attains a share."""
        low, high = bounds.least, min(bounds.most, max(1, bounds.least))
        while self.attainment(pool, high) < goal:
            if goal > 1 or high == bounds.most:
                return None
            low, high = high + 1, min(bounds.most, 2 * high)
        while low < high:
            middle = (low + high) // 2
            if self.attainment(pool, middle) >= goal:
                high = middle
            else:
                low = middle + 1
        return high

    def _beyond(self, bounds: Mapping[Role, Bounds]) -> Mapping[Role, int]:
        """Return sizes for more than the limits allow: what each pool would need with an equal share of the losses."""
        goal = sqrt(self._goal)
        return {pool: self._least(pool, goal, bounds[pool]) or bounds[pool].most for pool in POOLS}

    def _filled(self, sizes: Mapping[Role, int], bounds: Mapping[Role, Bounds], min_devices: int) -> Mapping[Role, int]:
        """Return sizes that hold the least number of devices: replicas are added to the pool that loses more."""
        filled = dict(sizes)
        while devices_of(bounds, filled) < min_devices:
            room = [pool for pool, size in filled.items() if size < bounds[pool].most]
            if not room:
                break
            filled[min(room, key=lambda pool: self.attainment(pool, filled[pool]))] += 1
        return filled

    def _split(self, bounds: Mapping[Role, Bounds], max_devices: int) -> Mapping[Role, int]:
        """Return the sizes that serve the most requests, of those that spend the budget."""
        prefill, decode = bounds[Role.PREFILL], bounds[Role.DECODE]
        most = min(prefill.most, (max_devices - decode.least * decode.devices) // prefill.devices)
        sizes = range(prefill.least, max(prefill.least, most) + 1, max(1, (most - prefill.least) // _MAX_SPLITS))
        splits = (
            {Role.PREFILL: size, Role.DECODE: decode.within((max_devices - size * prefill.devices) // decode.devices)}
            for size in sizes
        )
        return max(splits, key=self.joint)

    def _sized(self, replicas: Mapping[Role, int], bounds: Mapping[Role, Bounds], limit: Binds) -> Sized:
        is_met = self.joint(replicas) >= self._goal
        natural = {Role.PREFILL: Binds.PREFILL_QUEUE, Role.DECODE: self.decode.binds}
        binds = {}
        for pool, size in replicas.items():
            could_shrink = size == bounds[pool].least and (size == 1 or self.attainment(pool, size - 1) >= self._goal)
            is_full = not is_met and (limit is Binds.BUDGET or size == bounds[pool].most)
            binds[pool] = Binds.MIN if could_shrink else limit if is_full else natural[pool]
        return Sized(replicas, {pool: self.attainment(pool, size) for pool, size in replicas.items()}, binds)


def devices_of(bounds: Mapping[Role, Bounds], sizes: Mapping[Role, int]) -> int:
    """Return the devices that pools of these sizes hold."""
    return sum(bounds[pool].devices * size for pool, size in sizes.items())
