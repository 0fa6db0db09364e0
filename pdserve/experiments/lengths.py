"""What the experiments send: lengths of a trace or random ones, scaled to fit, at random moments."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice

from pdserve.bench.workload import Arrival
from pdserve.capacity.workload import parse_lengths, random_lengths, read_workload, trace_path
from pdserve.errors import ConfigError

_NUM_RANDOM = 2000


@dataclass(frozen=True, slots=True)
class Lengths:
    """Requests of a workload, without their times."""

    name: str
    requests: tuple[Arrival, ...]

    def poisson(self, rate_per_s: float, seconds: float, seed: int) -> list[Arrival]:
        """Return requests that come at random for some seconds, from a random place in the workload on."""
        draw, arrivals, now_s = random.Random(seed), list[Arrival](), 0.0
        start = draw.randrange(len(self.requests))
        for request in islice(cycle(self.requests), start, None):
            now_s += draw.expovariate(rate_per_s)
            if now_s > seconds:
                return arrivals
            arrivals.append(replace(request, start_s=now_s))
        raise AssertionError("a cycle has ended")


def read_lengths(text: str, scale: float, max_tokens: int, seed: int) -> Lengths:
    """Return the lengths of a trace, or random ones written INxOUT; scaled, and cut at `max_tokens` each."""
    path, means = trace_path(text), parse_lengths(text)
    if means is not None:
        workload = random_lengths(_NUM_RANDOM, means[0], means[1], seed, means[2])
    elif path.suffix:
        workload = read_workload(path)
    else:
        raise ConfigError(f"--workload: {text!r} is neither a trace nor INxOUT, for example azure-conv or 1155x211")
    scaled = workload.scaled(scale, max_tokens)
    requests = [Arrival(0.0, each.prompt_tokens, min(max_tokens, each.output_tokens)) for each in scaled.arrivals]
    return Lengths(f"{workload.name}, lengths x {scale:g}", tuple(requests))


def mean_tokens(arrivals: Sequence[Arrival]) -> tuple[float, float]:
    """Return the mean lengths of prompts and answers."""
    count = max(1, len(arrivals))
    return sum(a.prompt_len for a in arrivals) / count, sum(a.output_len for a in arrivals) / count
