"""Admission counts what is on its way to decode workers, so prompts under way and decode load do not swing.

A request joins its decode worker some time after it was admitted. Judged by the present decode load, a worker looks
empty until a wave of admitted requests arrives, and full until it has left (Mooncake, Qin et al., FAST 2025). With
alike requests and prefill workers enough for each wave, that has a prefill swing of about 1, 7 to 9 % of the requests
within both objectives, and 27 to 31 % admitted but slow. As many independent requests have a swing of about 0.4.
"""

from bisect import bisect_right
from collections.abc import Sequence
from math import pi, sin
from statistics import fmean, pstdev

import pytest

from pdserve.capacity.cluster import simulate
from pdserve.capacity.worker import Shape
from pdserve.measure.outcomes import Objective
from pdserve.measure.workload import random_lengths
from pdserve.perfmodel.profile import read_profile, shipped_profile

PROFILE = read_profile(shipped_profile())
OBJECTIVE = Objective(2.0, 0.05)
SAMPLE_S = 0.1
SETTLED = WINDOW = 100  # samples


def swing(loads: Sequence[int]) -> float:
    """Return the standard deviation of a load over its mean, within windows: slow drift does not count."""
    starts = range(SETTLED, len(loads) - WINDOW + 1, WINDOW)
    return fmean([pstdev(loads[start : start + WINDOW]) / fmean(loads[start : start + WINDOW]) for start in starts])


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.long) for seed in (2, 3))])
def test_what_is_on_its_way_to_decode_workers_counts(seed: int) -> None:
    workload = random_lengths(900, 4000, 45, seed, 0.4).at_rate(25.0)
    run = simulate(PROFILE, Shape(16, 2, local_prefill=False), "goodput", workload, OBJECTIVE)
    served = [outcome for outcome in run.outcomes if outcome.is_good]
    starts, ends = sorted(each.placed_s for each in served), sorted(each.first_s for each in served)
    times = [number * SAMPLE_S for number in range(int(run.outcomes[-1].sent_s / SAMPLE_S))]
    prefilling = [bisect_right(starts, time_s) - bisect_right(ends, time_s) for time_s in times]
    assert swing(prefilling) < 0.5
    assert sum((each.tpot_s or 0) > OBJECTIVE.tpot_s for each in served) < 0.15 * len(run.outcomes)
    assert sum(each.meets(OBJECTIVE) for each in served) > 0.2 * len(run.outcomes)


def test_a_swing_counts_waves_and_neither_drift_nor_the_start() -> None:
    seconds = [i / 10 for i in range(600)]
    drift = [round(1000 + 20 * time_s) for time_s in seconds]
    waves = [round(1000 + 500 * sin(2 * pi * time_s / 5)) for time_s in seconds]
    assert swing(drift) < 0.05
    assert swing(waves) == pytest.approx(0.5 / 2**0.5, rel=0.01)
    assert swing([100] * 100 + [7] * 500) == 0
