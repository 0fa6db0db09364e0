"""Predicts how many sequences a decode pool has room for at the speed that was asked. Pure.

Sequences share their worker's steps, and steps take longer the more share them. The number of sequences of such a pool
depends on the lengths of answers by their mean alone (insensitivity; Cohen, The multiple phase service network with
generalized processor sharing, Acta Informatica 12, 1979), so that it is a birth-death process: sequences come at
random, and end at the rate that Little's law gives, their number over the time that an answer takes at this number.
The router spreads them evenly, and refuses one that would make steps too slow or has no room: the process ends there,
and what comes then is lost. It counts a sequence's pages from its placement on, so that a sequence takes room while its
prompt is computed elsewhere, and steps only after that.
"""

from math import log

import numpy as np

from pdserve.autoscaler.decisions import Binds
from pdserve.autoscaler.observation import Capacity
from pdserve.autoscaler.traffic import Traffic, mean
from pdserve.perfmodel.curve import StepCosts

FloatArray = np.ndarray[tuple[int], np.dtype[np.float64]]

_LEAST_STEP_S = 1e-6
_USABLE, _PAGES_BESIDE = 0.95, 1.5  # of the KV tokens, and pages of a sequence, as in `router.predict`
_ROUNDS = 8  # of finding how many of the sequences decode


class DecodePool:
    """Decode workers under a stream of sequences."""

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
        reserved += _PAGES_BESIDE * capacity.page_tokens
        in_pages = max(1, int(_USABLE * capacity.kv_tokens / max(1.0, reserved)))
        in_time = int(np.searchsorted(steps_s, tpot_s, side="right"))
        limits = {Binds.BATCH: capacity.max_num_seqs, Binds.PAGES: in_pages, Binds.STEP_TIME: in_time}
        self.binds = min(limits, key=lambda bound: limits[bound])
        self.most = min(limits.values())  # sequences of a worker
        self._steps_s = np.concatenate((steps_s[:1], steps_s[: self.most]))  # by sequences that are placed
        self.best = (
            float(self._fast_enough(self._steps_s[1:2])[0]) if self.most else 0.0
        )  # attainment of a pool without end

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
    return mean(traffic.prompts) + traffic.cached_tokens + squares / (2 * tokens) if tokens else 0.0
