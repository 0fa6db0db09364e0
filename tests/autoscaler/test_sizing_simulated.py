"""What is predicted of pools is what the capacity simulator sees of them, with the router's own admission."""

import pytest

from pdserve.autoscaler.observation import Capacity
from pdserve.autoscaler.schema import Objectives
from pdserve.autoscaler.sizing import Sizer
from pdserve.autoscaler.traffic import DecayingCounts
from pdserve.base.roles import POOLS, Role
from pdserve.capacity.cluster import simulate
from pdserve.capacity.worker import Shape
from pdserve.measure.outcomes import Objective
from pdserve.measure.workload import Workload, random_lengths
from pdserve.perfmodel.profile import read_profile, shipped_profile
from pdserve.protocol.reports import NUM_BANDS, Demand, band_of

NUM_REQUESTS = 500
OBJECTIVE = Objective(0.6, 0.06)


def counted(workload: Workload) -> Demand:
    prompts, answers = [0] * NUM_BANDS, [0] * NUM_BANDS
    for each in workload.arrivals:
        prompts[band_of(each.prompt_tokens)] += 1
        answers[band_of(each.output_tokens)] += 1
    return Demand(len(workload.arrivals), prompts=tuple(prompts), answers=tuple(answers))


@pytest.mark.parametrize(
    ("prefill", "decode", "answer", "rate", "within"),
    [
        (2, 2, 128, 24.0, 0.04),
        *(pytest.param(*case, marks=pytest.mark.long) for case in ((2, 2, 128, 12.0, 0.01), (1, 3, 256, 14.0, 0.04))),
    ],
)
def test_predicted_attainment_is_near_the_simulated_one(
    prefill: int, decode: int, answer: int, rate: float, within: float
) -> None:
    profile = read_profile(shipped_profile())
    workload = random_lengths(NUM_REQUESTS, 512, answer, seed=1).at_rate(rate)
    run = simulate(profile, Shape(prefill, decode, local_prefill=False), "goodput", workload, OBJECTIVE)
    warm = run.outcomes[NUM_REQUESTS // 5 :]
    attained = sum(outcome.meets(OBJECTIVE) for outcome in warm) / len(warm)

    counts, one = DecayingCounts(1e9), profile.configuration(1)
    counts.add(counted(workload), NUM_REQUESTS / rate)
    traffic = counts.traffic()
    assert traffic is not None
    objectives = Objectives(ttft_ms=OBJECTIVE.ttft_s * 1e3, tpot_ms=OBJECTIVE.tpot_s * 1e3)
    capacities = dict.fromkeys(POOLS, Capacity(one.kv_tokens, 256, 2048))
    sizer = Sizer(traffic, objectives, dict.fromkeys(POOLS, one.costs()), capacities)
    assert sizer.joint({Role.PREFILL: prefill, Role.DECODE: decode}) == pytest.approx(attained, abs=within)
