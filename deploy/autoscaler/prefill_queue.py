"""Predicts how many prompts a prefill pool computes in time. Pure.

The pool is a queue with several servers, since the router places each prompt where it is computed first. Its wait has
the mean of Allen and Cunneen's approximation (Allen, Probability, Statistics and Queueing Theory, 2nd ed., 1990, 5.4)
and an exponential tail. Prompts that would be late are refused and so delay nobody: the share of these follows from the
tail by Boots and Tijms, A multiserver queueing system with impatient customers, Management Science 45, 1999, which is
right for loads above what the pool can compute as well.

Prompts that wait share a step and its fixed cost, up to `step_tokens`. How many do follows from how many wait.
"""

from math import ceil, exp

from pdserve.autoscaler.traffic import Traffic
from pdserve.base.values import value
from pdserve.perfmodel.curve import Curve

_MAX_EXPONENT = 50.0
_LEAST_S = 1e-6  # of a prompt
_CRITICAL = 1e-6  # from a load of one: closer to it the formulas divide by zero


@value
class _Prompt:
    """Prompts of one band."""

    share: float  # of all prompts
    alone_s: float  # on an idle worker
    work_s: float  # without the fixed cost of steps
    steps: float  # that it fills, as a fraction


class PrefillPool:
    """Prefill workers under a stream of prompts."""

    def __init__(self, traffic: Traffic, curve: Curve, step_tokens: int, ttft_s: float) -> None:
        prompts = [
            _prompt(tokens, share, traffic.cached_tokens, curve, step_tokens) for tokens, share in traffic.prompts
        ]
        self._timely = [prompt for prompt in prompts if prompt.alone_s < ttft_s]
        self.best = sum(prompt.share for prompt in self._timely)  # attainment of a pool without end
        self.alone_s = sum(p.share * p.alone_s for p in self._timely) / self.best if self._timely else 0.0  # a prompt
        self._ttft_s, self._step_s = ttft_s, curve.step_s
        self._rate = traffic.prompt_rate * self.best
        fill = sum(prompt.share * min(1.0, prompt.steps) for prompt in self._timely)
        self._most_sharing = max(1.0, self.best / fill) if fill else 1.0

    def attainment(self, num_replicas: int) -> float:
        """Return the share of prompts whose first token is in time, of those for which that is possible."""
        if not self._timely or self._rate <= 0:
            return 1.0
        if num_replicas <= 0:
            return 0.0
        low, high = 1.0, self._most_sharing
        if self._queue(num_replicas, high)[2] < high - 1:
            while high - low > 0.02 * low:
                middle = (low + high) / 2
                if self._queue(num_replicas, middle)[2] < middle - 1:
                    high = middle
                else:
                    low = middle
        return self._in_time(num_replicas, high)

    def _service(self, sharing: float) -> tuple[float, float]:
        """Return the mean of a prompt's time on a worker, and the square of its coefficient of variation."""
        times_s = [(p.share / self.best, p.work_s + self._step_s * max(p.steps, 1 / sharing)) for p in self._timely]
        mean_s = sum(share * time_s for share, time_s in times_s)
        second = sum(share * time_s * time_s for share, time_s in times_s)
        return mean_s, second / (mean_s * mean_s) - 1

    def _queue(self, num_replicas: int, sharing: float) -> tuple[float, float, float]:
        """Return the load, the mean wait of those that wait, seconds, and how many wait for each replica."""
        mean_s, variation = self._service(sharing)
        load = self._rate * mean_s / num_replicas
        if abs(1 - load) < _CRITICAL:
            load = 1 - _CRITICAL
        wait_s = mean_s * (1 + variation) / 2 / (num_replicas * (1 - load))
        # Nobody waits for longer than the objective.
        waited_s = self._ttft_s if load >= 1 else min(self._ttft_s, erlang_c(num_replicas, load) * wait_s)
        return load, wait_s, self._rate * waited_s / num_replicas

    def _in_time(self, num_replicas: int, sharing: float) -> float:
        load, wait_s, _ = self._queue(num_replicas, sharing)
        waits = erlang_c(num_replicas, load)
        beside_s = (sharing - 1) / 2 * sum(prompt.share * prompt.work_s for prompt in self._timely) / self.best
        total = 0.0
        for prompt in self._timely:
            slack_s = max(0.0, self._ttft_s - prompt.alone_s - beside_s)
            exponent = -slack_s / wait_s
            if exponent > _MAX_EXPONENT:
                lost = 1 - 1 / load
            else:
                late = waits * exp(exponent)
                lost = (1 - load) * late / (1 - load * late)
            total += prompt.share * (1 - min(1.0, max(0.0, lost)))
        return total / self.best


def _prompt(tokens: float, share: float, cached: float, curve: Curve, step_tokens: int) -> _Prompt:
    work_s = max(_LEAST_S, curve.marginal_s(tokens, tokens * (2 * cached + tokens)))
    return _Prompt(share, work_s + curve.step_s * ceil(tokens / step_tokens), work_s, tokens / step_tokens)


def erlang_c(num_servers: int, load: float) -> float:
    """Return the probability to wait in M/M/n; for a load of one or more what its formula goes on to give."""
    offered, blocked = num_servers * load, 1.0
    for count in range(1, num_servers + 1):
        blocked = offered * blocked / (count + offered * blocked)
    return blocked / (1 - load * (1 - blocked))
