"""A burst, in which predictions are far off, makes the goodput policy refuse nothing that a quiet cluster can serve."""

import random
from collections.abc import Iterator
from itertools import cycle, islice
from statistics import fmean

from pdserve.capacity.cluster import SimCluster
from pdserve.capacity.worker import Shape
from pdserve.measure.outcomes import ANY, Objective
from pdserve.measure.read_workload import parse_workload
from pdserve.measure.workload import Arrival, Workload
from pdserve.perfmodel.profile import Profile

# SmolLM2 on one slow core each: 3 requests a second, of an eighth of the Azure conversation's lengths.
SLOW = Profile.model_validate(
    {
        "model": "smollm2-135m-instruct",
        "kv_bytes_per_token": 23040,
        "link": {"bytes_per_s": 2e9, "latency_s": 0.002},
        "configurations": [
            {
                "tp": 1,
                "kv_tokens": 200_000,
                "prefill": {"step_s": 0.04, "token_s": 0.0022, "token_context_s": 1e-7},
                "decode": [{"step_s": 0.0085, "sequence_s": 0.0014, "kv_token_s": 5e-7}],
            }
        ],
    }
)
SHAPE = Shape(1, 1, decode_chunk=2048, max_num_seqs=64, local_prefill=False)
OBJECTIVE = Objective(2.0, 0.0213)  # six and two times what one request takes
QUIET_S = 61.0  # when the burst is long over


def times(rng: random.Random) -> Iterator[float]:
    """Yield when requests come: 48 in bursts, 3 a second for 16 s, and from a minute on half as many."""
    yield from (0.0,) * 24 + (6.0,) * 24
    for start_s, end_s, rate in ((6.0, 22.0, 3.0), (45.0, 60.0, 0.9), (QUIET_S, QUIET_S + 30, 1.5)):
        at_s = start_s + rng.expovariate(rate)
        while at_s < end_s:
            yield at_s
            at_s += rng.expovariate(rate)


def attained(policy: str, seed: int) -> float:
    """Return the share of the quiet half minute's requests that were within both objectives."""
    rng, trace = random.Random(seed), parse_workload("azure-conv", 2000, seed).arrivals
    lengths = islice(cycle(trace), rng.randrange(len(trace)), None)
    arrivals = tuple(
        Arrival(at_s, max(2, each.prompt_tokens // 8), max(1, each.output_tokens // 8))
        for at_s, each in zip(times(rng), lengths, strict=False)
    )
    cluster = SimCluster(SLOW, SHAPE, policy, Workload("burst", arrivals), ANY)
    cluster.expect(iter(arrivals))
    cluster.advance(sum(each.at_s < QUIET_S for each in arrivals))
    cluster.objective = OBJECTIVE
    outcomes = cluster.advance(len(arrivals) + 1).outcomes
    return fmean([each.meets(OBJECTIVE) for each in outcomes if each.sent_s > QUIET_S])


def test_what_a_burst_took_refuses_nothing_at_half_the_capacity() -> None:
    seeds = range(6)
    goodput, round_robin = (fmean([attained(policy, seed) for seed in seeds]) for policy in ("goodput", "round_robin"))
    assert goodput > 0.9
    assert goodput > round_robin - 0.05
